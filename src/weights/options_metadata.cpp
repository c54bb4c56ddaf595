#include "weights/options_metadata.h"

#include <c10/util/Exception.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>
#include <variant>
#include <vector>

#include "files/excerpt.h"

namespace mha::detail {
namespace {

std::string text_of(Weights weights) {
  return c10::str(weights);
}

// JSON is independent of the locale, and its numbers keep every bit.
template <typename Value>
std::string text_of(Value value) {
  return nlohmann::json(value).dump();
}

[[noreturn]] void fail(const std::string& path, const std::string& key,
                       const std::string& expected, const std::string& found) {
  TORCH_CHECK(false, path, ": metadata ", excerpt(key), ": expected ", expected, ", found ",
              excerpt(found));
}

// The value that metadata gives for `key`, as JSON; discarded if it is none, or too long to be
// a number or bool.
std::optional<nlohmann::json> find_json(const Metadata& metadata, const std::string& key) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return std::nullopt;
  if (found->second.size() > 64) return nlohmann::json(nlohmann::json::value_t::discarded);
  return nlohmann::json::parse(found->second, nullptr, /*allow_exceptions=*/false);
}

std::optional<double> find_number(const std::string& path, const Metadata& metadata,
                                  const std::string& key) {
  const auto json = find_json(metadata, key);
  if (!json) return std::nullopt;
  if (!json->is_number()) fail(path, key, "a number", metadata.at(key));
  return json->get<double>();
}

std::optional<bool> find_bool(const std::string& path, const Metadata& metadata,
                              const std::string& key) {
  const auto json = find_json(metadata, key);
  if (!json) return std::nullopt;
  if (!json->is_boolean()) fail(path, key, "true or false", metadata.at(key));
  return json->get<bool>();
}

std::optional<Weights> find_weights(const std::string& path, const Metadata& metadata,
                                    const std::string& key) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return std::nullopt;
  for (const Weights weights : {Weights::none, Weights::averaged, Weights::per_head}) {
    if (found->second == text_of(weights)) return weights;
  }
  fail(path, key, "none, averaged or per_head", found->second);
}

// One of a few values, by the name that it is printed as.
template <typename Value>
std::optional<Value> find_named(const std::string& path, const Metadata& metadata,
                                const std::string& key, const std::vector<Value>& values) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return std::nullopt;
  std::string expected;
  for (const Value& value : values) {
    if (found->second == c10::str(value)) return value;
    expected += (expected.empty() ? "" : " or ") + c10::str(value);
  }
  fail(path, key, expected, found->second);
}

std::optional<int64_t> find_count(const std::string& path, const Metadata& metadata,
                                  const std::string& key) {
  const auto json = find_json(metadata, key);
  if (!json) return std::nullopt;
  // Positive numbers are unsigned in nlohmann's eyes, and that of int64_t is the smaller range.
  constexpr uint64_t max = std::numeric_limits<int64_t>::max();
  if (!json->is_number_unsigned() || json->get<uint64_t>() == 0 ||
      json->get<uint64_t>() > max) {
    fail(path, key, "a whole number above 0", metadata.at(key));
  }
  return json->get<int64_t>();
}

// As they are written: an array of numbers, and nothing else.
std::optional<std::vector<double>> find_numbers(const std::string& path,
                                                const Metadata& metadata,
                                                const std::string& key) {
  constexpr size_t longest = size_t{1} << 20;
  const auto found = metadata.find(key);
  if (found == metadata.end()) return std::nullopt;
  const std::string& text = found->second;
  const bool is_flat = text.size() <= longest && !text.empty() && text[0] == '[' &&
                       text.find_first_not_of("0123456789+-.eE, ]", 1) == std::string::npos;
  const auto json = is_flat ? nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false)
                            : nlohmann::json(nlohmann::json::value_t::discarded);
  if (!json.is_array()) fail(path, key, "an array of numbers", text);
  return json.get<std::vector<double>>();
}

constexpr const char* rotary = "mha.rotary.";
constexpr const char* tuning = "mha.temperature_tuning.";

// What each scaling writes, and reads again.
struct WriteScaling {
  Metadata& metadata;

  template <typename Value>
  void write(const char* key, const Value& value) const {
    metadata[rotary + std::string(key)] = text_of(value);
  }
  void name(const char* scaling) const { metadata[rotary + std::string("scaling")] = scaling; }

