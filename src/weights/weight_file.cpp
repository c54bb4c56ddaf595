#include <mha/weight_file.h>

#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "weights/excerpt.h"
#include "weights/layout.h"
#include "weights/options_metadata.h"
#include "weights/safetensors.h"

namespace mha {
namespace {

using detail::excerpt;
using detail::LayoutTensor;

using Parameters = torch::OrderedDict<std::string, at::Tensor>;

Parameters parameters_of(const MultiHeadAttention& module, const std::string& path) {
  TORCH_CHECK(!module.is_empty(), path, ": module: expected a module, found an empty holder");
  return module->named_parameters();
}

detail::ParameterShapes shapes_of(const Parameters& parameters) {
  detail::ParameterShapes shapes;
  for (const auto& parameter : parameters) shapes[parameter.key()] = parameter->sizes().vec();
  return shapes;
}

// Throws one error with all the ways in which the layer at `prefix` differs from what is
// expected. `num_heads` is compared with the metadata, which may be silent about it.
void check_layer(const detail::TensorSource& file, Layout layout, const std::string& prefix,
                 const std::vector<LayoutTensor>& expected, std::string_view dtype,
                 std::optional<int64_t> num_heads) {
  constexpr size_t max_unexpected = 20;  // of a whole model that has no such prefix
  std::ostringstream problems;
  size_t unexpected = 0;
  for (const LayoutTensor& tensor : expected) {
    const std::string name = detail::join(prefix, tensor.name);
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
    if (entry.dtype->name != dtype) {
      problems << "\n  dtype of " << excerpt(name) << ": expected " << dtype << ", found "
               << entry.dtype->name;
    }
  }
  for (const std::string& name : detail::names_at(file, prefix)) {
    const bool known =
        detail::is_ignored(layout, name) ||
        std::any_of(expected.begin(), expected.end(),
                    [&](const LayoutTensor& tensor) { return tensor.name == name; });
    if (known) continue;
    if (++unexpected <= max_unexpected) {
      problems << "\n  unexpected: " << excerpt(detail::join(prefix, name));
    }
  }
  if (unexpected > max_unexpected) {
    problems << "\n  unexpected: " << unexpected - max_unexpected << " more";
  }
  const auto saved_heads = detail::num_heads_in(file.path(), file.metadata());
  if (num_heads && saved_heads && *num_heads != *saved_heads) {
    problems << "\n  num_heads: expected " << *num_heads << ", found " << *saved_heads
             << " in the metadata";
  }
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

}  // namespace

void load(MultiHeadAttention& module, const std::string& path,
          const WeightFileOptions& options) {
  const Parameters parameters = parameters_of(module, path);
  const auto source = detail::open_tensors(path);
  detail::TensorSource& file = *source;
  const Layout layout = detail::find_layout(file, options);
  const auto tensors = detail::layout_tensors(path, layout, shapes_of(parameters));
  check_layer(file, layout, options.prefix(), tensors, dtype_of(parameters, path),
              module->options.num_heads());

  // Everything is read, and on its device, before the first parameter changes.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const LayoutTensor& tensor : tensors) {
    const at::Tensor stacked = file.read(detail::join(options.prefix(), tensor.name));
    int64_t row = 0;
    for (const std::string& name : tensor.parameters) {
      const at::Tensor& parameter = parameters[name];
      const at::Tensor rows = stacked.narrow(0, row, parameter.size(0));
      copies.emplace_back(parameter, rows.to(parameter.device()));
      row += parameter.size(0);
    }
  }
  const c10::NoGradGuard no_grad;
  for (auto& [parameter, value] : copies) parameter.copy_(value);
}

void save(const MultiHeadAttention& module, const std::string& path,
          const WeightFileOptions& options) {
  const Parameters parameters = parameters_of(module, path);
  dtype_of(parameters, path);  // a file of mixed dtypes could not be loaded
  const Layout layout = options.layout().value_or(Layout::native);
  detail::TensorFile file;
  for (const LayoutTensor& tensor :
       detail::layout_tensors(path, layout, shapes_of(parameters))) {
    std::vector<at::Tensor> parts;
    for (const std::string& name : tensor.parameters) {
      parts.push_back(parameters[name].detach());
    }
    file.tensors[detail::join(options.prefix(), tensor.name)] =
        parts.size() == 1 ? parts[0] : at::cat(parts);
  }
  file.metadata = detail::metadata_of(module->options);
  detail::write_safetensors(path, file);
}

MultiHeadAttentionOptions options_from_file(const std::string& path,
                                            std::optional<int64_t> num_heads,
                                            const WeightFileOptions& options) {
  const auto source = detail::open_tensors(path);
  detail::TensorSource& file = *source;
  const Layout layout = detail::find_layout(file, options);
  const auto shapes = detail::parameter_shapes_in(file, layout, options.prefix());
  const auto tensors = detail::layout_tensors(path, layout, shapes);

  // The first tensor that is there gives the dtype, and the others have to agree.
  const detail::DtypeInfo* dtype = nullptr;
  for (const LayoutTensor& tensor : tensors) {
    const auto found = file.entries().find(detail::join(options.prefix(), tensor.name));
    if (dtype == nullptr && found != file.entries().end()) dtype = found->second.dtype;
  }
  TORCH_CHECK(dtype != nullptr && dtype->type && c10::isFloatingType(*dtype->type), path,
              ": the ", layout, " layer at prefix ", excerpt(options.prefix()),
              ": expected a floating dtype, found ", dtype == nullptr ? "none" : dtype->name);
  check_layer(file, layout, options.prefix(), tensors, dtype->name, num_heads);

  if (!num_heads) num_heads = detail::num_heads_in(path, file.metadata());
  TORCH_CHECK(num_heads.has_value(), path,
              ": num_heads: expected it as an argument, found none in the "
              "file's metadata, and shapes do not tell it");
  const auto& query = shapes.at("W_q.weight");
  const int64_t width = query[0], d_model = query[1];
  TORCH_CHECK(*num_heads > 0 && width % *num_heads == 0, path,
              ": num_heads: expected a divisor of the projections' width ", width, ", found ",
              *num_heads);

  MultiHeadAttentionOptions found(d_model, *num_heads);
  const int64_t kdim = shapes.at("W_k.weight")[1], vdim = shapes.at("W_v.weight")[1];
  if (width != d_model) found.head_dim(width / *num_heads);
  if (kdim != d_model) found.kdim(kdim);
  if (vdim != d_model) found.vdim(vdim);
  found.bias(shapes.count("W_q.bias") != 0).add_bias_kv(shapes.count("bias_k") != 0);
  found.dtype(*dtype->type);
  detail::apply_metadata(path, file.metadata(), found);
  return found;
}

}  // namespace mha
