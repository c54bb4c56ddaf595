#include "attention/recomputed.h"

#include <torch/csrc/autograd/custom_function.h>

#include <cstddef>
#include <iterator>
#include <utility>

#include "attention/gradients.h"

namespace mha::detail {
namespace {

using TensorVector = std::vector<at::Tensor>;

struct Recomputation : torch::CustomClassHolder {
  Recomputable function;
  size_t inputs = 0;
  std::vector<bool> defined;  // which results are
};

TensorVector defined_of(const TensorVector& tensors) {
  TensorVector defined;
  for (const auto& tensor : tensors) {
    if (tensor.defined()) defined.push_back(tensor);
  }
  return defined;
}

// The tensors, in order, where `defined`.
TensorVector spread(const TensorVector& tensors, const std::vector<bool>& defined) {
  TensorVector all(defined.size());
  auto next = tensors.begin();
  for (size_t i = 0; i < all.size(); ++i) {
    if (defined[i]) all[i] = *next++;
  }
  return all;
}

// The gradients of the first `count` inputs, as a function of these and of the results'
// gradients, which follow them.
Recomputable gradients_of(const Recomputable& function, size_t count,
                          const std::vector<bool>& given) {
  return [=](const TensorVector& all, const TensorVector& constants) {
    const bool create_graph = at::GradMode::is_enabled();
    at::AutoGradMode enable_grad(true);
    const auto middle = all.begin() + static_cast<ptrdiff_t>(count);
    const auto inputs = separate({all.begin(), middle}, create_graph);
    return gradients(function(inputs, constants), spread({middle, all.end()}, given), inputs,
                     create_graph ? Graph::recorded : Graph::freed);
  };
}

class Recomputed : public torch::autograd::Function<Recomputed> {
 public:
  static TensorVector forward(torch::autograd::AutogradContext* context, at::TensorList inputs,
                              const TensorVector& constants,
                              const c10::intrusive_ptr<Recomputation>& what) {
    const auto results = what->function(inputs.vec(), constants);
    what->inputs = inputs.size();
    for (const auto& result : results) what->defined.push_back(result.defined());
    auto saved = inputs.vec();
    saved.insert(saved.end(), constants.begin(), constants.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["what"] = c10::IValue::make_capsule(what);
    context->set_materialize_grads(false);
    return defined_of(results);
  }

  static TensorVector backward(torch::autograd::AutogradContext* context,
                               const TensorVector& grads) {
    const auto what = c10::static_intrusive_pointer_cast<Recomputation>(
        context->saved_data["what"].toCapsule());
    const auto saved = context->get_saved_variables();
    const auto middle = saved.begin() + static_cast<ptrdiff_t>(what->inputs);
    const TensorVector inputs(saved.begin(), middle), constants(middle, saved.end());
    auto results =
        recomputed_gradients(what->function, inputs, spread(grads, what->defined), constants);
    results.resize(what->inputs + 2);  // none for the constants and the function
    return results;
  }
};

}  // namespace

std::vector<at::Tensor> recomputed(const Recomputable& function,
                                   const std::vector<at::Tensor>& inputs,
                                   const std::vector<at::Tensor>& constants) {
  const auto what = c10::make_intrusive<Recomputation>();
  what->function = function;
  const auto results = Recomputed::apply(at::TensorList(inputs), constants, what);
  return spread(results, what->defined);
}

std::vector<at::Tensor> recomputed_gradients(const Recomputable& function,
                                             const std::vector<at::Tensor>& inputs,
                                             const std::vector<at::Tensor>& grad_results,
                                             const std::vector<at::Tensor>& constants) {
  auto all = inputs;
  std::vector<bool> given;
  for (const auto& grad : grad_results) {
    given.push_back(grad.defined());
    if (grad.defined()) all.push_back(grad);
  }
  const auto of_inputs = gradients_of(function, inputs.size(), given);
  return at::GradMode::is_enabled() ? recomputed(of_inputs, all, constants)
                                    : of_inputs(all, constants);
}

}  // namespace mha::detail
