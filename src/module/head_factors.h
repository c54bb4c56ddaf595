#pragma once

#include <mha/multi_head_attention.h>

#include "module/packed_weight.h"

namespace mha::detail {

/// Throws `c10::Error` unless `head_mask` is undefined, or floating (H) or (N, H).
void check_head_mask(const at::Tensor& head_mask, int64_t batch, int64_t heads,
                     at::Device device);

/// The heads' output (N, H, L, D) times sigmoid(query W_g) and times the call's `head_mask`,
/// where the module has a gate and the call a mask. A factor of 0 gives 0, whatever it
/// multiplies; `off` says which are, as `heads_off`. Without gradients it may be computed in
/// place. `query` (N, L, E).
at::Tensor multiply_heads(MultiHeadAttentionImpl& module, PackedWeights& cache,
                          const at::Tensor& heads, const at::Tensor& query,
                          const at::Tensor& head_mask, const at::Tensor& off);

}  // namespace mha::detail
