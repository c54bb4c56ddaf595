#include "text.h"

#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

namespace mha::cli {

std::string shape_text(const at::Tensor& tensor) {
  return fmt::format("({})", fmt::join(tensor.sizes().begin(), tensor.sizes().end(), ", "));
}

std::string dtype_text(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kBool:
      return "bool";
    default:
      return c10::toString(dtype);
  }
}

std::string json_text(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + '\n';
}

}  // namespace mha::cli
