#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace mha::detail {

/// Tensors equal to `inputs` to differentiate by, each on its own: where an input is computed
/// from another, or is the same tensor, its gradient is not part of the other's. With
/// `create_graph` gradients of gradients flow on to `inputs`.
std::vector<at::Tensor> separate(std::vector<at::Tensor> inputs, bool create_graph);

/// What becomes of the graph that gradients are taken by.
enum class Graph {
  freed,     ///< while it is walked
  kept,      ///< for another walk
  recorded,  ///< kept, and the gradients have gradients themselves
};

/// Gradients of `inputs`, undefined for those that require none and those that no gradient
/// reaches. Results without a gradient of their own, or that depend on no input, are left out;
/// further ones than there are gradients too.
std::vector<at::Tensor> gradients(const std::vector<at::Tensor>& results,
                                  const std::vector<at::Tensor>& grads,
                                  const std::vector<at::Tensor>& inputs, Graph graph);

}  // namespace mha::detail
