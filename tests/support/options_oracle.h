#pragma once

#include <mha/multi_head_attention.h>

#include "support/oracle.h"

namespace mha::test {

/// `oracle_module` with rotary positions, normalised queries and keys, temperature tuning, gate
/// and head mask: by plain loops in double, on batch-first inputs. Reads the module's
/// parameters and options and the call's arguments, not its code. Frequencies are those of
/// `rotary_frequencies`, which have tests of their own.
AttentionOutput oracle_module(const MultiHeadAttention& module, const at::Tensor& query,
                              const at::Tensor& key, const at::Tensor& value,
                              const CallOptions& call);

/// Appends the module's own keys and values (`add_bias_kv`, then `add_zero_attn`) to heads
/// (N, Hk, S, D) in double; gives their number.
int64_t append_own_keys(const MultiHeadAttention& module, at::Tensor& k, at::Tensor& v);

}  // namespace mha::test
