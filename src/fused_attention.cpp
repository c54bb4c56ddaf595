#include "fused_attention.h"

#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "gradients.h"
#include "kernel_attention.h"
#include "plain_attention.h"

namespace mha::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What the backward needs beyond tensors.
struct Settings : torch::CustomClassHolder {
  ResolvedMask mask;  // its tensors are kept by save_for_backward, which notices changes
  AttentionCall call;
};

// Gradients of the plain path: they have gradients themselves, and flow from the weights as
// well. `inputs` are query, key, value and the terms that the mask adds.
variable_list plain_gradients(variable_list inputs, const variable_list& grad_outputs,
                              ResolvedMask mask, const AttentionCall& call) {
  const bool create_graph = at::GradMode::is_enabled();
  at::AutoGradMode enable_grad(true);
  if (!create_graph) {
    for (auto& input : inputs) input = input.detach().requires_grad_(input.requires_grad());
  }
  mask.add.assign(inputs.begin() + 3, inputs.end());
  const auto result = plain_attention(inputs[0], inputs[1], inputs[2], mask, call);
  return gradients({result.output, result.weights}, grad_outputs, inputs, create_graph);
}

class FusedAttention : public torch::autograd::Function<FusedAttention> {
 public:
  // Gives (output), or (output, weights) if weights are wanted. `added` are the mask's terms,
  // since only arguments get gradients.
  static variable_list forward(AutogradContext* context, const at::Tensor& query,
                               const at::Tensor& key, const at::Tensor& value,
                               at::TensorList /*added*/, const ResolvedMask& mask,
                               const AttentionCall& call) {
    const auto result = kernel_attention(query, key, value, mask, call, true);
    auto settings = c10::make_intrusive<Settings>();
    settings->mask = mask;
    settings->call = call;
    settings->call.row_statistics = nullptr;
    variable_list saved{
        query, key, value, result.output, result.row_maximum, result.row_factor};
    for (auto* list : tensor_lists(settings->mask)) {
      saved.insert(saved.end(), list->begin(), list->end());
    }
    context->save_for_backward(std::move(saved));
    context->saved_data["settings"] = c10::IValue::make_capsule(std::move(settings));
    context->set_materialize_grads(false);
    if (!result.weights.defined()) return {result.output};
    return {result.output, result.weights};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    const auto saved = context->get_saved_variables();
    const auto settings = c10::static_intrusive_pointer_cast<Settings>(
        context->saved_data["settings"].toCapsule());
    ResolvedMask mask = settings->mask;
    auto next = saved.begin() + 6;
    for (auto* list : tensor_lists(mask)) {
      for (auto& tensor : *list) tensor = *next++;
    }
    const auto &q = saved[0], &k = saved[1], &v = saved[2];
    const auto& grad_output = grad_outputs[0];
    const bool from_weights = grad_outputs.size() > 1 && grad_outputs[1].defined();
    variable_list grads(3);
    if (at::GradMode::is_enabled() || from_weights) {
      variable_list inputs{q, k, v};
      inputs.insert(inputs.end(), mask.add.begin(), mask.add.end());
      grads = plain_gradients(std::move(inputs), grad_outputs, mask, settings->call);
    } else if (grad_output.defined()) {
      grads = kernel_attention_backward(q, k, v, {saved[3], {}, saved[4], saved[5]},
                                        grad_output, mask, settings->call);
    }
    grads.resize(3 + mask.add.size() + 2);  // none for the mask and the call
    return grads;
  }
};

}  // namespace

AttentionOutput fused_attention(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const ResolvedMask& mask,
                                const AttentionCall& call) {
  const auto dtype = query.scalar_type();
  const auto narrow = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(dtype) : tensor;
  };
  const bool records =
      at::GradMode::is_enabled() && (query.requires_grad() || key.requires_grad() ||
                                     value.requires_grad() || any_wants_gradient(mask.add));
  // The half types are for storage, and all sums are float32.
  if (records) {
    const auto results =
        FusedAttention::apply(query.to(at::kFloat), key.to(at::kFloat), value.to(at::kFloat),
                              at::TensorList(mask.add), mask, call);
    return {narrow(results[0]), results.size() > 1 ? narrow(results[1]) : at::Tensor()};
  }
  const auto result = kernel_attention(query.to(at::kFloat), key, value, mask, call, false);
  return {narrow(result.output), narrow(result.weights)};
}

}  // namespace mha::detail
