#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "attention/attention.h"
#include "mask/resolved_mask.h"

// Calls of the CPU kernels: their arguments, the choice among them, and their tasks. A value
// that is not finite reaches every query here, though a mask keeps it from some: see
// attention/kernel_attention.h.
namespace mha::detail {

/// In float32; on matrix tiles the output is bfloat16.
struct KernelResult : AttentionResult {
  bool is_finite = true;  ///< no number of the output is infinite or NaN
};

/// `query` (N, H, L, D), `key` and `value` may be bfloat16 or float16; these two are read as
/// they are stored where the kernels can. Products of pairs are rounded to bfloat16 only if
/// `query` is.
KernelResult kernel_forward(const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const ResolvedMask& mask,
                            const AttentionCall& call);

/// Gradients of query, key, value and of each term that the mask adds, undefined for the terms
/// that ask for none. All float32, or where `takes_matrix_tiles` all bfloat16 and no term asks.
/// `result` is that of a forward with `Statistics::needed`.
std::vector<at::Tensor> kernel_backward(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value, const KernelResult& result,
                                        const at::Tensor& grad_output, const ResolvedMask& mask,
                                        const AttentionCall& call);

/// How the kernels compute the forward.
enum class ForwardKernel {
  chunks,          ///< few queries: keys and values pass by once, as they are stored
  tiles,           ///< tiles of queries, float32
  tiles_of_pairs,  ///< tiles of queries, bfloat16 multiplied two by two
  widened_tiles,   ///< tiles of queries, float32 copies of keys and values
  matrix_tiles,    ///< bfloat16 on the CPU's matrix tiles (AMX)
};

/// Whether the instruction set in use has tiles and this call is for them, but for few queries:
/// all bfloat16, and no weights wanted.
bool takes_matrix_tiles(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const AttentionCall& call);

/// The one that `kernel_forward` takes for these arguments, whatever their numbers.
ForwardKernel choose_forward_kernel(const at::Tensor& query, const at::Tensor& key,
                                    const at::Tensor& value, const ResolvedMask& mask,
                                    const AttentionCall& call);

}  // namespace mha::detail
