#include <mha/weight_file.h>

#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <locale>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "files/excerpt.h"
#include "files/safetensors.h"
#include "module/module_checks.h"
#include "runtime/message.h"
#include "weights/layout.h"
#include "weights/options_metadata.h"

namespace mha {
namespace {

using detail::excerpt;
using detail::LayoutTensor;

using Parameters = torch::OrderedDict<std::string, at::Tensor>;

Parameters parameters_of(const MultiHeadAttention& module, const std::string& path) {
  TORCH_CHECK(!module.is_empty(), path, ": module: expected a module, found an empty holder");
  const auto parameters = module->named_parameters();
  for (const auto& parameter : parameters) {
    TORCH_CHECK(!parameter->is_meta(), path,
                ": module: expected parameters with memory, found ", parameter.key(),
                " on meta");
  }
  return parameters;
}

detail::ParameterShapes shapes_of(const Parameters& parameters) {
  detail::ParameterShapes shapes;
  for (const auto& parameter : parameters) shapes[parameter.key()] = parameter->sizes().vec();
  return shapes;
}

bool is_floating(const detail::DtypeInfo& dtype) {
  return dtype.type && c10::isFloatingType(*dtype.type);
}

// Numbers of heads, which the metadata may be silent about.
struct HeadNumbers {
  std::optional<int64_t> num_heads, num_kv_heads;
};

// How the rotary positions that the file tells of, if any, differ from the module's in what the
// weights are made for: the pairs. Base and scaling may change, for longer contexts.
std::string rotary_problem(const detail::TensorSource& file,
                           const MultiHeadAttentionImpl& module) {
  const auto saved = detail::rotary_in(file.path(), file.metadata());
  const auto& rotary = module.options.rotary();
  if (!saved) return {};
  if (!rotary) {
    return detail::message("\n  rotary: expected none, found ", *saved, " in the metadata");
  }
  const auto dim = [&](const RotaryOptions& options) {
    return options.rotary_dim().value_or(module.head_dim());
  };
  if (saved->pairing() == rotary->pairing() && dim(*saved) == dim(*rotary)) return {};
  return detail::message("\n  rotary: expected pairs ", rotary->pairing(), " in ", dim(*rotary),
                         " elements, found ", saved->pairing(), " in ", dim(*saved),
                         " in the metadata");
}

// Throws one error with all the ways in which the layer at `options.prefix()` differs from what
// is expected.
void check_layer(const detail::TensorSource& file, Layout layout,
                 const WeightFileOptions& options, const std::vector<LayoutTensor>& expected,
                 std::string_view dtype, const HeadNumbers& heads,
                 const MultiHeadAttentionImpl* module = nullptr) {
  constexpr size_t max_unexpected = 20;  // of a whole model that has no such prefix
  const std::string& prefix = options.prefix();
  std::ostringstream problems;
  problems.imbue(std::locale::classic());
  size_t unexpected = 0;
  for (const LayoutTensor& tensor : expected) {
    const std::string name = detail::join(prefix, tensor.row.name);
    const auto found = file.entries().find(name);
    if (found == file.entries().end()) {
      problems << "\n  missing: " << excerpt(name) << ", " << dtype << " "
               << at::IntArrayRef(tensor.shape);
      continue;
    }
    const detail::TensorEntry& entry = found->second;
    if (entry.shape != tensor.shape) {
      problems << "\n  shape of " << excerpt(name) << ": expected "
               << at::IntArrayRef(tensor.shape) << ", found " << at::IntArrayRef(entry.shape);
    }
    const bool floating = is_floating(*entry.dtype);
    if (entry.dtype->name != dtype && !(floating && options.convert_dtype())) {
      problems << "\n  dtype of " << excerpt(name) << ": expected " << dtype << ", found "
               << entry.dtype->name
               << (floating ? ", which convert_dtype(true) would convert" : "");
    }
  }
  for (const std::string& name : detail::names_at(file, prefix)) {
    const bool known =
        detail::is_ignored(layout, name) ||
        std::any_of(expected.begin(), expected.end(),
                    [&](const LayoutTensor& tensor) { return tensor.row.name == name; });
    if (known) continue;
    if (++unexpected <= max_unexpected) {
      problems << "\n  unexpected: " << excerpt(detail::join(prefix, name));
    }
  }
  if (unexpected > max_unexpected) {
    problems << "\n  unexpected: " << unexpected - max_unexpected << " more";
  }
  const auto compare = [&](const char* name, std::optional<int64_t> number,
                           std::optional<int64_t> saved) {
    if (number && saved && *number != *saved) {
      problems << "\n  " << name << ": expected " << *number << ", found " << *saved
               << " in the metadata";
    }
  };
  compare("num_heads", heads.num_heads, detail::num_heads_in(file.path(), file.metadata()));
  compare("num_kv_heads", heads.num_kv_heads,
          detail::num_kv_heads_in(file.path(), file.metadata()));
  if (module != nullptr) problems << rotary_problem(file, *module);
  const std::string text = problems.str();
  TORCH_CHECK(text.empty(), file.path(), ": the ", layout, " layer at prefix ", excerpt(prefix),
              " does not fit:", text);
}

// The one dtype of all parameters, as files spell it.
std::string_view dtype_of(const Parameters& parameters, const std::string& path) {
  const at::ScalarType dtype = parameters.front()->scalar_type();
  for (const auto& parameter : parameters) {
    TORCH_CHECK(parameter->scalar_type() == dtype, path,
                ": module: expected parameters of one dtype, found ", dtype, " and ",
                parameter->scalar_type(), " (", parameter.key(), ")");
  }
  const detail::DtypeInfo* info = detail::find_dtype(dtype);
  TORCH_CHECK(info != nullptr, path, ": module: expected a dtype that files can hold, found ",
              dtype);
  return info->name;
}

// The dtype that holds the numbers of all projections, or the first that is not floating; null:
// the file has none.
const detail::DtypeInfo* dtype_of_projections(const detail::TensorSource& file,
                                              const WeightFileOptions& options,
                                              const std::vector<LayoutTensor>& tensors) {
  const detail::DtypeInfo* held = nullptr;
  for (const LayoutTensor& tensor : tensors) {
    const auto& name = tensor.row.parameters.front();
    const bool is_projection =
        name[0] == 'W' && name.compare(4, std::string::npos, "weight") == 0;
    const auto found = file.entries().find(detail::join(options.prefix(), tensor.row.name));
    if (found == file.entries().end()) continue;
    const detail::DtypeInfo* dtype = found->second.dtype;
    if (!is_floating(*dtype)) return dtype;
    if (!is_projection) continue;
    held = held == nullptr ? dtype
                           : detail::find_dtype(c10::promoteTypes(*held->type, *dtype->type));
    if (held == nullptr) return dtype;
  }
  return held;
}

}  // namespace

void load(MultiHeadAttention& module, const std::string& path,
          const WeightFileOptions& options) {
  const Parameters parameters = parameters_of(module, path);
  const auto source = detail::open_tensors(path);
  detail::TensorSource& file = *source;
  const Layout layout = detail::find_layout(file, options);
  const auto tensors = detail::layout_tensors(path, layout, shapes_of(parameters));
  check_layer(file, layout, options, tensors, dtype_of(parameters, path),
              {module->options.num_heads(), module->num_kv_heads()}, module.get());

  // Everything is read, and on its device, before the first parameter changes.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const LayoutTensor& tensor : tensors) {
    const at::Tensor read = file.read(detail::join(options.prefix(), tensor.row.name));
    const at::Tensor stacked = tensor.row.transposed ? read.t() : read;
    int64_t row = 0;
    for (const std::string& name : tensor.row.parameters) {
      const at::Tensor& parameter = parameters[name];
      const at::Tensor rows = stacked.narrow(0, row, parameter.size(0));
      copies.emplace_back(parameter, rows.to(parameter.device()));
      row += parameter.size(0);
    }
  }
  const c10::NoGradGuard no_grad;
  for (auto& [parameter, value] : copies) parameter.copy_(value);
}

