#include "text.h"

#include <draw/label.h>
#include <files/dtype.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <nlohmann/json.hpp>

namespace mha::cli {

namespace {

using nlohmann::ordered_json;

/// The same with every string and key made printable.
ordered_json printable(const ordered_json& json) {
  if (json.is_string()) return draw::detail::printable(json.get<std::string>());
  if (!json.is_structured()) return json;
  ordered_json result = json.is_array() ? ordered_json::array() : ordered_json::object();
  for (const auto& [key, value] : json.items()) {
    if (json.is_array()) {
      result.push_back(printable(value));
    } else {
      result[draw::detail::printable(key)] = printable(value);
    }
  }
  return result;
}

/// Indented; control characters and what is not ASCII as escapes, and bytes that are no UTF-8
/// (of a file's name) replaced.
std::string json_text(const ordered_json& json) {
  return json.dump(2, ' ', /*ensure_ascii=*/true, ordered_json::error_handler_t::replace) +
         '\n';
}

}  // namespace

std::string shape_text(const at::Tensor& tensor) {
  return fmt::format("({})", fmt::join(tensor.sizes().begin(), tensor.sizes().end(), ", "));
}

std::string dtype_text(at::ScalarType dtype) {
  const detail::DtypeInfo* known = detail::find_dtype(dtype);
  return known == nullptr ? c10::toString(dtype) : std::string(known->torch_name);
}

void print(const std::string& lines) {
  std::fwrite(lines.data(), 1, lines.size(), stdout);
}

void print_report(const ordered_json& report, bool as_json,
                  std::string (*text)(const ordered_json&)) {
  print(as_json ? json_text(report) : text(printable(report)));
}

}  // namespace mha::cli
