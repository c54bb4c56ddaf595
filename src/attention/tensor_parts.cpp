#include "attention/tensor_parts.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

namespace mha::detail {
namespace {

using PartList = std::vector<at::Tensor>;

struct PartsSettings : torch::CustomClassHolder {
  PartOf part_of;
  std::vector<int64_t> sizes;
  std::vector<bool> defined;
};

c10::intrusive_ptr<PartsSettings> settings_in(torch::autograd::AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<PartsSettings>(
      context->saved_data["settings"].toCapsule());
}

class Parts : public torch::autograd::Function<Parts> {
 public:
  static PartList forward(torch::autograd::AutogradContext* context, const at::Tensor& tensor,
                          size_t count, const c10::intrusive_ptr<PartsSettings>& settings) {
    context->saved_data["settings"] = c10::IValue::make_capsule(settings);
    context->set_materialize_grads(false);
    PartList parts;
    for (size_t i = 0; i < count; ++i) {
      parts.push_back(settings->part_of(tensor.detach(), i).detach());
    }
    return parts;
  }
  static PartList backward(torch::autograd::AutogradContext* context, const PartList& grads) {
    const auto settings = settings_in(context);
    const bool arrived = std::any_of(grads.begin(), grads.end(),
                                     [](const at::Tensor& grad) { return grad.defined(); });
    return {arrived ? sum_of_parts(grads, settings->sizes, settings->part_of) : at::Tensor(),
            {},
            {}};
  }
};

class SumOfParts : public torch::autograd::Function<SumOfParts> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::TensorList parts,
                            const c10::intrusive_ptr<PartsSettings>& settings) {
    context->saved_data["settings"] = c10::IValue::make_capsule(settings);
    const auto sum = at::zeros(settings->sizes, parts[0].options());
    size_t next = 0;
    for (size_t i = 0; i < settings->defined.size(); ++i) {
      if (settings->defined[i]) settings->part_of(sum, i).add_(parts[next++]);
    }
    return sum;
  }
  static PartList backward(torch::autograd::AutogradContext* context, const PartList& grads) {
    const auto settings = settings_in(context);
    const auto all = parts_of(grads[0], settings->defined.size(), settings->part_of);
    PartList of_defined;
    for (size_t i = 0; i < all.size(); ++i) {
      if (settings->defined[i]) of_defined.push_back(all[i]);
    }
    of_defined.emplace_back();  // none for the settings
    return of_defined;
  }
};

}  // namespace

std::vector<at::Tensor> parts_of(const at::Tensor& tensor, size_t count,
                                 const PartOf& part_of) {
  auto settings = c10::make_intrusive<PartsSettings>();
  settings->part_of = part_of;
  settings->sizes = tensor.sizes().vec();
  return Parts::apply(tensor, count, settings);
}

at::Tensor sum_of_parts(const std::vector<at::Tensor>& parts, at::IntArrayRef sizes,
                        const PartOf& part_of) {
  auto settings = c10::make_intrusive<PartsSettings>();
  settings->part_of = part_of;
  settings->sizes = sizes.vec();
  PartList defined;
  for (const auto& part : parts) {
    settings->defined.push_back(part.defined());
    if (part.defined()) defined.push_back(part);
  }
  TORCH_INTERNAL_ASSERT(!defined.empty());
  return SumOfParts::apply(at::TensorList(defined), settings);
}

}  // namespace mha::detail
