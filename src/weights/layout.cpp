#include "weights/layout.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "files/excerpt.h"
#include "weights/options_metadata.h"

namespace mha::detail {
namespace {

constexpr size_t kMaxListed = 8;

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

[[noreturn]] void fail_without_layer(const TensorSource& file, const WeightFileOptions& options,
                                     const std::vector<std::string>& names) {
  std::set<std::string> prefixes;
  for (const auto& layer : find_layers(file, options.layout())) prefixes.insert(layer.prefix);
  std::ostringstream text;
  text << "expected an attention layer";
  if (options.layout()) text << " in the " << *options.layout() << " layout";
  text << " at prefix " << excerpt(options.prefix()) << ", found ";
  text << (names.empty() ? "no name that begins with it" : "the names " + list(names));
  text << (prefixes.empty() ? "; the file has none at any prefix"
                            : "; the file has one at " + list(prefixes));
  TORCH_CHECK(false, file.path(), ": ", text.str());
}

using Shape = std::vector<int64_t>;

bool is_matrix(const Shape* shape) {
  return shape != nullptr && shape->size() == 2 && (*shape)[0] > 0 && (*shape)[1] > 0;
}

// The row of a layout that holds a parameter; null if it has no place for it.
const LayoutRow* row_with(const LayoutSpec& spec, const std::string& parameter) {
  for (const LayoutRow& row : spec.rows) {
    const auto& held = row.parameters;
    if (std::find(held.begin(), held.end(), parameter) != held.end()) return &row;
  }
  return nullptr;
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

std::vector<FoundLayer> find_layers(const TensorSource& file, std::optional<Layout> wanted) {
  std::set<std::pair<std::string, Layout>> found;
  for (const Layout layout : kLayouts) {
    if (wanted && layout != *wanted) continue;
    const auto telling = telling_names(layout);
    for (const auto& [name, entry] : file.entries()) {
      for (const std::string& end : telling) {
        if (name == end) found.emplace("", layout);
        const size_t length = name.size() - std::min(name.size(), end.size() + 1);
        if (length > 0 && name[length] == '.' &&
            name.compare(length + 1, std::string::npos, end) == 0) {
          found.emplace(name.substr(0, length), layout);
        }
      }
    }
  }
  std::vector<FoundLayer> layers;
  for (const auto& [prefix, layout] : found) layers.push_back({prefix, layout});
  return layers;
}

Layout find_layout(const TensorSource& file, const WeightFileOptions& options) {
  const std::vector<std::string> names = names_at(file, options.prefix());
  std::vector<Layout> found;
  if (options.layout()) layout_spec(*options.layout(), false);  // throws unless there is one
  for (const Layout layout : kLayouts) {
    if (options.layout() && layout != *options.layout()) continue;
    const auto telling = telling_names(layout);
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
  const Shape &query = parameters.at("W_q.weight"), &key = parameters.at("W_k.weight"),
              &value = parameters.at("W_v.weight");
  const bool same_inputs = query == key && query == value;
  const LayoutSpec spec = layout_spec(layout, same_inputs);
  TORCH_CHECK(spec.free_head_dim || query[0] == query[1], path, ": the ", layout,
              " layout needs num_heads * head_dim = d_model, found ", query[0], " and ",
              query[1]);
  TORCH_CHECK(spec.grouped_heads || query[0] == key[0], path, ": the ", layout,
              " layout needs num_kv_heads = num_heads, found projections of width ", query[0],
              " and ", key[0]);
  TORCH_CHECK(!spec.packed || same_inputs, path, ": the ", layout,
              " layout needs kdim = vdim = d_model, found ", key[1], ", ", value[1], " and ",
              query[1]);
  TORCH_CHECK(parameters.count("bias_k") == 0 || row_with(spec, "bias_k") != nullptr, path,
              ": the ", layout,
              " layout has no place for bias_k and bias_v, found a module with add_bias_kv");
  for (const auto& [parameter, option] :
       {std::pair{"sinks", "sinks"}, std::pair{"q_norm", "qk_norm"},
        std::pair{"q_norm_bias", "qk_norm_bias"}, std::pair{"W_g.weight", "output_gate"}}) {
    TORCH_CHECK(parameters.count(parameter) == 0 || row_with(spec, parameter) != nullptr, path,
                ": the ", layout, " layout has no place for ", parameter,
                ", found a module with ", option);
  }
  const bool of_inputs = parameters.count("W_q.bias") != 0;
  TORCH_CHECK(spec.free_output_bias || of_inputs == (parameters.count("W_o.bias") != 0), path,
              ": the ", layout,
              " layout needs biases of all projections or of none, found a module with ",
              of_inputs ? "all but that of W_o" : "that of W_o alone");
  std::vector<LayoutTensor> tensors;
  for (const LayoutRow& row : spec.rows) {
    // Those that the module lacks have no place in the file.
    if (parameters.count(row.parameters[0]) == 0) continue;
    Shape shape = parameters.at(row.parameters[0]);
    for (size_t i = 1; i < row.parameters.size(); ++i) {
      shape[0] += parameters.at(row.parameters[i])[0];
    }
    if (row.transposed) std::swap(shape[0], shape[1]);
    tensors.push_back({row, shape});
  }
  // In the order of the names, in which problems are listed.
  std::sort(tensors.begin(), tensors.end(),
            [](const auto& a, const auto& b) { return a.row.name < b.row.name; });
  return tensors;
}

ParameterShapes parameter_shapes_in(const TensorSource& file, Layout layout,
                                    const std::string& prefix,
                                    std::optional<int64_t> num_heads) {
  if (!num_heads) num_heads = num_heads_in(file.path(), file.metadata());
  const auto shape_of = [&](const std::string& name) -> const Shape* {
    const auto entry = file.entries().find(join(prefix, name));
    return entry == file.entries().end() ? nullptr : &entry->second.shape;
  };
  const LayoutSpec spec = layout_spec(layout, shape_of("q_proj_weight") == nullptr);
  const LayoutRow& query_row = *row_with(spec, "W_q.weight");
  const Shape* query = shape_of(query_row.name);
  const std::string query_name = excerpt(join(prefix, query_row.name));
  TORCH_CHECK(query != nullptr, file.path(), ": tensor ", query_name,
              ": missing; its shape tells the sizes of the layer");
  TORCH_CHECK(is_matrix(query), file.path(), ": tensor ", query_name,
              ": expected 2 dimensions above 0, found ", at::IntArrayRef(*query));
  const int64_t d_model = (*query)[query_row.transposed ? 0 : 1];
  const int64_t width = spec.packed ? d_model : (*query)[0];
  int64_t kv_width = width, kdim = d_model, vdim = d_model;
  if (!spec.packed) {
    const Shape* key = shape_of(row_with(spec, "W_k.weight")->name);
    const Shape* value = shape_of(row_with(spec, "W_v.weight")->name);
    if (is_matrix(key)) kdim = (*key)[1];
    if (is_matrix(value)) vdim = (*value)[1];
    const bool grouped = spec.grouped_heads && is_matrix(key) && is_matrix(value) &&
                         (*key)[0] == (*value)[0] && width % (*key)[0] == 0;
    if (grouped) kv_width = (*key)[0];
  }
  ParameterShapes shapes = {{"W_q.weight", {width, d_model}},
                            {"W_k.weight", {kv_width, kdim}},
                            {"W_v.weight", {kv_width, vdim}},
                            {"W_o.weight", {d_model, width}}};
  const auto in_file = [&](const std::string& parameter) {
    const LayoutRow* row = row_with(spec, parameter);
    return row != nullptr && shape_of(row->name) != nullptr;
  };
  bool of_inputs = in_file("W_q.bias") || in_file("W_k.bias") || in_file("W_v.bias");
  bool of_output = in_file("W_o.bias");
  if (spec.free_output_bias) {
    // Where the metadata tells, a tensor that lacks is missing.
    of_output = output_bias_in(file.path(), file.metadata()).value_or(of_output);
  } else {
    of_inputs = of_output = of_inputs || of_output;
  }
  if (of_inputs) {
    shapes["W_q.bias"] = {width};
    shapes["W_k.bias"] = shapes["W_v.bias"] = {kv_width};
  }
  if (of_output) shapes["W_o.bias"] = {d_model};
  if (in_file("bias_k") || in_file("bias_v")) {
    shapes["bias_k"] = shapes["bias_v"] = {1, 1, kv_width};
  }
  if (in_file("sinks")) shapes["sinks"] = *shape_of("sinks");
  if (in_file("q_norm") || in_file("k_norm")) {
    // Of the size that the file says: that of a head, which no other shape tells. Of two, the
    // one that makes whole heads.
    const auto size = [&](const char* gain) {
      return in_file(gain) ? c10::multiply_integers(*shape_of(row_with(spec, gain)->name)) : 0;
    };
    const auto fits = [&](int64_t d) {
      return d > 0 && width % d == 0 && (!num_heads || width / d == *num_heads);
    };
    const int64_t q = size("q_norm"), k = size("k_norm");
    shapes["q_norm"] = shapes["k_norm"] = {in_file("q_norm") && (fits(q) || !fits(k)) ? q : k};
    if (in_file("q_norm_bias") || in_file("k_norm_bias")) {
      shapes["q_norm_bias"] = shapes["k_norm_bias"] = shapes["q_norm"];
    }
  }
  if (in_file("W_g.weight")) {
    const Shape& gate = *shape_of(row_with(spec, "W_g.weight")->name);
    const int64_t rows = is_matrix(&gate) ? gate[0] : width;
    shapes["W_g.weight"] = {rows, d_model};
    if (shapes.count("W_q.bias") != 0) shapes["W_g.bias"] = {rows};
  }
  return shapes;
}

}  // namespace mha::detail
