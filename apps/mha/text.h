#pragma once

#include <ATen/core/Tensor.h>

#include <nlohmann/json_fwd.hpp>
#include <sstream>
#include <string>

namespace mha::cli {

/// "(4, 8, 20, 20)".
std::string shape_text(const at::Tensor& tensor);

/// Python's name of a dtype, "float32".
std::string dtype_text(at::ScalarType dtype);

/// The indented text of a JSON value; bytes that are no UTF-8 (a file name) are replaced.
std::string json_text(const nlohmann::ordered_json& json);

/// What `operator<<` writes, for types that have no other text.
template <typename T>
std::string stream_text(const T& value) {
  std::ostringstream stream;
  stream << value;
  return stream.str();
}

}  // namespace mha::cli
