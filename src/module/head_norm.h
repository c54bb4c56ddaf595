#pragma once

#include <mha/multi_head_attention.h>

#include <cstdint>
#include <vector>

namespace mha::detail {

/// How queries or keys are normalised: multiplied by `gain`, then `bias` is added, each if
/// defined.
struct HeadNorm {
  QKNorm kind;
  QKNormScope scope;
  double eps;
  at::Tensor gain, bias;
};
HeadNorm query_norm(const MultiHeadAttentionImpl& module);
HeadNorm key_norm(const MultiHeadAttentionImpl& module);

/// The shape of the gain, and of the bias, for so many heads of size `head_dim`; nothing if the
/// options have none.
std::vector<int64_t> gain_shape(const MultiHeadAttentionOptions& options, int64_t heads,
                                int64_t head_dim);

/// Heads (N, H, T, D) normalised in float32 or wider. With gradients.
at::Tensor normalise(const at::Tensor& heads, const HeadNorm& norm);

/// The same in place, of float32 on the CPU with rows of stride 1, without gradients.
void normalise_in_place(const at::Tensor& heads, const HeadNorm& norm);

}  // namespace mha::detail