  void operator()(const std::monostate&) const {}
  void operator()(const LinearScaling& s) const {
    name("linear");
    write("factor", s.factor());
  }
  void operator()(const NtkScaling& s) const {
    name("ntk");
    write("factor", s.factor());
  }
  void operator()(const YarnScaling& s) const {
    name("yarn");
    write("factor", s.factor());
    write("original_max_position", s.original_max_position());
    write("beta_fast", s.beta_fast());
    write("beta_slow", s.beta_slow());
    if (s.attention_factor()) write("attention_factor", *s.attention_factor());
    if (s.mscale() != 1) write("mscale", s.mscale());
    if (s.mscale_all_dim() != 0) write("mscale_all_dim", s.mscale_all_dim());
    write("truncate", s.truncate());
  }
  void operator()(const LongRopeScaling& s) const {
    name("longrope");
    write("factor", s.factor());
    write("original_max_position", s.original_max_position());
    write("short_factor", s.short_factor());
    write("long_factor", s.long_factor());
    if (s.attention_factor()) write("attention_factor", *s.attention_factor());
  }
  void operator()(const Llama3Scaling& s) const {
    name("llama3");
    write("factor", s.factor());
    write("original_max_position", s.original_max_position());
    write("low_freq_factor", s.low_freq_factor());
    write("high_freq_factor", s.high_freq_factor());
  }
};

RotaryScaling read_scaling(const std::string& path, const Metadata& metadata) {
  const std::string start = rotary;
  const auto number = [&](const char* key, double otherwise) {
    return find_number(path, metadata, start + key).value_or(otherwise);
  };
  const auto name = find_named<std::string>(path, metadata, start + "scaling",
                                            {"linear", "ntk", "yarn", "llama3", "longrope"});
  if (!name) return {};
  const double factor = number("factor", 1);
  if (*name == "linear") return LinearScaling(factor);
  if (*name == "ntk") return NtkScaling(factor);
  // 0 is for the constructor to refuse.
  const int64_t original =
      find_count(path, metadata, start + "original_max_position").value_or(0);
  if (*name == "llama3") {
    Llama3Scaling s(factor, original);
    return s.low_freq_factor(number("low_freq_factor", s.low_freq_factor()))
        .high_freq_factor(number("high_freq_factor", s.high_freq_factor()));
  }
  const auto attention_factor = find_number(path, metadata, start + "attention_factor");
  if (*name == "longrope") {
    const auto factors = [&](const char* key) {
      return find_numbers(path, metadata, start + key).value_or(std::vector<double>());
    };
    LongRopeScaling s(factors("short_factor"), factors("long_factor"), original);
    return s.factor(factor).attention_factor(attention_factor);
  }
  YarnScaling s(factor, original);
  s.beta_fast(number("beta_fast", s.beta_fast()));
  s.beta_slow(number("beta_slow", s.beta_slow()));
  s.attention_factor(attention_factor);
  s.mscale(number("mscale", s.mscale()));
  s.mscale_all_dim(number("mscale_all_dim", s.mscale_all_dim()));
  s.truncate(find_bool(path, metadata, start + "truncate").value_or(s.truncate()));
  return s;
}

}  // namespace

Metadata metadata_of(const MultiHeadAttentionOptions& options) {
  Metadata metadata = {
      {"format", "pt"},
      {"mha.num_heads", text_of(options.num_heads())},
      {"mha.output_bias", text_of(options.output_bias().value_or(options.bias()))},
      {"mha.dropout", text_of(options.dropout())},
      {"mha.add_zero_attn", text_of(options.add_zero_attn())},
      {"mha.batch_first", text_of(options.batch_first())},
      {"mha.weights", text_of(options.weights())},
      {"mha.weights_after_dropout", text_of(options.weights_after_dropout())},
  };
  if (options.num_kv_heads().value_or(options.num_heads()) != options.num_heads()) {
    metadata["mha.num_kv_heads"] = text_of(*options.num_kv_heads());
  }
  if (options.rotary()) {
    const RotaryOptions& given = *options.rotary();
    const std::string start = rotary;
    metadata[start + "base"] = text_of(given.base());
    metadata[start + "pairing"] = c10::str(given.pairing());
    if (!given.frequencies().empty()) {
      metadata[start + "frequencies"] = text_of(given.frequencies());
    }
    if (given.rotary_dim()) metadata[start + "rotary_dim"] = text_of(*given.rotary_dim());
    std::visit(WriteScaling{metadata}, given.scaling());
  }
  if (options.qk_norm() != QKNorm::none) {
    metadata["mha.qk_norm"] = c10::str(options.qk_norm());
    metadata["mha.qk_norm_eps"] = text_of(options.qk_norm_eps());
    metadata["mha.qk_norm_scope"] = c10::str(options.qk_norm_scope());
    metadata["mha.qk_norm_gain"] = c10::str(options.qk_norm_gain());
    metadata["mha.qk_norm_order"] = c10::str(options.qk_norm_order());
  }
  if (const auto& given = options.temperature_tuning()) {
    const std::string start = tuning;
    metadata[start + "scale"] = text_of(given->scale());
    metadata[start + "floor_scale"] = text_of(given->floor_scale());
    if (given->offset() != 0) metadata[start + "offset"] = text_of(given->offset());
  }
  if (options.value_scale() != 1) {
    metadata["mha.value_scale"] = text_of(options.value_scale());
  }
  if (options.output_gate() != OutputGate::none) {
    metadata["mha.output_gate"] = c10::str(options.output_gate());
  }
  if (options.scale()) metadata["mha.scale"] = text_of(*options.scale());
  if (options.softcap() > 0) metadata["mha.softcap"] = text_of(options.softcap());
  return metadata;
}

