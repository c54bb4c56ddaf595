#include "weights/config_rotary.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "files/excerpt.h"

namespace mha::detail {
namespace {

bool is_longrope(const std::string& type) {
  return type == "longrope" || type == "su";  // its older name
}

// The numbers of one rotation, wherever the configuration has them.
class RopeNumbers {
 public:
  RopeNumbers(const ConfigValues& values, const std::string& kind)
      : values_(values), parameters_(nlohmann::json::object()) {
    const auto& config = values.config();
    const auto take = [&](const char* name) {
      const auto found = config.find(name);
      if (found == config.end() || found->is_null()) return false;
      if (!found->is_object()) values.fail(name, "an object", *found);
      parameters_ = *found;
      name_ = name;
      return true;
    };
    if (take("rope_parameters")) {
      const auto by_kind = parameters_.find(kind);
      const bool has_kinds =
          parameters_.contains("full_attention") || parameters_.contains("sliding_attention");
      if (has_kinds) {
        if (by_kind == parameters_.end() || !by_kind->is_object()) {
          values.fail(name_ + "." + kind, "an object",
                      by_kind == parameters_.end() ? nlohmann::json() : *by_kind);
        }
        const nlohmann::json of_kind = *by_kind;
        parameters_ = of_kind;
        name_ += "." + kind;
      }
    } else {
      // Where sliding layers have a base of their own, the scaling is of the others.
      const bool is_scaled =
          kind != "sliding_attention" || values.value("rotary_base_sliding").is_null();
      if (is_scaled) take("rope_scaling");
    }
  }

  std::string type() const {
    for (const char* key : {"rope_type", "type"}) {
      const auto found = parameters_.find(key);
      if (found == parameters_.end() || found->is_null()) continue;
      if (!found->is_string()) values_.fail(where(key), "a string", *found);
      return found->get<std::string>();
    }
    return "default";
  }

  std::optional<double> number(const char* key) const {
    const auto found = parameters_.find(key);
    if (found == parameters_.end() || found->is_null()) return std::nullopt;
    return values_.number_of(*found, where(key));
  }
  double needed(const char* key) const {
    const auto found = number(key);
    TORCH_CHECK(found.has_value(), values_.path(), ": ", where(key),
                ": expected a number, found none");
    return *found;
  }
  // Above 0: every number of a scaling.
  double positive(const char* key) const {
    const double found = needed(key);
    if (!(found > 0)) values_.fail(where(key), "a number above 0", found);
    return found;
  }

  std::vector<double> numbers(const char* key) const {
    const auto found = parameters_.find(key);
    if (found == parameters_.end() || !found->is_array()) {
      values_.fail(where(key), "an array of numbers",
                   found == parameters_.end() ? nlohmann::json() : *found);
    }
    std::vector<double> all;
    for (const auto& value : *found) all.push_back(values_.number_of(value, where(key)));
    return all;
  }

  // How many times as long as the original the sequences are, where no factor says so.
  double growth(int64_t original) const {
    const auto& config = values_.config();
    const auto longest = config.find("max_position_embeddings");
    const nlohmann::json found = longest == config.end() ? nlohmann::json() : *longest;
    return double(values_.count_of(found, "max_position_embeddings")) / double(original);
  }

  int64_t original_max_position() const {
    const char* name = "original_max_position_embeddings";
    // Beside the table, as Phi-3 has it, it goes before that in the table, but for one of many.
    const auto beside = values_.config().find(name);
    if (name_.find('.') == std::string::npos && beside != values_.config().end() &&
        !beside->is_null()) {
      return values_.count_of(*beside, name);
    }
    if (const auto found = parameters_.find(name);
        found != parameters_.end() && !found->is_null()) {
      return values_.count_of(*found, where(name));
    }
    for (const char* key : {name, "max_position_embeddings"}) {
      const auto found = values_.config().find(key);
      if (found != values_.config().end() && !found->is_null()) {
        return values_.count_of(*found, key);
      }
      if (const auto usual = values_.count("rotary_original")) return *usual;
    }
    TORCH_CHECK(false, values_.path(), ": ", where(name), ": expected a number, found none");
  }

  bool truncate() const {
    const auto found = parameters_.find("truncate");
    if (found == parameters_.end() || found->is_null()) return true;
    if (!found->is_boolean()) values_.fail(where("truncate"), "true or false", *found);
    return found->get<bool>();
  }

  bool has_alpha() const {
    return values_.flag("rotary_alpha").value_or(false) && number("alpha").value_or(0) != 0;
  }

  // A number that nothing here reads may change what the others mean.
  void check_known() const {
    static const std::set<std::string> known = {"rope_type",
                                                "type",
                                                "rope_theta",
                                                "partial_rotary_factor",
                                                "factor",
                                                "beta_fast",
                                                "beta_slow",
                                                "original_max_position_embeddings",
                                                "attention_factor",
                                                "truncate",
                                                "mscale",
                                                "mscale_all_dim",
                                                "low_freq_factor",
                                                "high_freq_factor",
                                                "max_position_embeddings"};
    for (const auto& [key, value] : parameters_.items()) {
      const bool is_factor =
          (key == "short_factor" || key == "long_factor") && is_longrope(type());
      const bool is_alpha = key == "alpha" && has_alpha();
      const auto tuning = values_.value("temperature_tuning");
      const bool is_beta = key == "llama_4_scaling_beta" && !tuning.is_null() &&
                           tuning.at("scale").get<std::string>().find(key) != std::string::npos;
      TORCH_CHECK(known.count(key) != 0 || is_factor || is_alpha || is_beta || value.is_null(),
                  values_.path(), ": ", name_, ": expected numbers that are known, found ",
                  excerpt(key));
    }
  }

