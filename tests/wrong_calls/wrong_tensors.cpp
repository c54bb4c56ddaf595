#include <ATen/ATen.h>

#include "support/values.h"
#include "wrong_calls/wrong_calls.h"

namespace mha::test {
namespace {

struct Mutation {
  const char* name;
  bool (*fits)(const at::Tensor& right);
  at::Tensor (*wrong)(const at::Tensor& right);
};

bool always(const at::Tensor&) {
  return true;
}

bool is_floating(const at::Tensor& t) {
  return t.is_floating_point();
}

at::Tensor of_another_kind(const at::Tensor& t) {
  return t.to(t.is_floating_point() ? at::kLong : at::kDouble);
}

// One more along a dimension, counted from the end.
template <int Dim>
at::Tensor longer(const at::Tensor& t) {
  return at::cat({t, t.narrow(-Dim, 0, 1)}, -Dim);
}

template <int Dims>
bool has_dims(const at::Tensor& t) {
  return t.dim() >= Dims;
}

// As large as an index can tell, in the memory of one number.
at::Tensor huge(const at::Tensor& t) {
  auto sizes = t.sizes().vec();
  sizes.back() = int64_t{1} << 40;
  return t.flatten()[0].expand(sizes);
}

const std::vector<Mutation>& mutations() {
  static const std::vector<Mutation> all{
      {"another kind of numbers", always, of_another_kind},
      {"complex", is_floating, [](const at::Tensor& t) { return t.to(at::kComplexFloat); }},
      {"float8", always,
       [](const at::Tensor& t) { return t.to(at::kFloat).to(at::kFloat8_e4m3fn); }},
      {"sparse", always, [](const at::Tensor& t) { return t.to_sparse(); }},
      {"nested", always,
       [](const at::Tensor& t) { return at::_nested_tensor_from_tensor_list({t}); }},
      {"quantized", is_floating,
       [](const at::Tensor& t) { return at::quantize_per_tensor(t, 0.1, 0, at::kQInt8); }},
      {"on meta", always, [](const at::Tensor& t) { return t.to(at::kMeta); }},
      {"zeros without memory", always,
       [](const at::Tensor& t) { return at::_efficientzerotensor(t.sizes(), t.options()); }},
      {"freed memory", always, with_freed_memory},
      {"no dimension", always, [](const at::Tensor& t) { return t.flatten()[0]; }},
      {"one more dimension", always, [](const at::Tensor& t) { return t.unsqueeze(0); }},
      {"last size + 1", always, longer<1>},
      {"last size but one + 1", has_dims<2>, longer<2>},
      {"last size but two + 1", has_dims<3>, longer<3>},
      {"huge", always, huge},
  };
  return all;
}

}  // namespace

WrongCalls wrong_tensors(const EntrySetting& setting) {
  WrongCalls calls;
  for (const TensorEntry& entry : setting.entries()) {
    const auto give = [&](const std::string& what, std::function<at::Tensor()> make) {
      calls.push_back({entry.name + ": " + what, [&entry, make] { entry.call(make()); }});
    };
    give("undefined", [] { return at::Tensor(); });
    for (const Mutation& mutation : mutations()) {
      if (!mutation.fits(entry.right)) continue;
      give(mutation.name, [&entry, &mutation] { return mutation.wrong(entry.right); });
    }
  }
  return calls;
}

}  // namespace mha::test
