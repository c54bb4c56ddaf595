#include "module/registered_members.h"

#include <c10/util/Exception.h>

#include <array>
#include <initializer_list>
#include <string>
#include <utility>

namespace mha::detail {
namespace {

// Reaches what torch's modules keep for their subclasses.
struct Access : torch::nn::Module {
  static auto parameters() { return &Access::parameters_; }
};

struct Layer {
  const char* name;
  const torch::nn::Linear& member;
  std::array<const char*, 2> parameters;  // weight and bias
};

std::array<Layer, 5> layers_of(const MultiHeadAttentionImpl& module) {
  return {{{"W_q", module.W_q, {"W_q.weight", "W_q.bias"}},
           {"W_k", module.W_k, {"W_k.weight", "W_k.bias"}},
           {"W_v", module.W_v, {"W_v.weight", "W_v.bias"}},
           {"W_o", module.W_o, {"W_o.weight", "W_o.bias"}},
           {"W_g", module.W_g, {"W_g.weight", "W_g.bias"}}}};
}

// Whether an owner has registered these parameters, but for undefined ones, in their order and
// no others: so it is as a rule, and told without a look at names.
bool are_all(const torch::nn::Module& owner, std::initializer_list<const at::Tensor*> members) {
  const auto& items = (owner.*Access::parameters()).items();
  size_t i = 0;
  for (const at::Tensor* member : members) {
    if (i < items.size() && items[i].value().is_same(*member)) {
      ++i;
    } else if (member->defined()) {
      return false;
    }
  }
  return i == items.size();
}

bool is_registered(const torch::nn::Module& owner, const char* name, const at::Tensor& member) {
  for (const auto& item : owner.*Access::parameters()) {
    if (item.key() == name) return item.value().is_same(member);
  }
  return !member.defined();
}

bool are_as_made(const MultiHeadAttentionImpl& module) {
  const std::array<const torch::nn::LinearImpl*, 5> layers{
      module.W_q.get(), module.W_k.get(), module.W_v.get(), module.W_o.get(),
      module.W_g.is_empty() ? nullptr : module.W_g.get()};
  const auto children = module.children();
  size_t count = 0;
  for (const auto* layer : layers) {
    if (!layer) continue;
    if (count == children.size() || children[count++].get() != layer) return false;
    if (!are_all(*layer, {&layer->weight, &layer->bias})) return false;
  }
  return count == children.size() &&
         are_all(module, {&module.bias_k, &module.bias_v, &module.sinks, &module.q_norm,
                          &module.k_norm, &module.q_norm_bias, &module.k_norm_bias});
}

void check_layers(const MultiHeadAttentionImpl& module, const std::array<Layer, 5>& layers) {
  const auto registered = module.named_children();
  for (const auto& layer : layers) {
    const auto* found = registered.find(layer.name);
    const bool same =
        found ? found->get() == layer.member.ptr().get() : layer.member.is_empty();
    TORCH_CHECK(same, "MultiHeadAttention: ", layer.name,
                ": expected the layer that is registered, found ",
                layer.member.is_empty() ? "none" : "another, which was assigned",
                "; replace it by ", layer.name, " = replace_module(\"", layer.name,
                "\", layer)");
  }
}

}  // namespace

torch::OrderedDict<std::string, at::Tensor>& registered_parameters(torch::nn::Module& module) {
  return module.*Access::parameters();
}

void check_registered(const char* subject, const torch::nn::Module& owner, const char* name,
                      const at::Tensor& member) {
  const char* own_name = name;  // without the layer's
  for (const char* at = name; *at != '\0'; ++at) {
    if (*at == '.') own_name = at + 1;
  }
  TORCH_CHECK(is_registered(owner, own_name, member), subject, ": ", name,
              ": expected the parameter that is registered, found ",
              member.defined() ? "another tensor, which was assigned" : "none",
              "; change its values by copy_() or set_data()");
}

void check_has_layers(const MultiHeadAttentionImpl& module) {
  for (const auto& layer : layers_of(module)) {
    TORCH_CHECK(&layer.member == &module.W_g || !layer.member.is_empty(),
                "MultiHeadAttention: ", layer.name, ": expected a layer, found none");
  }
}

void check_registered(const MultiHeadAttentionImpl& module) {
  check_has_layers(module);
  if (are_as_made(module)) return;
  const auto layers = layers_of(module);
  check_layers(module, layers);
  for (const auto& layer : layers) {
    if (layer.member.is_empty()) continue;
    const auto& linear = *layer.member;
    check_registered("MultiHeadAttention", linear, layer.parameters[0], linear.weight);
    check_registered("MultiHeadAttention", linear, layer.parameters[1], linear.bias);
  }
  const std::array<std::pair<const char*, const at::Tensor*>, 7> own{
      {{"bias_k", &module.bias_k},
       {"bias_v", &module.bias_v},
       {"sinks", &module.sinks},
       {"q_norm", &module.q_norm},
       {"k_norm", &module.k_norm},
       {"q_norm_bias", &module.q_norm_bias},
       {"k_norm_bias", &module.k_norm_bias}}};
  for (const auto& [name, member] : own) {
    check_registered("MultiHeadAttention", module, name, *member);
  }
}

}  // namespace mha::detail
