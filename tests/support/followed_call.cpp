#include "support/followed_call.h"

#include <ATen/ops/_make_dual.h>
#include <ATen/ops/_unpack_dual.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/runtime/interpreter.h>

namespace mha::test {

std::vector<at::Tensor> replay(const Followed& call, const std::vector<at::Tensor>& recorded,
                               const std::vector<at::Tensor>& given) {
  using torch::jit::Stack;
  const auto run = [&](const Stack& stack) {
    std::vector<at::Tensor> inputs;
    for (const auto& value : stack) inputs.push_back(value.toTensor());
    const auto results = call(inputs);
    return Stack(results.begin(), results.end());
  };
  const auto traced =
      torch::jit::tracer::trace(Stack(recorded.begin(), recorded.end()), run,
                                [](const at::Tensor&) { return std::string(); });
  Stack stack(given.begin(), given.end());
  torch::jit::InterpreterState(torch::jit::Code(traced.first->graph, "call")).run(stack);
  std::vector<at::Tensor> results;
  for (const auto& value : stack) results.push_back(value.toTensor());
  return results;
}

std::vector<at::Tensor> forward_mode(const Followed& call,
                                     const std::vector<at::Tensor>& inputs,
                                     const std::vector<at::Tensor>& tangents) {
  const auto level = torch::autograd::forward_ad::enter_dual_level();
  std::vector<at::Tensor> duals, derivatives;
  for (size_t i = 0; i < inputs.size(); ++i) {
    duals.push_back(tangents[i].defined()
                        ? at::_make_dual(inputs[i], tangents[i], static_cast<int64_t>(level))
                        : inputs[i]);
  }
  try {
    for (const auto& result : call(duals)) {
      derivatives.push_back(std::get<1>(at::_unpack_dual(result, static_cast<int64_t>(level))));
    }
  } catch (...) {
    torch::autograd::forward_ad::exit_dual_level(level);
    throw;
  }
  torch::autograd::forward_ad::exit_dual_level(level);
  return derivatives;
}

std::vector<at::Tensor> central_differences(const Followed& call,
                                            const std::vector<at::Tensor>& inputs,
                                            const std::vector<at::Tensor>& tangents) {
  constexpr double step = 1e-5;
  const auto at_distance = [&](double distance) {
    auto moved = inputs;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (tangents[i].defined()) moved[i] = inputs[i] + tangents[i] * distance;
    }
    return call(moved);
  };
  auto ahead = at_distance(step);
  const auto behind = at_distance(-step);
  for (size_t i = 0; i < ahead.size(); ++i) ahead[i] = (ahead[i] - behind[i]) / (2 * step);
  return ahead;
}

}  // namespace mha::test
