#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "attention/kernel_call.h"

// Attention by the CPU kernels, without autograd, with what is infinite or NaN kept from the
// queries that may not see it. Arguments and results are those of `kernel_forward` and
// `kernel_backward`.
namespace mha::detail {

KernelResult kernel_attention(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const ResolvedMask& mask,
                              const AttentionCall& call);

std::vector<at::Tensor> kernel_attention_backward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const KernelResult& result, const at::Tensor& grad_output, const ResolvedMask& mask,
    const AttentionCall& call);

/// What the kernels know of each row, without the output.
RowStatistics row_statistics(const at::Tensor& query, const at::Tensor& key,
                             const ResolvedMask& mask, const Scoring& scoring);

}  // namespace mha::detail
