#include <c10/util/Exception.h>
#include <mha/layout.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>
#include <utility>

#include "files/excerpt.h"
#include "files/input_file.h"
#include "files/json_text.h"
#include "weights/layout_json.h"
#include "weights/layouts.h"

namespace mha {
namespace {

using detail::excerpt;

constexpr int64_t kMaxLayoutFile = int64_t{1} << 16;

const std::set<std::string>& known_parameters() {
  static const std::set<std::string> known = {
      "W_q.weight",  "W_k.weight",  "W_v.weight", "W_o.weight", "W_g.weight", "W_q.bias",
      "W_k.bias",    "W_v.bias",    "W_o.bias",   "W_g.bias",   "q_norm",     "k_norm",
      "q_norm_bias", "k_norm_bias", "sinks",      "bias_k",     "bias_v"};
  return known;
}

void check_tensors(const std::string& where, const std::vector<LayoutTensor>& tensors) {
  std::set<std::string> names, held;
  for (const LayoutTensor& tensor : tensors) {
    const std::string at = where + ": tensor " + excerpt(tensor.name);
    TORCH_CHECK(!tensor.name.empty(), where, ": expected tensors with names, found ''");
    TORCH_CHECK(names.insert(tensor.name).second, at, ": expected one of that name, found two");
    TORCH_CHECK(!tensor.parameters.empty(), at, ": expected parameters, found none");
    for (const std::string& parameter : tensor.parameters) {
      TORCH_CHECK(known_parameters().count(parameter) != 0, at,
                  ": expected parameters of the module, found ", excerpt(parameter));
      TORCH_CHECK(held.insert(parameter).second, at, ": expected one place for ", parameter,
                  ", found two");
      TORCH_CHECK(tensor.parameters.size() == 1 || parameter[0] == 'W', at,
                  ": expected rows of projections side by side, found ", parameter);
    }
    const std::string& first = tensor.parameters.front();
    const bool is_matrix = first[0] == 'W' && first.back() == 't';
    for (const std::string& parameter : tensor.parameters) {
      TORCH_CHECK(first[0] != 'W' || (parameter.back() == 't') == is_matrix, at,
                  ": expected weights or biases, found both");
    }
    TORCH_CHECK(!tensor.transposed || is_matrix, at,
                ": transposed: expected it of a weight, found ", first);
    TORCH_CHECK(tensor.repeats >= 1, at, ": repeats: expected it above 0, found ",
                tensor.repeats);
    TORCH_CHECK(tensor.packing == Packing::rows || tensor.repeats == 1, at,
                ": repeats: expected them with rows, found them with ", tensor.packing);
    TORCH_CHECK(
        tensor.name.find("{}") == std::string::npos || first.compare(1, 5, "_norm") == 0, at,
        ": name: expected a {} of gains of a norm, found it of ", first);
    TORCH_CHECK(std::isfinite(tensor.plus) && (tensor.plus == 0 || first[0] != 'W'), at,
                ": plus: expected a finite number, of what is no projection, found ",
                tensor.plus);
  }
  for (const char* weight : {"W_q.weight", "W_k.weight", "W_v.weight", "W_o.weight"}) {
    TORCH_CHECK(held.count(weight) != 0, where, ": expected a tensor that holds ", weight,
                ", found none");
  }
}

// What it means, beyond the types of its members.
void check_description(const LayoutDescription& description) {
  const std::string where = "layout " + excerpt(description.name);
  TORCH_CHECK(!description.name.empty(), "layout: expected a name, found ''");
  for (const std::string& pattern : description.ignored) {
    TORCH_CHECK(!pattern.empty(), where, ": ignored: expected names, found ''");
  }
  check_tensors(where, description.tensors);
  if (!description.tensors_apart.empty()) check_tensors(where, description.tensors_apart);
}

const std::vector<LayoutDescription>& built_in_descriptions() {
  static const std::vector<LayoutDescription> all = [] {
    std::vector<LayoutDescription> descriptions;
    for (const auto& json : nlohmann::json::parse(detail::kBuiltInLayouts)) {
      descriptions.push_back(detail::layout_from_json("built-in layout", json));
      check_description(descriptions.back());
    }
    return descriptions;
  }();
  return all;
}

const LayoutDescription* find_built_in(const std::string& name) {
  for (const LayoutDescription& description : built_in_descriptions()) {
    if (description.name == name) return &description;
  }
  return nullptr;
}

}  // namespace

const Layout Layout::native("native");
const Layout Layout::torch("torch");
const Layout Layout::bert("bert");
const Layout Layout::gpt2("gpt2");
const Layout Layout::vit("vit");
const Layout Layout::llama("llama");

const std::vector<Layout>& Layout::built_in() {
  static const std::vector<Layout> all = [] {
    std::vector<Layout> layouts;
    for (const LayoutDescription& description : built_in_descriptions()) {
      layouts.push_back(Layout(description.name.c_str()));
    }
    return layouts;
  }();
  return all;
}

Layout Layout::named(const std::string& name) {
  for (const Layout& layout : built_in()) {
    if (layout.name() == name) return layout;
  }
  std::string names;
  for (const Layout& layout : built_in()) names += (names.empty() ? "" : ", ") + layout.name();
  TORCH_CHECK(false, "layout: expected one of ", names, ", found ", excerpt(name));
}

Layout::Layout(LayoutDescription description) {
  check_description(description);
  TORCH_CHECK(find_built_in(description.name) == nullptr,
              "layout: expected a name that no built-in one has, found ",
              excerpt(description.name));
  own_ = std::make_shared<const LayoutDescription>(std::move(description));
}

Layout Layout::from_file(const std::string& path) {
  detail::InputFile file(path);
  TORCH_CHECK(file.size() <= kMaxLayoutFile, path, ": expected a layout of at most ",
              kMaxLayoutFile, " bytes, found ", file.size());
  const auto json = detail::parse_json(path, file.read(0, file.size(), "layout"));
  LayoutDescription description = detail::layout_from_json(path, json);
  try {
    return Layout(std::move(description));
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, path, ": ", error.what_without_backtrace());
  }
}

const LayoutDescription& Layout::description() const {
  return own_ ? *own_ : *find_built_in(built_in_);
}

std::ostream& operator<<(std::ostream& stream, Packing packing) {
  switch (packing) {
    case Packing::rows:
      return stream << "rows";
    case Packing::groups:
      return stream << "groups";
    case Packing::heads:
      return stream << "heads";
  }
  return stream << "Packing(" << static_cast<int>(packing) << ")";
}

std::ostream& operator<<(std::ostream& stream, const Layout& layout) {
  return stream << layout.name();
}

}  // namespace mha
