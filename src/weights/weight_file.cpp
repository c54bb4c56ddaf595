#include <mha/weight_file.h>

#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "files/excerpt.h"
#include "files/safetensors.h"
#include "module/module_checks.h"
#include "weights/file_layer.h"
#include "weights/find_layers.h"
#include "weights/layer_check.h"
#include "weights/load_as.h"
#include "weights/options_metadata.h"

namespace mha {
namespace {

using detail::check_layer;
using detail::dtype_of_projections;
using detail::excerpt;
using detail::FileTensor;

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

// How many blocks of rows, one of each parameter's, lie one below the other in a tensor.
int64_t blocks_of(const LayoutTensor& held, const MultiHeadAttentionImpl& module) {
  switch (held.packing) {
    case Packing::groups:
      return module.num_kv_heads();
    case Packing::heads:
      return module.options.num_heads();
    case Packing::rows:
      break;
  }
  return held.repeats;
}

constexpr std::array<const char*, 5> kBiases = {"W_q.bias", "W_k.bias", "W_v.bias", "W_o.bias",
                                                "W_g.bias"};

}  // namespace

void load(MultiHeadAttention& module, const std::string& path,
          const WeightFileOptions& options) {
  const Parameters parameters = parameters_of(module, path);
  const auto source = detail::open_weights(path, options);
  detail::TensorSource& file = *source;
  const Layout layout = detail::find_layout(file, options);
  const auto shapes = shapes_of(parameters);
  const auto tensors = detail::layout_tensors(path, layout, shapes);
  check_layer(file, layout, options, tensors, dtype_of(parameters, path),
              {module->options.num_heads(), module->num_kv_heads()}, module.get());

  // Everything is read, and on its device, before the first parameter changes.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const FileTensor& tensor : tensors) {
    at::Tensor stacked = file.read(detail::join(options.prefix(), tensor.held.name));
    if (tensor.held.transposed) stacked = stacked.t();
    const int64_t blocks = blocks_of(tensor.held, *module);
    if (blocks != 1) stacked = stacked.unflatten(0, {blocks, stacked.size(0) / blocks});
    int64_t row = 0;
    for (const std::string& name : tensor.held.parameters) {
      const at::Tensor& whole = parameters[name];
      const at::Tensor parameter = tensor.head ? whole.detach().select(0, *tensor.head) : whole;
      const int64_t rows = parameter.size(0) / blocks;
      at::Tensor part = stacked.narrow(blocks == 1 ? 0 : 1, row, rows);
      if (blocks != 1) part = part.flatten(0, 1);
      if (tensor.held.plus != 0) {
        part = part.to(c10::promoteTypes(part.scalar_type(), at::kFloat)) + tensor.held.plus;
      }
      copies.emplace_back(parameter, part.to(parameter.device()));
      row += rows;
    }
  }
  const c10::NoGradGuard no_grad;
  for (auto& [parameter, value] : copies) parameter.copy_(value);
  for (const char* bias : kBiases) {
    if (detail::has_unnamed_bias(layout, shapes, bias)) parameters[bias].zero_();
  }
}

MultiHeadAttention load(const std::string& path, std::optional<int64_t> num_heads,
                        const WeightFileOptions& options) {
  MultiHeadAttention module(options_from_file(path, num_heads, options), detail::Undrawn{});
  load(module, path, options);
  return module;
}

MultiHeadAttention detail::load_as(const std::string& path, MultiHeadAttentionOptions options,
                                   const WeightFileOptions& where) {
  {
    const MultiHeadAttention sizes(MultiHeadAttentionOptions(options).device(at::kMeta),
                                   detail::Undrawn{});
    detail::ParameterShapes shapes;
    for (const auto& parameter : sizes->named_parameters()) {
      shapes[parameter.key()] = parameter->sizes().vec();
    }
    const auto file = detail::open_weights(path, where);
    const Layout layout = detail::find_layout(*file, where);
    const auto tensors = detail::layout_tensors(path, layout, shapes);
    if (!options.dtype()) {
      options.dtype(*dtype_of_projections(*file, layout, where, tensors).type);
    }
    const detail::DtypeInfo* dtype = detail::find_dtype(*options.dtype());
    TORCH_CHECK(dtype != nullptr, path, ": dtype: expected one that files can hold, found ",
                *options.dtype());
    check_layer(*file, layout, where, tensors, dtype->name,
                {sizes->options.num_heads(), sizes->num_kv_heads()}, sizes.get());
  }
  MultiHeadAttention module(std::move(options), detail::Undrawn{});
  load(module, path, where);
  return module;
}