MultiHeadAttention load(const std::string& path, std::optional<int64_t> num_heads,
                        const WeightFileOptions& options) {
  MultiHeadAttention module(options_from_file(path, num_heads, options), detail::Undrawn{});
  load(module, path, options);
  return module;
}

void save(const MultiHeadAttention& module, const std::string& path,
          const WeightFileOptions& options) {
  const Parameters parameters = parameters_of(module, path);
  dtype_of(parameters, path);     // a file of mixed dtypes could not be loaded
  detail::check_module(*module);  // nor this one
  const Layout layout = options.layout().value_or(Layout::native);
  detail::TensorFile file;
  for (const LayoutTensor& tensor :
       detail::layout_tensors(path, layout, shapes_of(parameters))) {
    std::vector<at::Tensor> parts;
    for (const std::string& name : tensor.row.parameters) {
      parts.push_back(parameters[name].detach());
    }
    const at::Tensor stacked = parts.size() == 1 ? parts[0] : at::cat(parts);
    file.tensors[detail::join(options.prefix(), tensor.row.name)] =
        tensor.row.transposed ? stacked.t() : stacked;
  }
  file.metadata = detail::metadata_of(module->options);
  detail::write_safetensors(path, file);
}

MultiHeadAttentionOptions options_from_file(const std::string& path,
                                            std::optional<int64_t> num_heads,
                                            const WeightFileOptions& options) {
  const auto source = detail::open_tensors(path);
  const detail::TensorSource& file = *source;
  const Layout layout = detail::find_layout(file, options);
  const auto shapes = detail::parameter_shapes_in(file, layout, options.prefix(), num_heads);
  const auto tensors = detail::layout_tensors(path, layout, shapes);

  const detail::DtypeInfo* dtype = dtype_of_projections(file, options, tensors);
  TORCH_CHECK(dtype != nullptr && is_floating(*dtype), path, ": the ", layout,
              " layer at prefix ", excerpt(options.prefix()),
              ": expected a floating dtype, found ", dtype == nullptr ? "none" : dtype->name);
  check_layer(file, layout, options, tensors, dtype->name, {num_heads, std::nullopt});

  if (!num_heads) num_heads = detail::num_heads_in(path, file.metadata());
  TORCH_CHECK(num_heads.has_value(), path,
              ": num_heads: expected it as an argument, found none in the "
              "file's metadata, and shapes do not tell it");
  const auto &query = shapes.at("W_q.weight"), &key = shapes.at("W_k.weight");
  const int64_t width = query[0], d_model = query[1], kv_width = key[0];
  TORCH_CHECK(*num_heads > 0 && width % *num_heads == 0, path,
              ": num_heads: expected a divisor of the projections' width ", width, ", found ",
              *num_heads);
  const int64_t head_dim = width / *num_heads, num_kv_heads = kv_width / head_dim;
  TORCH_CHECK(kv_width % head_dim == 0 && *num_heads % num_kv_heads == 0, path,
              ": num_heads: expected one that makes whole groups of the heads in ", kv_width,
              " of ", width, " columns of keys, found ", *num_heads);
  const auto saved_kv_heads = detail::num_kv_heads_in(path, file.metadata());
  TORCH_CHECK(!saved_kv_heads || *saved_kv_heads == num_kv_heads, path,
              ": num_kv_heads: expected ", num_kv_heads, " by the shapes, found ",
              saved_kv_heads.value_or(0), " in the metadata");

  MultiHeadAttentionOptions found(d_model, *num_heads);
  const int64_t kdim = key[1], vdim = shapes.at("W_v.weight")[1];
  if (width != d_model) found.head_dim(head_dim);
  if (num_kv_heads != *num_heads) found.num_kv_heads(num_kv_heads);
  if (kdim != d_model) found.kdim(kdim);
  if (vdim != d_model) found.vdim(vdim);
  found.bias(shapes.count("W_q.bias") != 0).add_bias_kv(shapes.count("bias_k") != 0);
  const bool output_bias = shapes.count("W_o.bias") != 0;
  if (output_bias != found.bias()) found.output_bias(output_bias);
  found.sinks(shapes.count("sinks") != 0);
  found.dtype(*dtype->type);
  if (const auto gain = shapes.find("q_norm"); gain != shapes.end()) {
    TORCH_CHECK(gain->second[0] == head_dim, path,
                ": num_heads: expected one that makes heads of ", gain->second[0],
                " elements, the size of q_norm, found ", *num_heads, " of ", head_dim);
    const bool has_bias = shapes.count("q_norm_bias") != 0;
    found.qk_norm(has_bias ? QKNorm::layer : QKNorm::rms).qk_norm_bias(has_bias);
  }
  if (const auto gate = shapes.find("W_g.weight"); gate != shapes.end()) {
    const int64_t rows = gate->second[0];
    TORCH_CHECK(rows == *num_heads || rows == width, path,
                ": num_heads: expected the rows of W_g.weight, ", rows,
                ", or a gate for each of the ", width, " columns, found ", *num_heads);
    found.output_gate(rows == width ? OutputGate::elementwise : OutputGate::per_head);
  }
  detail::apply_metadata(path, file.metadata(), found);
  return found;
}

}  // namespace mha
