#include "weights/options_metadata.h"

#include <c10/util/Exception.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "weights/excerpt.h"

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

}  // namespace

Metadata metadata_of(const MultiHeadAttentionOptions& options) {
  Metadata metadata = {
      {"format", "pt"},
      {"mha.num_heads", text_of(options.num_heads())},
      {"mha.dropout", text_of(options.dropout())},
      {"mha.add_zero_attn", text_of(options.add_zero_attn())},
      {"mha.batch_first", text_of(options.batch_first())},
      {"mha.weights", text_of(options.weights())},
      {"mha.weights_after_dropout", text_of(options.weights_after_dropout())},
  };
  if (options.num_kv_heads().value_or(options.num_heads()) != options.num_heads()) {
    metadata["mha.num_kv_heads"] = text_of(*options.num_kv_heads());
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
}

}  // namespace mha::detail
