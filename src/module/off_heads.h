#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>

// Heads that a call's head mask switches off. Whatever they hold adds 0 to the output, and 0 to
// gradients; but 0 * NaN is NaN, so what of them is not finite is computed with as zeros.
namespace mha::detail {

/// (N or 1, H) bool: the heads that `head_mask`, (N, H) or (H), switches off. Undefined if none
/// is, or no mask is given.
at::Tensor heads_off(const at::Tensor& head_mask, at::Device device);

/// The same of the key/value heads: those whose query heads are all off. Undefined likewise.
at::Tensor kv_heads_off(const at::Tensor& off, int64_t kv_heads);

/// `heads` (N, T, H, D) with zeros, which pass no gradient on, in the rows of heads that are
/// off and whose squares are not finite.
at::Tensor without_off_heads(const at::Tensor& heads, const at::Tensor& off);

/// tokens W^T + b with zeros, which pass no gradient on, in the columns of heads that are off
/// in every sample and have a weight that is not finite. Undefined if there are none.
at::Tensor project_without_off_heads(torch::nn::LinearImpl& layer, const at::Tensor& tokens,
                                     const at::Tensor& off);

/// merged W^T + b without the columns of W that belong to heads which are off in every sample
/// and are not finite. Undefined if there are none.
at::Tensor merge_without_off_heads(torch::nn::LinearImpl& layer, const at::Tensor& merged,
                                   const at::Tensor& off);

}  // namespace mha::detail
