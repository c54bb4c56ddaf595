#include "weights/config_value.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>

#include "files/excerpt.h"

namespace mha::detail {
namespace {

constexpr uint64_t kMaxCount = uint64_t{1} << 31;

// The member at "a.b"; null pointer: there is none.
const nlohmann::json* member_at(const nlohmann::json& config, std::string_view names) {
  const nlohmann::json* at = &config;
  while (true) {
    const size_t dot = names.find('.');
    if (!at->is_object()) return nullptr;
    const auto found = at->find(std::string(names.substr(0, dot)));
    if (found == at->end()) return nullptr;
    at = &*found;
    if (dot == std::string_view::npos) return at;
    names.remove_prefix(dot + 1);
  }
}

// "$a.b|$c|=8"
nlohmann::json looked_up(const nlohmann::json& config, std::string_view text) {
  while (true) {
    const size_t bar = text.find('|');
    const std::string_view one = text.substr(0, bar);
    if (one.front() == '=') {
      const std::string literal(one.substr(1));
      const auto value = nlohmann::json::parse(literal, nullptr, false);
      return value.is_discarded() ? nlohmann::json(literal) : value;
    }
    if (const nlohmann::json* found = member_at(config, one.substr(1))) return *found;
    if (bar == std::string_view::npos) return nullptr;
    text.remove_prefix(bar + 1);
  }
}

// The first name in such a text; `other` if it is none.
std::string name_in(const nlohmann::json& expression, const char* other) {
  if (!expression.is_string()) return other;
  const std::string& text = expression.get_ref<const std::string&>();
  return text[0] == '$' ? text.substr(1, text.find('|') - 1) : other;
}

}  // namespace

ConfigValues::ConfigValues(const std::string& path, const nlohmann::json& architecture,
                           const nlohmann::json& config)
    : path_(path), architecture_(architecture), config_(config) {}

nlohmann::json ConfigValues::value(const char* member) const {
  const auto found = architecture_.find(member);
  return found == architecture_.end() ? nlohmann::json() : evaluated(*found);
}

nlohmann::json ConfigValues::evaluated(const nlohmann::json& expression) const {
  if (expression.is_string()) {
    const auto& text = expression.get_ref<const std::string&>();
    return text[0] == '$' ? looked_up(config_, text) : expression;
  }
  if (expression.is_array() && !expression.empty() && expression[0].is_object()) {
    for (const auto& item : expression) {
      const auto condition = item.find("if");
      if (condition == item.end() || holds(*condition)) return evaluated(item.at("then"));
    }
    return nullptr;
  }
  return expression;
}

bool ConfigValues::holds(const nlohmann::json& condition) const {
  if (condition.is_object()) {
    const auto& key = condition.at("key").get_ref<const std::string&>();
    auto value = evaluated(key);
    // What is null is as if it were not there: its default.
    if (value.is_null()) value = looked_up(config_, key.substr(key.rfind('|') + 1));
    const bool wanted = condition.contains("in");
    const auto& list = condition.at(wanted ? "in" : "not_in");
    return wanted == (std::find(list.begin(), list.end(), value) != list.end());
  }
  const auto value = evaluated(condition);
  if (value.is_number()) return value.get<double>() != 0;
  if (value.is_boolean()) return value.get<bool>();
  if (!value.is_null()) {
    fail(name_in(condition, "a condition"), "true, false or a number", value);
  }
  return false;
}

std::string ConfigValues::name_of(const char* member) const {
  const auto found = architecture_.find(member);
  return found == architecture_.end() ? member : name_in(*found, member);
}

void ConfigValues::fail(const std::string& what, const std::string& expected,
                        const nlohmann::json& found) const {
  TORCH_CHECK(false, path_, ": ", what, ": expected ", expected, ", found ",
              found.is_primitive() ? excerpt(found.dump(-1, ' ', true)) : found.type_name());
}

int64_t ConfigValues::count_of(const nlohmann::json& value, const std::string& what) const {
  if (!value.is_number_unsigned() || value.get<uint64_t>() == 0 ||
      value.get<uint64_t>() > kMaxCount) {
    fail(what, "a whole number from 1 to 2^31", value);
  }
  return value.get<int64_t>();
}

double ConfigValues::number_of(const nlohmann::json& value, const std::string& what) const {
  if (!value.is_number() || !std::isfinite(value.get<double>())) {
    fail(what, "a finite number", value);
  }
  return value.get<double>();
}

std::optional<int64_t> ConfigValues::count(const char* member) const {
  const auto found = value(member);
  if (found.is_null()) return std::nullopt;
  return count_of(found, name_of(member));
}

std::optional<double> ConfigValues::number(const char* member) const {
  const auto found = value(member);
  if (found.is_null()) return std::nullopt;
  return number_of(found, name_of(member));
}

std::optional<bool> ConfigValues::flag(const char* member) const {
  const auto found = value(member);
  if (found.is_null()) return std::nullopt;
  if (!found.is_boolean()) fail(name_of(member), "true or false", found);
  return found.get<bool>();
}

std::optional<std::string> ConfigValues::text(const char* member) const {
  const auto found = value(member);
  if (found.is_null()) return std::nullopt;
  if (!found.is_string()) fail(name_of(member), "a string", found);
  return found.get<std::string>();
}

int64_t ConfigValues::needed_count(const char* member) const {
  const auto found = count(member);
  TORCH_CHECK(found.has_value(), path_, ": ", name_of(member),
              ": expected a whole number from 1 to 2^31, found none");
  return *found;
}

}  // namespace mha::detail
