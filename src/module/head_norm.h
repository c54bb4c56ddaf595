#pragma once

#include <mha/multi_head_attention.h>

namespace mha::detail {

/// How rows are normalised: multiplied by `gain` (D), then `bias` (D) is added if defined.
struct HeadNorm {
  QKNorm kind;
  double eps;
  at::Tensor gain, bias;
};

/// Rows of heads (N, H, T, D) normalised over D, in float32 or wider. With gradients.
at::Tensor normalise(const at::Tensor& heads, const HeadNorm& norm);

/// The same in place, of float32 on the CPU with rows of stride 1, without gradients.
void normalise_in_place(const at::Tensor& heads, const HeadNorm& norm);

}  // namespace mha::detail
