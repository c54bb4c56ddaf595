#include "validators.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>

namespace mha::cli {

bool read_integer(const std::string& text, int64_t& value) {
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  return result.ec == std::errc() && result.ptr == end;
}

namespace {

bool read_number(const std::string& text, double& value) {
  return CLI::detail::lexical_cast(text, value) && std::isfinite(value);
}

}  // namespace

CLI::Validator integer_from(int64_t smallest) {
  const auto problem = [smallest](const std::string& text) -> std::string {
    int64_t value = 0;
    if (read_integer(text, value) && value >= smallest) return {};
    return fmt::format("expected an integer >= {}, found '{}'", smallest, text);
  };
  return CLI::Validator(problem, "");
}

CLI::Validator number_from_zero() {
  const auto problem = [](const std::string& text) -> std::string {
    double value = 0;
    if (read_number(text, value) && value >= 0) return {};
    return fmt::format("expected a number >= 0, found '{}'", text);
  };
  return CLI::Validator(problem, "");
}

CLI::Validator number_above_zero() {
  const auto problem = [](const std::string& text) -> std::string {
    double value = 0;
    if (read_number(text, value) && value > 0) return {};
    return fmt::format("expected a number > 0, found '{}'", text);
  };
  return CLI::Validator(problem, "");
}

CLI::Validator not_empty() {
  const auto problem = [](const std::string& text) -> std::string {
    return text.empty() ? "expected a value, found ''" : "";
  };
  return CLI::Validator(problem, "");
}

std::string given_value(const char* option, const std::string& text) {
  if (text.empty()) throw CLI::ValidationError(option, "expected a value, found ''");
  return text;
}

CLI::Option* one_of(CLI::Option* option, const std::vector<std::string>& names) {
  const auto problem = [names](const std::string& text) -> std::string {
    if (std::find(names.begin(), names.end(), text) != names.end()) return {};
    return fmt::format("expected one of {}, found '{}'", fmt::join(names, ", "), text);
  };
  return option->check(CLI::Validator(problem, ""))
      ->type_name(fmt::format("{}", fmt::join(names, "|")));
}

}  // namespace mha::cli
