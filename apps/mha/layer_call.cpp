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
