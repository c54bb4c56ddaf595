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

/// Writes lines to standard output, as they are; `main` sees whether they arrived.
void print(const std::string& lines);

/// Writes a report to standard output: its JSON, or what `text` makes of it. What arguments and
/// files hold may be anything; either way it stays on its line and sends nothing to a terminal.
void print_report(const nlohmann::ordered_json& report, bool as_json,
                  std::string (*text)(const nlohmann::ordered_json&));

/// What `operator<<` writes, for types that have no other text.
template <typename T>
std::string stream_text(const T& value) {
  std::ostringstream stream;
  stream << value;
  return stream.str();
}

}  // namespace mha::cli
