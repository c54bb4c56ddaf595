#include "layer_call.h"

#include <c10/util/Exception.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <set>

#include "text.h"

namespace mha::cli {
namespace {

LayerCall::Names names_in(const InputTensors& input, const std::set<std::string>& of_masks) {
  if (input.has("query")) {
    TORCH_CHECK(!input.has("x"), input.path(), ": expected 'query' or 'x', found both");
    TORCH_CHECK(input.has("key") == input.has("value"), input.path(),
                ": expected both 'key' and 'value' or neither, found only '",
                input.has("key") ? "key" : "value", "'");
    if (input.has("key")) return {"query", "key", "value"};
    return {"query", "", ""};
  }
  if (input.has("x")) return {"x", "", ""};
  const auto only = input.only_one(
      [&](const std::string& name, const detail::TensorEntry& /*entry*/) {
        return of_masks.count(name) == 0;
      },
      "a tensor 'query' or 'x', or a single tensor beside those of the mask options");
  return {only, "", ""};
}

/// Undefined for an empty name.
at::Tensor sequence(InputTensors& input, const std::string& name, at::ScalarType dtype) {
  if (name.empty()) return {};
  const at::Tensor tensor = input.tensor(name, "--input");
  TORCH_CHECK(tensor.scalar_type() == dtype, input.path(), ": ", name, ": expected ",
              dtype_text(dtype), " like the weights, found ", dtype_text(tensor.scalar_type()));
  return tensor;
}

}  // namespace

LayerCall read_call(InputTensors& input, const MaskOptions& mask, const ModelLayer& layer) {
  const MultiHeadAttention& module = layer.attention;
  const at::ScalarType dtype = module->W_q->weight.scalar_type();
  LayerCall call;
  call.mask = mask.mask([&input](const std::string& name, const std::string& option) {
    return input.tensor(name, option);
  });
  call.names = names_in(input, mask.tensor_names());
  call.query = sequence(input, call.names.query, dtype);
  call.key = sequence(input, call.names.key, dtype);
  call.value = sequence(input, call.names.value, dtype);
  const at::Tensor& keys = call.key.defined() ? call.key : call.query;
  // Of inputs that are no sequences the call itself will say so.
  if (call.query.dim() >= 2 && keys.dim() >= 2) {
    call.mask = layer.mask(call.query.size(-2), keys.size(-2)) & call.mask;
  }
  return call;
}

MapSize map_size(const MultiHeadAttention& module, const LayerCall& call) {
  const at::Tensor& key = call.key.defined() ? call.key : call.query;
  const int64_t dimensions = call.query.dim();
  if ((dimensions != 2 && dimensions != 3) || key.dim() != dimensions) return {};
  const bool length_first = dimensions == 3 && !module->options.batch_first();
  const int64_t length_at = length_first ? 0 : -2;
  return {dimensions == 2 ? 1 : call.query.size(length_first ? 1 : 0),
          static_cast<double>(call.query.size(length_at)) *
              static_cast<double>(key.size(length_at))};
}

double weights_bytes(const MultiHeadAttention& module, const LayerCall& call, Weights weights) {
  const int64_t maps = weights == Weights::none       ? 0
                       : weights == Weights::averaged ? 1
                                                      : module->options.num_heads();
  const MapSize size = map_size(module, call);
  return static_cast<double>(size.samples) * static_cast<double>(maps) * size.weights *
         static_cast<double>(call.query.element_size());
}

nlohmann::ordered_json described(const at::Tensor& tensor) {
  return {{"shape", tensor.sizes().vec()}, {"dtype", dtype_text(tensor.scalar_type())}};
}

nlohmann::ordered_json described(const LayerCall& call) {
  nlohmann::ordered_json inputs = {{call.names.query, described(call.query)}};
  if (call.key.defined()) inputs[call.names.key] = described(call.key);
  if (call.value.defined()) inputs[call.names.value] = described(call.value);
  return inputs;
}

std::string tensor_text(const nlohmann::ordered_json& described) {
  const auto shape = described["shape"].get<std::vector<int64_t>>();
  return fmt::format("({}) {}", fmt::join(shape, ", "), described["dtype"].get<std::string>());
}

}  // namespace mha::cli
