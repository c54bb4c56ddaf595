#include "rotary_option.h"

#include <c10/util/Exception.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <vector>

#include "option_values.h"
#include "validators.h"

namespace mha::cli {
namespace {

/// The settings of the argument, and the names of those that it may have.
class Settings {
 public:
  explicit Settings(const std::string& text) {
    for (const std::string& setting : CLI::detail::split(text, ',')) {
      const size_t equals = setting.find('=');
      TORCH_CHECK(equals != std::string::npos && equals > 0,
                  "--rotary: expected NAME=VALUE, found '", setting, "'");
      const std::string name = setting.substr(0, equals);
      TORCH_CHECK(values_.emplace(name, setting.substr(equals + 1)).second,
                  "--rotary: expected each setting once, found '", name, "' twice");
    }
  }

  /// The value of a setting that the argument may have.
  std::optional<std::string> text(const std::string& name) {
    names_.push_back(name);
    const auto found = values_.find(name);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }

  std::optional<double> number(const std::string& name) {
    const auto found = text(name);
    if (!found) return std::nullopt;
    double value = 0;
    if (!CLI::detail::lexical_cast(*found, value)) fail(name, "a number", *found);
    return value;
  }

  std::optional<int64_t> integer(const std::string& name) {
    const auto found = text(name);
    if (!found) return std::nullopt;
    int64_t value = 0;
    if (!read_integer(*found, value)) fail(name, "an integer", *found);
    return value;
  }

  std::optional<std::string> one_of(const std::string& name,
                                    const std::vector<std::string>& values) {
    const auto found = text(name);
    if (found && std::find(values.begin(), values.end(), *found) == values.end()) {
      fail(name, fmt::format("one of {}", fmt::join(values, ", ")), *found);
    }
    return found;
  }

  /// What a scaling cannot do without.
  template <typename Value>
  static Value needed(const std::string& name, const std::optional<Value>& value) {
    TORCH_CHECK(value.has_value(), "--rotary: ", name,
                ": expected it beside this scaling, found none");
    return *value;
  }

  /// Throws if the argument has a setting that nobody has asked for.
  void check_all_are_known() const {
    for (const auto& [name, value] : values_) {
      std::string hyphened = name;  // as settings were once not
      std::replace(hyphened.begin(), hyphened.end(), '_', '-');
      const bool was_known = hyphened != name && is_known(hyphened);
      TORCH_CHECK(!was_known, "--rotary: expected ", hyphened, ", found '", name, "'");
      TORCH_CHECK(is_known(name), "--rotary: expected settings of ",
                  fmt::format("{}", fmt::join(names_, ", ")), ", found '", name, "'");
    }
  }

 private:
  bool is_known(const std::string& name) const {
    return std::find(names_.begin(), names_.end(), name) != names_.end();
  }
  [[noreturn]] static void fail(const std::string& name, const std::string& expected,
                                const std::string& found) {
    TORCH_CHECK(false, "--rotary: ", name, ": expected ", expected, ", found '", found, "'");
  }

  std::map<std::string, std::string> values_;
  std::vector<std::string> names_;
};

RotaryScaling read_scaling(Settings& settings) {
  const auto kind = settings.one_of("scaling", {"none", "linear", "ntk", "yarn", "llama3"});
  if (!kind || *kind == "none") return {};
  const double factor = Settings::needed("factor", settings.number("factor"));
  if (*kind == "linear") return LinearScaling(factor);
  if (*kind == "ntk") return NtkScaling(factor);
  const int64_t original =
      Settings::needed("original-max-position", settings.integer("original-max-position"));
  if (*kind == "llama3") {
    Llama3Scaling llama3(factor, original);
    llama3.low_freq_factor(
        settings.number("low-freq-factor").value_or(llama3.low_freq_factor()));
    llama3.high_freq_factor(
        settings.number("high-freq-factor").value_or(llama3.high_freq_factor()));
    return llama3;
  }
  YarnScaling yarn(factor, original);
  yarn.beta_fast(settings.number("beta-fast").value_or(yarn.beta_fast()));
  yarn.beta_slow(settings.number("beta-slow").value_or(yarn.beta_slow()));
  yarn.attention_factor(settings.number("attention-factor"));
  if (const auto truncate = settings.one_of("truncate", {"true", "false"})) {
    yarn.truncate(*truncate == "true");
  }
  return yarn;
}

}  // namespace

CLI::Option* RotaryOption::add_to(CLI::App& app) {
  return app
      .add_option_function<std::string>(
          "--rotary",
          [this](const std::string& text) { text_ = given_value("--rotary", text); },
          "How queries and keys are rotated; default: as the file says.\n"
          "base, pairing=half-split|interleaved, rotary-dim, and\n"
          "scaling=linear|ntk|yarn|llama3 with factor and so on")
      ->expected(0, 1)
      ->default_str("base=10000")
      ->type_name("NAME=VALUE,...");
}

std::optional<RotaryOptions> RotaryOption::rotary() const {
  if (text_.empty()) return std::nullopt;
  Settings settings(text_);
  RotaryOptions options;
  if (const auto base = settings.number("base")) options.base(*base);
  const OptionValues<RotaryPairing> pairings = {{"half-split", RotaryPairing::half_split},
                                                {"interleaved", RotaryPairing::interleaved}};
  if (const auto pairing = settings.one_of("pairing", names_of(pairings))) {
    options.pairing(value_of(pairings, *pairing));
  }
  options.rotary_dim(settings.integer("rotary-dim"));
  options.scaling(read_scaling(settings));
  settings.check_all_are_known();
  return options;
}

}  // namespace mha::cli
