#include "weights/layout.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <optional>
#include <ostream>
#include <set>
#include <sstream>

#include "weights/excerpt.h"

namespace mha {

std::ostream& operator<<(std::ostream& stream, Layout layout) {
  switch (layout) {
    case Layout::native:
      return stream << "native";
    case Layout::torch:
      return stream << "torch";
    case Layout::bert:
      return stream << "bert";
  }
  return stream << "Layout(" << static_cast<int>(layout) << ")";
}

namespace detail {
namespace {

constexpr std::array<Layout, 3> kLayouts = {Layout::native, Layout::torch, Layout::bert};
constexpr size_t kMaxListed = 8;

// The names of the input projections tell a layout; those of the output projection and of
// bias_k would not (other models have an `out_proj.weight` too).
const std::vector<std::string>& telling_names(Layout layout) {
  static const std::vector<std::string> native = {"W_q.weight", "W_k.weight", "W_v.weight",
                                                  "W_q.bias",   "W_k.bias",   "W_v.bias"};
  static const std::vector<std::string> torch = {
      "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"};
  static const std::vector<std::string> bert = {"self.query.weight", "self.key.weight",
                                                "self.value.weight", "self.query.bias",
                                                "self.key.bias",     "self.value.bias"};
  return layout == Layout::native ? native : layout == Layout::torch ? torch : bert;
}

// 'a', 'b' and 7 more
template <typename Strings>
std::string list(const Strings& strings) {
  std::string text;
  size_t listed = 0;
  for (const auto& string : strings) {
    if (listed == kMaxListed) {
      return text + " and " + std::to_string(strings.size() - listed) + " more";
    }
    text += (text.empty() ? "" : ", ") + excerpt(string);
    ++listed;
  }
  return text;
}

// The prefixes of all layers in the file, or of those in one layout.
std::set<std::string> layer_prefixes(const TensorSource& file, std::optional<Layout> wanted) {
  std::set<std::string> prefixes;
  for (const Layout layout : kLayouts) {
    if (wanted && layout != *wanted) continue;
    for (const auto& [name, entry] : file.entries()) {
      for (const std::string& end : telling_names(layout)) {
        if (name == end) prefixes.insert("");
        const size_t length = name.size() - std::min(name.size(), end.size() + 1);
        if (length > 0 && name.compare(length, std::string::npos, "." + end) == 0) {
          prefixes.insert(name.substr(0, length));
        }
      }
    }
  }
  return prefixes;
}

// The tensors of a layout whose columns are d_model, kdim and vdim, and those that tell of a
// bias.
struct SizingNames {
  std::string query, key, value;
  std::vector<std::string> biases;
};

SizingNames sizing_names(Layout layout, bool packed) {
  if (layout == Layout::native) {
    return {"W_q.weight",
            "W_k.weight",
            "W_v.weight",
            {"W_q.bias", "W_k.bias", "W_v.bias", "W_o.bias"}};
  }
  if (layout == Layout::bert) {
    return {"self.query.weight",
            "self.key.weight",
            "self.value.weight",
            {"self.query.bias", "self.key.bias", "self.value.bias", "output.dense.bias"}};
  }
  const std::vector<std::string> biases = {"in_proj_bias", "out_proj.bias"};
  if (packed) return {"in_proj_weight", "in_proj_weight", "in_proj_weight", biases};
  return {"q_proj_weight", "k_proj_weight", "v_proj_weight", biases};
}

[[noreturn]] void fail_without_layer(const TensorSource& file, const WeightFileOptions& options,
                                     const std::vector<std::string>& names) {
  const auto prefixes = layer_prefixes(file, options.layout());
  std::ostringstream text;
  text << "expected an attention layer";
  if (options.layout()) text << " in the " << *options.layout() << " layout";
  text << " at prefix " << excerpt(options.prefix()) << ", found ";
  text << (names.empty() ? "no name that begins with it" : "the names " + list(names));
  text << (prefixes.empty() ? "; the file has none at any prefix"
                            : "; the file has one at " + list(prefixes));
  TORCH_CHECK(false, file.path(), ": ", text.str());
}

}  // namespace

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

std::vector<std::string> names_at(const TensorSource& file, const std::string& prefix) {
  std::vector<std::string> names;
  const std::string start = join(prefix, "");
  const auto& entries = file.entries();
  for (auto at = entries.lower_bound(start); at != entries.end(); ++at) {
    if (at->first.compare(0, start.size(), start) != 0) break;
    names.push_back(at->first.substr(start.size()));
  }
  return names;
}

bool is_ignored(Layout layout, const std::string& name) {
  return layout == Layout::bert && name.rfind("output.LayerNorm.", 0) == 0;
}

Layout find_layout(const TensorSource& file, const WeightFileOptions& options) {
  const std::vector<std::string> names = names_at(file, options.prefix());
  std::vector<Layout> found;
  for (const Layout layout : kLayouts) {
    if (options.layout() && layout != *options.layout()) continue;
    const auto& telling = telling_names(layout);
    if (std::find_first_of(names.begin(), names.end(), telling.begin(), telling.end()) !=
        names.end()) {
      found.push_back(layout);
    }
  }
  if (found.empty()) fail_without_layer(file, options, names);
  TORCH_CHECK(found.size() == 1, file.path(), ": expected the names of one layout at prefix ",
              excerpt(options.prefix()), ", found those of ", found[0], " and ", found[1], ": ",
              list(names), "; name the layout");
  return found[0];
}

std::vector<LayoutTensor> layout_tensors(const std::string& path, Layout layout,
                                         const ParameterShapes& parameters) {
  std::vector<LayoutTensor> tensors;
  // A tensor made of `names`; those that the module lacks have no place in the file.
  const auto add = [&](const std::string& name, const std::vector<std::string>& names) {
    if (parameters.count(names[0]) == 0) return;
    std::vector<int64_t> shape = parameters.at(names[0]);
    for (size_t i = 1; i < names.size(); ++i) shape[0] += parameters.at(names[i])[0];
    tensors.push_back({name, names, shape});
  };
  const auto& query = parameters.at("W_q.weight");
  if (layout == Layout::native) {
    for (const auto& [name, shape] : parameters) add(name, {name});
  } else if (layout == Layout::torch) {
    TORCH_CHECK(query[0] == query[1], path,
                ": the torch layout needs num_heads * head_dim = d_model, found ", query[0],
                " and ", query[1]);
    const bool packed =
        query == parameters.at("W_k.weight") && query == parameters.at("W_v.weight");
    if (packed) {
      add("in_proj_weight", {"W_q.weight", "W_k.weight", "W_v.weight"});
    } else {
      add("q_proj_weight", {"W_q.weight"});
      add("k_proj_weight", {"W_k.weight"});
      add("v_proj_weight", {"W_v.weight"});
    }
    add("in_proj_bias", {"W_q.bias", "W_k.bias", "W_v.bias"});
    add("bias_k", {"bias_k"});
    add("bias_v", {"bias_v"});
    add("out_proj.weight", {"W_o.weight"});
    add("out_proj.bias", {"W_o.bias"});
  } else {
    TORCH_CHECK(parameters.count("bias_k") == 0, path,
                ": the bert layout has no place for bias_k and bias_v, found a module ",
                "with add_bias_kv");
    for (const auto& kind : {".weight", ".bias"}) {
      add(std::string("self.query") + kind, {std::string("W_q") + kind});
      add(std::string("self.key") + kind, {std::string("W_k") + kind});
      add(std::string("self.value") + kind, {std::string("W_v") + kind});
      add(std::string("output.dense") + kind, {std::string("W_o") + kind});
    }
  }
  return tensors;
}

ParameterShapes parameter_shapes_in(const TensorSource& file, Layout layout,
                                    const std::string& prefix) {
  const auto shape_of = [&](const std::string& name) -> const std::vector<int64_t>* {
    const auto entry = file.entries().find(join(prefix, name));
    return entry == file.entries().end() ? nullptr : &entry->second.shape;
  };
  const bool packed = layout == Layout::torch && shape_of("q_proj_weight") == nullptr;
  const SizingNames names = sizing_names(layout, packed);
  const auto* query = shape_of(names.query);
  TORCH_CHECK(query != nullptr, file.path(), ": tensor ", excerpt(join(prefix, names.query)),
              ": missing; its shape tells the sizes of the layer");
  TORCH_CHECK(query->size() == 2 && (*query)[0] > 0 && (*query)[1] > 0, file.path(),
              ": tensor ", excerpt(join(prefix, names.query)),
              ": expected 2 dimensions above 0, found ", at::IntArrayRef(*query));
  const int64_t d_model = (*query)[1];
  const int64_t width = packed ? d_model : (*query)[0];
  const auto columns = [&](const std::string& name) {
    const auto* shape = shape_of(name);
    return shape != nullptr && shape->size() == 2 ? (*shape)[1] : d_model;
  };

  ParameterShapes shapes = {{"W_q.weight", {width, d_model}},
                            {"W_k.weight", {width, columns(names.key)}},
                            {"W_v.weight", {width, columns(names.value)}},
                            {"W_o.weight", {d_model, width}}};
  const auto in_file = [&](const std::string& name) { return shape_of(name) != nullptr; };
  if (std::any_of(names.biases.begin(), names.biases.end(), in_file)) {
    for (const auto* name : {"W_q.bias", "W_k.bias", "W_v.bias"}) shapes[name] = {width};
    shapes["W_o.bias"] = {d_model};
  }
  if (layout != Layout::bert && (in_file("bias_k") || in_file("bias_v"))) {
    shapes["bias_k"] = shapes["bias_v"] = {1, 1, width};
  }
  return shapes;
}

}  // namespace detail
}  // namespace mha
