#include "attention/gradients.h"

#include <torch/csrc/autograd/autograd.h>

namespace mha::detail {

std::vector<at::Tensor> separate(std::vector<at::Tensor> inputs, bool create_graph) {
  for (auto& input : inputs) {
    input = create_graph ? input.view_as(input)
                         : input.detach().requires_grad_(input.requires_grad());
  }
  return inputs;
}

std::vector<at::Tensor> gradients(const std::vector<at::Tensor>& results,
                                  const std::vector<at::Tensor>& grads,
                                  const std::vector<at::Tensor>& inputs, Graph graph) {
  std::vector<at::Tensor> reached, given, wanted, all;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined() || !results[i].requires_grad()) continue;
    reached.push_back(results[i]);
    given.push_back(grads[i]);
  }
  for (const auto& input : inputs) {
    if (input.requires_grad()) wanted.push_back(input);
  }
  if (reached.empty() || wanted.empty()) return std::vector<at::Tensor>(inputs.size());
  const auto found =
      torch::autograd::grad(reached, wanted, given, /*retain_graph=*/graph != Graph::freed,
                            /*create_graph=*/graph == Graph::recorded, /*allow_unused=*/true);
  auto next = found.begin();
  for (const auto& input : inputs) {
    all.push_back(input.requires_grad() ? *next++ : at::Tensor());
  }
  return all;
}

}  // namespace mha::detail
