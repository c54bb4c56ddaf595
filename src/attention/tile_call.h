#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "attention/kernel_call.h"

// Calls of the kernels on matrix tiles, over bfloat16: their arguments and tasks. Results are
// bfloat16, statistics float32.
namespace mha::detail {

/// Without weights.
KernelResult tile_forward(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, const ResolvedMask& mask,
                          const AttentionCall& call);

/// Gradients of query, key and value.
std::vector<at::Tensor> tile_backward(const at::Tensor& query, const at::Tensor& key,
                                      const at::Tensor& value, const KernelResult& result,
                                      const at::Tensor& grad_output, const ResolvedMask& mask,
                                      const AttentionCall& call);

}  // namespace mha::detail