  std::string where(const std::string& key) const {
    return name_.empty() ? key : name_ + "." + key;
  }

 private:
  const ConfigValues& values_;
  nlohmann::json parameters_;
  std::string name_;
};

RotaryScaling yarn_in(const RopeNumbers& rope) {
  const int64_t original = rope.original_max_position();
  YarnScaling scaling(rope.number("factor") ? rope.positive("factor") : rope.growth(original),
                      original);
  if (rope.number("beta_fast").value_or(0) != 0) scaling.beta_fast(rope.positive("beta_fast"));
  if (rope.number("beta_slow").value_or(0) != 0) scaling.beta_slow(rope.positive("beta_slow"));
  scaling.truncate(rope.truncate()).attention_factor(rope.number("attention_factor"));
  const double mscale = rope.number("mscale").value_or(0),
               mscale_all_dim = rope.number("mscale_all_dim").value_or(0);
  if (mscale != 0 && mscale_all_dim != 0) scaling.mscale(mscale).mscale_all_dim(mscale_all_dim);
  return scaling;
}

RotaryScaling longrope_in(const RopeNumbers& rope) {
  const int64_t original = rope.original_max_position();
  const double factor = rope.number("factor") ? rope.positive("factor") : rope.growth(original);
  return LongRopeScaling(rope.numbers("short_factor"), rope.numbers("long_factor"), original)
      .factor(std::max(factor, 1.0))
      .attention_factor(rope.number("attention_factor"));
}

// Which part of a head turns.
double fraction_in(const RopeNumbers& rope, const ConfigValues& values) {
  const double fraction = rope.number("partial_rotary_factor")
                              .value_or(values.number("rotary_fraction").value_or(1));
  TORCH_CHECK(fraction > 0 && fraction <= 1, values.path(), ": ",
              rope.where("partial_rotary_factor"),
              ": expected a number above 0 and at most 1, found ", fraction);
  return fraction;
}

// Those of all pairs of a head, of which only the first part of them turns.
std::vector<double> proportional_in(const RopeNumbers& rope, double part, double base,
                                    int64_t head_dim) {
  const auto turning = static_cast<int64_t>(std::floor(part * double(head_dim) / 2));
  const double factor = rope.number("factor") ? rope.positive("factor") : 1;
  std::vector<double> frequencies;
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    frequencies.push_back(
        i < turning ? std::pow(base, -2 * double(i) / double(head_dim)) / factor : 0);
  }
  return frequencies;
}

RotaryScaling scaling_in(const RopeNumbers& rope, const ConfigValues& values) {
  const std::string type = rope.type();
  if (type == "default" || type == "proportional") return {};
  if (type == "linear") return LinearScaling(rope.positive("factor"));
  if (type == "yarn") return yarn_in(rope);
  if (is_longrope(type)) return longrope_in(rope);
  // A fixed one of the length, whatever the type says, as Hunyuan's files have it.
  if (type == "dynamic" && rope.has_alpha()) return NtkScaling(rope.positive("alpha"));
  if (type == "llama3") {
    return Llama3Scaling(rope.positive("factor"), rope.original_max_position())
        .low_freq_factor(rope.positive("low_freq_factor"))
        .high_freq_factor(rope.positive("high_freq_factor"));
  }
  TORCH_CHECK(false, values.path(), ": ", rope.where("rope_type"),
              ": expected default, linear, yarn, llama3, longrope or proportional, found ",
              excerpt(type));
}

}  // namespace

std::optional<RotaryOptions> rotary_in_config(const ConfigValues& values,
                                              const std::string& kind, int64_t head_dim) {
  const auto pairs = values.text("rotary");
  if (!pairs) return std::nullopt;
  const RopeNumbers rope(values, kind);
  const RotaryScaling scaling = scaling_in(rope, values);  // an unknown type is said first
  rope.check_known();
  RotaryOptions options;
  options.pairing(*pairs == "interleaved" ? RotaryPairing::interleaved
                                          : RotaryPairing::half_split);
  auto base = rope.number("rope_theta");
  if (!base && kind == "sliding_attention") base = values.number("rotary_base_sliding");
  if (!base) base = values.number("rotary_base");
  TORCH_CHECK(base.has_value(), values.path(), ": ", rope.where("rope_theta"),
              ": expected a number, found none");
  options.base(*base);
  if (rope.type() == "proportional") {
    options.frequencies(proportional_in(rope, fraction_in(rope, values), *base, head_dim));
    return options;
  }
  auto dim = values.count("rotary_dim");
  if (!dim) {
    dim = static_cast<int64_t>(double(head_dim) * fraction_in(rope, values));
  }
  TORCH_CHECK(*dim > 0 && *dim <= head_dim && *dim % 2 == 0, values.path(),
              ": rotary positions: expected an even number of a head's ", head_dim,
              " elements, found ", *dim);
  if (*dim != head_dim) options.rotary_dim(*dim);
  options.scaling(scaling);
  return options;
}

}  // namespace mha::detail
