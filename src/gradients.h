#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace mha::detail {

/// Gradients of `inputs`, undefined for those that require none and those that no gradient
/// reaches. Results without a gradient of their own are left out; further ones than there are
/// gradients too. With `create_graph` the gradients have gradients themselves.
std::vector<at::Tensor> gradients(const std::vector<at::Tensor>& results,
                                  const std::vector<at::Tensor>& grads,
                                  const std::vector<at::Tensor>& inputs, bool create_graph);

}  // namespace mha::detail
