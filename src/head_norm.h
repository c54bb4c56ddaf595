#pragma once

#include <mha/multi_head_attention.h>

namespace mha::detail {

/// Rows of heads (N, H, T, D) normalised over D and multiplied by `gain` (D), in float32 or
/// wider. With gradients.
at::Tensor normalise(const at::Tensor& heads, const at::Tensor& gain, QKNorm norm, double eps);

/// The same in place, of float32 on the CPU with rows of stride 1, without gradients.
void normalise_in_place(const at::Tensor& heads, const at::Tensor& gain, QKNorm norm,
                        double eps);

}  // namespace mha::detail
