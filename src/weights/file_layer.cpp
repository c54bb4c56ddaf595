#include "weights/file_layer.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "files/excerpt.h"
#include "weights/find_layers.h"
#include "weights/options_metadata.h"

namespace mha::detail {
namespace {

using Shape = std::vector<int64_t>;

// Of a norm with a tensor for each, whose names take memory.
constexpr int64_t kMaxHeads = 4096;

bool is_matrix(const Shape* shape) {
  return shape != nullptr && shape->size() == 2 && (*shape)[0] > 0 && (*shape)[1] > 0;
}

bool is_packed(const std::vector<LayoutTensor>& tensors) {
  return tensor_with(tensors, "W_q.weight") == tensor_with(tensors, "W_k.weight");
}

// Those in use for a module with these parameters.
const std::vector<LayoutTensor>& tensors_for(const Layout& layout,
                                             const ParameterShapes& parameters) {
  const Shape &query = parameters.at("W_q.weight"), &key = parameters.at("W_k.weight"),
              &value = parameters.at("W_v.weight");
  return tensors_of(layout, query != key || query != value);
}

}  // namespace

std::string name_of_head(const std::string& name, int64_t head) {
  const size_t at = name.find("{}");
  return at == std::string::npos
             ? name
             : name.substr(0, at) + std::to_string(head) + name.substr(at + 2);
}

const LayoutTensor* tensor_with(const std::vector<LayoutTensor>& tensors,
                                const std::string& parameter) {
  for (const LayoutTensor& tensor : tensors) {
    const auto& held = tensor.parameters;
    if (std::find(held.begin(), held.end(), parameter) != held.end()) return &tensor;
  }
  return nullptr;
}

const std::vector<LayoutTensor>& tensors_of(const Layout& layout, bool apart) {
  const LayoutDescription& description = layout.description();
  return apart && !description.tensors_apart.empty() ? description.tensors_apart
                                                     : description.tensors;
}

const std::vector<LayoutTensor>& tensors_in_file(
    const Layout& layout, const std::function<bool(const std::string& name)>& has) {
  const auto& together = tensors_of(layout, false);
  const auto& apart = tensors_of(layout, true);
  const auto alone = [&](const std::vector<LayoutTensor>& tensors,
                         const std::vector<LayoutTensor>& others) {
    return std::count_if(tensors.begin(), tensors.end(), [&](const LayoutTensor& tensor) {
      const auto is_same = [&](const LayoutTensor& other) { return other.name == tensor.name; };
      return std::none_of(others.begin(), others.end(), is_same) && has(tensor.name);
    });
  };
  return &together != &apart && alone(apart, together) > alone(together, apart) ? apart
                                                                                : together;
}

bool has_unnamed_bias(const Layout& layout, const ParameterShapes& parameters,
                      const std::string& bias) {
  const auto& rows = tensors_for(layout, parameters);
  return parameters.count(bias) != 0 && tensor_with(rows, bias) == nullptr &&
         tensor_with(rows, "W_q.bias") != nullptr;
}

std::vector<FileTensor> layout_tensors(const std::string& path, const Layout& layout,
                                       const ParameterShapes& parameters) {
  const Shape &query = parameters.at("W_q.weight"), &key = parameters.at("W_k.weight"),
              &value = parameters.at("W_v.weight"), &output = parameters.at("W_o.weight");
  const LayoutDescription& spec = layout.description();
  const auto& rows = tensors_for(layout, parameters);
  TORCH_CHECK(spec.free_head_dim || query[0] == query[1], path, ": the ", layout,
              " layout needs num_heads * head_dim = d_model, found ", query[0], " and ",
              query[1]);
  TORCH_CHECK((spec.free_head_dim && !is_packed(rows)) || output[1] == query[0], path, ": the ",
              layout, " layout needs v_head_dim = head_dim, found heads of widths ", query[0],
              " and ", output[1]);
  TORCH_CHECK(spec.grouped_heads || query[0] == key[0], path, ": the ", layout,
              " layout needs num_kv_heads = num_heads, found projections of width ", query[0],
              " and ", key[0]);
  TORCH_CHECK(!is_packed(rows) || (key[1] == query[1] && value[1] == query[1]), path, ": the ",
              layout, " layout needs kdim = vdim = d_model, found ", key[1], ", ", value[1],
              " and ", query[1]);
  TORCH_CHECK(parameters.count("bias_k") == 0 || tensor_with(rows, "bias_k") != nullptr, path,
              ": the ", layout,
              " layout has no place for bias_k and bias_v, found a module with add_bias_kv");
  for (const auto& [parameter, option] :
       {std::pair{"sinks", "sinks"}, std::pair{"q_norm", "qk_norm"},
        std::pair{"q_norm_bias", "qk_norm_bias"}, std::pair{"W_g.weight", "output_gate"}}) {
    TORCH_CHECK(parameters.count(parameter) == 0 || tensor_with(rows, parameter) != nullptr,
                path, ": the ", layout, " layout has no place for ", parameter,
                ", found a module with ", option);
  }
  const bool of_inputs = parameters.count("W_q.bias") != 0;
  TORCH_CHECK(spec.free_output_bias || of_inputs == (parameters.count("W_o.bias") != 0), path,
              ": the ", layout,
              " layout needs biases of all projections or of none, found a module with ",
              of_inputs ? "all but that of W_o" : "that of W_o alone");
  // One without a place would be lost by a writer, and left undefined by a reader.
  for (const auto& [parameter, shape] : parameters) {
    TORCH_CHECK(tensor_with(rows, parameter) != nullptr ||
                    (parameter.find(".bias") != std::string::npos &&
                     has_unnamed_bias(layout, parameters, parameter)),
                path, ": the ", layout, " layout has no place for ", parameter);
  }
  std::vector<FileTensor> tensors;
  for (const LayoutTensor& held : rows) {
    // Those that the module lacks have no place in the file.
    const auto& parts = held.parameters;
    const bool is_there = std::any_of(parts.begin(), parts.end(), [&](const std::string& part) {
      return parameters.count(part) != 0;
    });
    if (!is_there) continue;
    for (const std::string& part : parts) {
      TORCH_CHECK(parameters.count(part) != 0, path, ": the ", layout, " layout needs ", part,
                  ", found a module without");
    }
    Shape shape = parameters.at(parts[0]);
    for (size_t i = 1; i < parts.size(); ++i) shape[0] += parameters.at(parts[i])[0];
    for (const std::string& part : held.parameters) {
      TORCH_CHECK(parameters.at(part)[0] % held.repeats == 0, path, ": the ", layout,
                  " layout needs rows of ", part, " in ", held.repeats, " equal parts, found ",
                  parameters.at(part)[0]);
    }
    if (held.transposed) std::swap(shape[0], shape[1]);
    if (held.name.find("{}") == std::string::npos) {
      tensors.push_back({held, shape});
      continue;
    }
    TORCH_CHECK(shape.size() == 2, path, ": the ", layout,
                " layout needs qk_norm_gain per_head, found ", parts[0], " of shape ",
                at::IntArrayRef(shape));
    for (int64_t head = 0; head < shape[0]; ++head) {
      FileTensor of_head{held, {shape[1]}, head};
      of_head.held.name = name_of_head(held.name, head);
      tensors.push_back(std::move(of_head));
    }
  }
  // In the order of the names, in which problems are listed.
  std::sort(tensors.begin(), tensors.end(),
            [](const auto& a, const auto& b) { return a.held.name < b.held.name; });
  return tensors;
}

ParameterShapes parameter_shapes_in(const TensorSource& file, const Layout& layout,
                                    const WeightFileOptions& where,
                                    std::optional<int64_t> num_heads) {
  if (!num_heads) num_heads = num_heads_in(file.path(), file.metadata());
  const auto shape_of = [&](const std::string& name) -> const Shape* {
    const TensorEntry* entry = entry_at(file, where, name_of_head(name, 0));
    return entry == nullptr ? nullptr : &entry->shape;
  };
  const LayoutDescription& spec = layout.description();
  const auto& rows = tensors_in_file(layout, [&](const std::string& name) {
    return file.has(join(where.prefix(), name_of_head(name, 0)));
  });
  const LayoutTensor& query_row = *tensor_with(rows, "W_q.weight");
  const Shape* query = shape_of(query_row.name);
  const std::string query_name = excerpt(join(where.prefix(), query_row.name));
  TORCH_CHECK(query != nullptr, file.path(), ": tensor ", query_name,
              ": missing; its shape tells the sizes of the layer");
  TORCH_CHECK(is_matrix(query), file.path(), ": tensor ", query_name,
              ": expected 2 dimensions above 0, found ", at::IntArrayRef(*query));
  const int64_t d_model = (*query)[query_row.transposed ? 0 : 1];
  const int64_t query_rows = (*query)[query_row.transposed ? 1 : 0];
  const bool packed = is_packed(rows);
  // What lies beside W_q in its tensor is told by the width of W_o.
  int64_t width = query_row.parameters.size() == 1 ? query_rows : d_model;
  const LayoutTensor& output_row = *tensor_with(rows, "W_o.weight");
  if (const Shape* output = shape_of(output_row.name);
      query_row.parameters.size() != 1 && spec.free_head_dim && is_matrix(output)) {
    width = (*output)[output_row.transposed ? 0 : 1];
  }
  int64_t kv_width = width, kdim = d_model, vdim = d_model;
  int64_t v_width = width, merged = width;  // of all values, of all heads of the output
  if (packed) {
    const int64_t rest = (query_rows - width) / 2;
    if (spec.grouped_heads && rest > 0 && width % rest == 0) kv_width = rest;
  } else {
    const Shape* key = shape_of(tensor_with(rows, "W_k.weight")->name);
    const Shape* value = shape_of(tensor_with(rows, "W_v.weight")->name);
    if (is_matrix(key)) kdim = (*key)[1];
    if (is_matrix(value)) vdim = (*value)[1];
    const bool grouped = spec.grouped_heads && is_matrix(key) && is_matrix(value) &&
                         (*key)[0] == (*value)[0] && width % (*key)[0] == 0;
    if (grouped) kv_width = (*key)[0];
    // Value heads of another size, where W_o has as many columns for them.
    const Shape* output = shape_of(output_row.name);
    if (spec.free_head_dim && !grouped && is_matrix(key) && is_matrix(value) &&
        is_matrix(output) && width % (*key)[0] == 0) {
      const int64_t columns = (*output)[output_row.transposed ? 0 : 1];
      if ((spec.grouped_heads || (*key)[0] == width) && columns % (*value)[0] == 0 &&
          columns / (*value)[0] == width / (*key)[0]) {
        kv_width = (*key)[0];
        v_width = (*value)[0];
        merged = columns;
      }
    }
  }
  if (merged == width) v_width = kv_width;
  ParameterShapes shapes = {{"W_q.weight", {width, d_model}},
                            {"W_k.weight", {kv_width, kdim}},
                            {"W_v.weight", {v_width, vdim}},
                            {"W_o.weight", {d_model, merged}}};
  const auto in_file = [&](const std::string& parameter) {
    const LayoutTensor* row = tensor_with(rows, parameter);
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
    shapes["W_k.bias"] = {kv_width};
    shapes["W_v.bias"] = {v_width};
  }
  if (of_output) shapes["W_o.bias"] = {d_model};
  if (in_file("bias_k") || in_file("bias_v")) {
    shapes["bias_k"] = {1, 1, kv_width};
    shapes["bias_v"] = {1, 1, v_width};
  }
  if (in_file("sinks")) shapes["sinks"] = *shape_of(tensor_with(rows, "sinks")->name);
  if (in_file("q_norm") || in_file("k_norm")) {
    // Of the size that the file says: that of a head, which no other shape tells. Of two, the
    // one that makes whole heads.
    const auto shape = [&](const char* gain) {
      return in_file(gain) ? *shape_of(tensor_with(rows, gain)->name) : Shape();
    };
    const auto size = [&](const char* gain) {
      return in_file(gain) ? c10::multiply_integers(shape(gain)) : 0;
    };
    const auto fits = [&](int64_t d) {
      return d > 0 && width % d == 0 && (!num_heads || width / d == *num_heads);
    };
    const char* there = in_file("q_norm") ? "q_norm" : "k_norm";
    const bool of_each = shape(there).size() == 2 ||
                         tensor_with(rows, there)->name.find("{}") != std::string::npos;
    const int64_t q = size("q_norm"), k = size("k_norm");
    if (of_each) {
      const int64_t d = shape(there).empty() ? 0 : shape(there).back();
      TORCH_CHECK(d <= 0 || width / d <= kMaxHeads, file.path(), ": norms of ",
                  excerpt(tensor_with(rows, there)->name), ": expected at most ", kMaxHeads,
                  " heads, found ", width / d);
      shapes["q_norm"] = {d > 0 ? width / d : 0, d};
      shapes["k_norm"] = {d > 0 ? kv_width / d : 0, d};
    } else if (q == width && k == kv_width && num_heads.value_or(0) != 1) {
      shapes["q_norm"] = {width};  // over all heads
      shapes["k_norm"] = {kv_width};
    } else {
      shapes["q_norm"] =
          shapes["k_norm"] = {in_file("q_norm") && (fits(q) || !fits(k)) ? q : k};
    }
    if (in_file("q_norm_bias") || in_file("k_norm_bias")) {
      shapes["q_norm_bias"] = shapes["q_norm"];
      shapes["k_norm_bias"] = shapes["k_norm"];
    }
  }
  if (in_file("W_g.weight")) {
    const LayoutTensor& row = *tensor_with(rows, "W_g.weight");
    const Shape& gate = *shape_of(row.name);
    int64_t gates = is_matrix(&gate) ? gate[0] : merged;
    if (&row == &query_row) gates = query_rows > width ? query_rows - width : width;
    shapes["W_g.weight"] = {gates, d_model};
    if (shapes.count("W_q.bias") != 0) shapes["W_g.bias"] = {gates};
  }
  return shapes;
}

}  // namespace mha::detail
