#pragma once

#include <mha/multi_head_attention.h>

#include <cstdint>

#include "module/packed_weight.h"
#include "module/tokens.h"
#include "runtime/recycled.h"

namespace mha::detail {

/// The keys that a module appends to those of each call: of `add_bias_kv` and `add_zero_attn`.
int64_t appended_keys(const MultiHeadAttentionOptions& options);

/// Applies W_q, W_k and W_v, normalises and rotates queries and keys, and appends the keys and
/// values of `add_bias_kv` and `add_zero_attn`. Without gradients in float32 on the CPU it is
/// one pass of the kernels. `lifetime` is that of queries and keys; values are passing.
Heads project_heads(MultiHeadAttentionImpl& module, PackedWeights& cache, const Tokens& tokens,
                    Lifetime lifetime);

/// x W_g, (N, L, H, 1 or D).
at::Tensor project_gate(MultiHeadAttentionImpl& module, PackedWeights& cache,
                        const at::Tensor& query, const at::Tensor& off);

/// Merges the heads (N, H, L, D), those that are off being 0, and applies W_o: (N, L, E), laid
/// out as the module's `batch_first` says.
at::Tensor project_output(MultiHeadAttentionImpl& module, PackedWeights& cache,
                          const at::Tensor& heads, const at::Tensor& off);

}  // namespace mha::detail
