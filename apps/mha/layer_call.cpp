#include "layer_call.h"

#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "text.h"

namespace mha::cli {

LayerCall read_call(LayerInput& input, const MaskOptions& mask, at::ScalarType dtype) {
  LayerCall call;
  call.mask = mask.mask([&input](const std::string& name, const std::string& option) {
    return input.tensor(name, option);
  });
  call.names = input.sequences(mask.tensor_names());
  call.query = input.sequence(call.names.query, dtype);
  call.key = input.sequence(call.names.key, dtype);
  call.value = input.sequence(call.names.value, dtype);
  return call;
}

double map_bytes(const MultiHeadAttention& module, const LayerCall& call) {
  const at::Tensor& key = call.key.defined() ? call.key : call.query;
  if (call.query.dim() < 2 || key.dim() < 2 || call.query.size(-1) == 0) return 0;
  const bool length_first = key.dim() == 3 && !module->options.batch_first();
  const int64_t rows = call.query.numel() / call.query.size(-1);  // of all samples
  return static_cast<double>(rows) * static_cast<double>(key.size(length_first ? 0 : -2)) *
         static_cast<double>(module->options.num_heads()) *
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
