#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "attention/attention.h"
#include "mask/resolved_mask.h"

// Attention by the CPU kernels, without autograd.
namespace mha::detail {

struct KernelResult {
  at::Tensor output, weights;          ///< (N, H, L, Dv); undefined if not wanted
  at::Tensor row_maximum, row_factor;  ///< (N, H, L) each, for the backward; else undefined
  bool is_finite = true;               ///< no number of the output is infinite or NaN
};

/// `query` (N, H, L, D) is float32; `key` and `value` may be bfloat16 or float16, and are read
/// as they are stored where the kernels can. Products are rounded to bfloat16 only if `call`
/// says that the query was. Results are float32.
KernelResult kernel_attention(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const ResolvedMask& mask,
                              const AttentionCall& call, bool for_backward);

/// Gradients of query, key, value and of each term that the mask adds, undefined for the terms
/// that ask for none. All float32.
std::vector<at::Tensor> kernel_attention_backward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const KernelResult& result, const at::Tensor& grad_output, const ResolvedMask& mask,
    const AttentionCall& call);

/// What the kernels know of each row, without the output. Float32.
RowStatistics row_statistics(const at::Tensor& query, const at::Tensor& key,
                             const ResolvedMask& mask, const Scoring& scoring);

/// How the kernels compute the forward.
enum class ForwardKernel {
  chunks,          ///< few queries: keys and values pass by once, as they are stored
  tiles,           ///< tiles of queries, float32
  tiles_of_pairs,  ///< tiles of queries, bfloat16 multiplied two by two
  widened_tiles,   ///< tiles of queries, float32 copies of keys and values
};

/// The one that `kernel_attention` takes for these arguments. Looks at sizes only.
ForwardKernel choose_forward_kernel(const at::Tensor& query, const at::Tensor& key,
                                    const at::Tensor& value, const ResolvedMask& mask,
                                    const AttentionCall& call, bool for_backward);

/// Whether any of the tensors asks for its gradient.
bool any_wants_gradient(const std::vector<at::Tensor>& tensors);

}  // namespace mha::detail
