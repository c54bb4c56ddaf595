#include "attention/saved_call.h"

#include <utility>

namespace mha::detail {
namespace {

// All but the tensors, in whose places stand undefined ones.
struct CallSettings : torch::CustomClassHolder {
  ResolvedMask mask;
  AttentionCall call;
};

}  // namespace

std::vector<at::Tensor> SavedCall::inputs() const {
  std::vector<at::Tensor> inputs{tensors[0], tensors[1], tensors[2]};
  for (const auto& term : added_terms(mask)) inputs.push_back(term);
  if (call.scoring.sinks.defined()) inputs.push_back(call.scoring.sinks);
  return inputs;
}

void save_call(torch::autograd::AutogradContext* context, std::vector<at::Tensor> tensors,
               ResolvedMask mask, AttentionCall call) {
  auto settings = c10::make_intrusive<CallSettings>();
  const auto count = static_cast<int64_t>(tensors.size());
  for (auto* list : tensor_lists(mask)) {
    for (auto& tensor : *list) tensors.push_back(std::exchange(tensor, at::Tensor()));
  }
  tensors.push_back(std::exchange(call.scoring.sinks, at::Tensor()));
  settings->mask = std::move(mask);
  settings->call = std::move(call);
  context->save_for_backward(std::move(tensors));
  context->saved_data["count"] = count;
  context->saved_data["settings"] = c10::IValue::make_capsule(std::move(settings));
}

SavedCall saved_call(torch::autograd::AutogradContext* context) {
  auto tensors = context->get_saved_variables();
  const auto settings = c10::static_intrusive_pointer_cast<CallSettings>(
      context->saved_data["settings"].toCapsule());
  const auto first = tensors.begin() + context->saved_data["count"].toInt();
  SavedCall saved{{tensors.begin(), first}, settings->mask, settings->call};
  auto next = first;
  for (auto* list : tensor_lists(saved.mask)) {
    for (auto& tensor : *list) tensor = *next++;
  }
  saved.call.scoring.sinks = *next;
  return saved;
}

}  // namespace mha::detail