void save(const MultiHeadAttention& module, const std::string& path,
          const WeightFileOptions& options) {
  const Parameters parameters = parameters_of(module, path);
  dtype_of(parameters, path);     // a file of mixed dtypes could not be loaded
  detail::check_module(*module);  // nor this one
  const Layout layout = options.layout().value_or(Layout::native);
  const auto shapes = shapes_of(parameters);
  detail::TensorFile file;
  for (const FileTensor& tensor : detail::layout_tensors(path, layout, shapes)) {
    const int64_t blocks = blocks_of(tensor.held, *module);
    std::vector<at::Tensor> parts;
    for (const std::string& name : tensor.held.parameters) {
      const at::Tensor whole = parameters[name].detach();
      const at::Tensor part = tensor.head ? whole.select(0, *tensor.head) : whole;
      parts.push_back(blocks == 1 ? part : part.unflatten(0, {blocks, part.size(0) / blocks}));
    }
    at::Tensor stacked = parts.size() == 1 ? parts[0] : at::cat(parts, blocks == 1 ? 0 : 1);
    if (blocks != 1) stacked = stacked.flatten(0, 1);
    if (tensor.held.plus != 0) stacked = stacked - tensor.held.plus;
    file.tensors[detail::join(options.prefix(), tensor.held.name)] =
        tensor.held.transposed ? stacked.t() : stacked;
  }
  for (const char* bias : kBiases) {
    TORCH_CHECK(!detail::has_unnamed_bias(layout, shapes, bias) ||
                    !parameters[bias].detach().to(at::kCPU).any().item<bool>(),
                path, ": the ", layout, " layout has no place for ", bias,
                ", found one that is not zero");
  }
  file.metadata = detail::metadata_of(module->options);
  detail::write_safetensors(path, file);
}

MultiHeadAttentionOptions options_from_file(const std::string& path,
                                            std::optional<int64_t> num_heads,
                                            const WeightFileOptions& options) {
  const auto source = detail::open_weights(path, options);
  const detail::TensorSource& file = *source;
  const Layout layout = detail::find_layout(file, options);
  const auto shapes = detail::parameter_shapes_in(file, layout, options, num_heads);
  const auto tensors = detail::layout_tensors(path, layout, shapes);

  const detail::DtypeInfo& dtype = dtype_of_projections(file, layout, options, tensors);
  check_layer(file, layout, options, tensors, dtype.name, {num_heads, std::nullopt});

  if (!num_heads) num_heads = detail::num_heads_in(path, file.metadata());
  TORCH_CHECK(num_heads.has_value(), path,
              ": num_heads: expected it as an argument, found none in the "
              "file's metadata, and shapes do not tell it");
  const auto &query = shapes.at("W_q.weight"), &key = shapes.at("W_k.weight");
  const int64_t width = query[0], d_model = query[1], kv_width = key[0],
                v_width = shapes.at("W_v.weight")[0], merged = shapes.at("W_o.weight")[1];
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
  TORCH_CHECK(merged % *num_heads == 0 && v_width == merged / *num_heads * num_kv_heads, path,
              ": num_heads: expected one that makes whole heads of the ", v_width,
              " columns of values and ", merged, " of the output, found ", *num_heads);
  if (merged != width) found.v_head_dim(merged / *num_heads);
  if (num_kv_heads != *num_heads) found.num_kv_heads(num_kv_heads);
  if (kdim != d_model) found.kdim(kdim);
  if (vdim != d_model) found.vdim(vdim);
  found.bias(shapes.count("W_q.bias") != 0).add_bias_kv(shapes.count("bias_k") != 0);
  const bool output_bias = shapes.count("W_o.bias") != 0;
  if (output_bias != found.bias()) found.output_bias(output_bias);
  found.sinks(shapes.count("sinks") != 0);
  found.dtype(*dtype.type);
  if (const auto gain = shapes.find("q_norm"); gain != shapes.end()) {
    const bool of_each = gain->second.size() == 2;
    const int64_t size = gain->second.back();
    const bool over_all = !of_each && size == width && size != head_dim;
    TORCH_CHECK(size == head_dim || over_all, path,
                ": num_heads: expected one that makes heads of ", size,
                " elements, the size of q_norm, found ", *num_heads, " of ", head_dim);
    if (over_all) found.qk_norm_scope(QKNormScope::all_heads);
    if (of_each) found.qk_norm_gain(QKNormGain::per_head);
    const bool has_bias = shapes.count("q_norm_bias") != 0;
    TORCH_CHECK(!of_each || has_bias || file.metadata().count("mha.qk_norm") != 0, path,
                ": q_norm: expected metadata that say whether gains per head are of qk_norm "
                "rms or layer, found none; models have either");
    found.qk_norm(has_bias ? QKNorm::layer : QKNorm::rms).qk_norm_bias(has_bias);
  }
  if (const auto gate = shapes.find("W_g.weight"); gate != shapes.end()) {
    const int64_t rows = gate->second[0];
    TORCH_CHECK(rows == *num_heads || rows == merged, path,
                ": num_heads: expected the rows of W_g.weight, ", rows,
                ", or a gate for each of the ", merged, " columns, found ", *num_heads);
    found.output_gate(rows == merged ? OutputGate::elementwise : OutputGate::per_head);
  }
  detail::apply_metadata(path, file.metadata(), found);
  return found;
}

}  // namespace mha
