#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace mha::detail {

/// What stands in a model's config.json, under the checks of hostile data. The members of an
/// architecture (`architectures.h`) are looked up in it. Errors start with its path.
class ConfigValues {
 public:
  /// `architecture` and `config` must outlive this.
  ConfigValues(const std::string& path, const nlohmann::json& architecture,
               const nlohmann::json& config);

  const std::string& path() const { return path_; }
  const nlohmann::json& config() const { return config_; }

  /// What a member of the architecture comes to; null if it has none.
  nlohmann::json value(const char* member) const;
  /// What an expression comes to, as architectures have them.
  nlohmann::json evaluated(const nlohmann::json& expression) const;
  /// Whether a condition holds: not null, false or 0. Throws if it is no such value.
  bool holds(const nlohmann::json& condition) const;

  /// The member as a whole number from 1 to 2^31; nothing if it is null.
  std::optional<int64_t> count(const char* member) const;
  /// As a finite number.
  std::optional<double> number(const char* member) const;
  std::optional<bool> flag(const char* member) const;
  std::optional<std::string> text(const char* member) const;
  /// The same where it has to be there.
  int64_t needed_count(const char* member) const;

  /// The same of any value; `what` it is stands in the error.
  int64_t count_of(const nlohmann::json& value, const std::string& what) const;
  double number_of(const nlohmann::json& value, const std::string& what) const;

  /// Throws: `what` was expected to be something else.
  [[noreturn]] void fail(const std::string& what, const std::string& expected,
                         const nlohmann::json& found) const;

  /// The name in config.json that a member is looked up by.
  std::string name_of(const char* member) const;

 private:
  const std::string& path_;
  const nlohmann::json& architecture_;
  const nlohmann::json& config_;
};

}  // namespace mha::detail