std::optional<int64_t> num_heads_in(const std::string& path, const Metadata& metadata) {
  return find_count(path, metadata, "mha.num_heads");
}

std::optional<int64_t> num_kv_heads_in(const std::string& path, const Metadata& metadata) {
  return find_count(path, metadata, "mha.num_kv_heads");
}

std::optional<bool> output_bias_in(const std::string& path, const Metadata& metadata) {
  return find_bool(path, metadata, "mha.output_bias");
}

std::optional<RotaryOptions> rotary_in(const std::string& path, const Metadata& metadata) {
  const std::string start = rotary;
  const auto base = find_number(path, metadata, start + "base");
  if (!base) return std::nullopt;
  RotaryOptions found;
  found.base(*base).rotary_dim(find_count(path, metadata, start + "rotary_dim"));
  found.scaling(read_scaling(path, metadata));
  if (auto given = find_numbers(path, metadata, start + "frequencies")) {
    found.frequencies(std::move(*given));
  }
  if (const auto pairing =
          find_named<RotaryPairing>(path, metadata, start + "pairing",
                                    {RotaryPairing::half_split, RotaryPairing::interleaved})) {
    found.pairing(*pairing);
  }
  return found;
}

void apply_metadata(const std::string& path, const Metadata& metadata,
                    MultiHeadAttentionOptions& options) {
  if (const auto dropout = find_number(path, metadata, "mha.dropout"))
    options.dropout(*dropout);
  if (const auto scale = find_number(path, metadata, "mha.scale")) options.scale(*scale);
  if (const auto softcap = find_number(path, metadata, "mha.softcap"))
    options.softcap(*softcap);
  if (const auto add = find_bool(path, metadata, "mha.add_zero_attn"))
    options.add_zero_attn(*add);
  if (const auto first = find_bool(path, metadata, "mha.batch_first"))
    options.batch_first(*first);
  if (const auto weights = find_weights(path, metadata, "mha.weights"))
    options.weights(*weights);
  if (const auto after = find_bool(path, metadata, "mha.weights_after_dropout")) {
    options.weights_after_dropout(*after);
  }
  if (const auto found = rotary_in(path, metadata)) options.rotary(found);
  if (const auto norm =
          find_named<QKNorm>(path, metadata, "mha.qk_norm", {QKNorm::rms, QKNorm::layer})) {
    options.qk_norm(*norm);
  }
  if (const auto eps = find_number(path, metadata, "mha.qk_norm_eps"))
    options.qk_norm_eps(*eps);
  if (const auto scope = find_named<QKNormScope>(path, metadata, "mha.qk_norm_scope",
                                                 {QKNormScope::head, QKNormScope::all_heads})) {
    options.qk_norm_scope(*scope);
  }
  if (const auto gain = find_named<QKNormGain>(
          path, metadata, "mha.qk_norm_gain",
          {QKNormGain::elementwise, QKNormGain::per_head, QKNormGain::none})) {
    options.qk_norm_gain(*gain);
  }
  if (const auto order =
          find_named<QKNormOrder>(path, metadata, "mha.qk_norm_order",
                                  {QKNormOrder::before_rotary, QKNormOrder::after_rotary})) {
    options.qk_norm_order(*order);
  }
  const std::string of_tuning = tuning;
  if (const auto scale = find_number(path, metadata, of_tuning + "scale")) {
    TemperatureTuning found(*scale,
                            find_count(path, metadata, of_tuning + "floor_scale").value_or(0));
    found.offset(find_count(path, metadata, of_tuning + "offset").value_or(0));
    options.temperature_tuning(found);
  }
  if (const auto scale = find_number(path, metadata, "mha.value_scale"))
    options.value_scale(*scale);
  if (const auto gate = find_named<OutputGate>(
          path, metadata, "mha.output_gate", {OutputGate::per_head, OutputGate::elementwise})) {
    options.output_gate(*gate);
  }
}

}  // namespace mha::detail
