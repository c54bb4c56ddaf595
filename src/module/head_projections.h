#pragma once

#include <mha/multi_head_attention.h>

#include "module/packed_weight.h"

namespace mha::detail {

/// Rotary positions, (T) or (N, T) each; undefined in a module without them.
struct HeadPositions {
  at::Tensor query, key;
};

/// The inputs of a module, (N, T, width) each.
struct Tokens {
  at::Tensor query, key, value;
  HeadPositions positions;
  at::Tensor off = {};  // as `heads_off`; of them gradients are 0 whatever they hold
};

/// Projected and split into heads: (N, H, L, D), and (N, Hk, S, D) twice.
struct Heads {
  at::Tensor query, key, value;
};

/// Applies W_q, W_k and W_v, normalises and rotates queries and keys, and appends the keys and
/// values of `add_bias_kv` and `add_zero_attn`. Without gradients in float32 on the CPU it is
/// one pass of the kernels. The caller says whether queries and keys end before its own call
/// does.
Heads project_heads(MultiHeadAttentionImpl& module, PackedWeights& cache, const Tokens& tokens,
                    bool heads_are_passing);

/// x W_g, (N, L, H, 1 or D).
at::Tensor project_gate(MultiHeadAttentionImpl& module, PackedWeights& cache,
                        const at::Tensor& query, const at::Tensor& off);

/// Merges the heads (N, H, L, D), those that are off being 0, and applies W_o: (N, L, E), laid
/// out as the module's `batch_first` says.
at::Tensor project_output(MultiHeadAttentionImpl& module, PackedWeights& cache,
                          const at::Tensor& heads, const at::Tensor& off);

}  // namespace mha::detail
