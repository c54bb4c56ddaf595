#include "weights/layer_kind.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "files/excerpt.h"

namespace mha::detail {
namespace {

constexpr const char* kFull = "full_attention";
constexpr const char* kSliding = "sliding_attention";
constexpr const char* kChunked = "chunked_attention";

// Entry `layer` of a list in the configuration.
const nlohmann::json& entry_of(const ConfigValues& values, const nlohmann::json& list,
                               const std::string& name, int64_t layer) {
  if (!list.is_array()) values.fail(name, "an array", list);
  TORCH_CHECK(static_cast<size_t>(layer) < list.size(), values.path(), ": ", name,
              ": expected an entry for layer ", layer, ", found ", list.size());
  return list[static_cast<size_t>(layer)];
}

// Whether layer `layer` rotates, of an architecture where only some do.
bool is_rotated(const ConfigValues& values, int64_t layer, const std::string& kind,
                bool has_window) {
  const auto rule = values.value("rotary_on");
  if (rule.is_null()) return true;
  if (rule == "sliding") return kind == kSliding;
  if (rule == "sliding_or_no_window") return kind == kSliding || !has_window;
  const auto list = values.evaluated(rule.at("list"));
  if (!list.is_null() && !list.empty()) {
    const auto& entry = entry_of(values, list, "no_rope_layers", layer);
    if (!entry.is_number_integer()) values.fail("no_rope_layers", "0 and 1", entry);
    return entry != 0;
  }
  const auto every = values.evaluated(rule.at("off_every"));
  return (layer + 1) % values.count_of(every, "no_rope_layer_interval") != 0;
}

// The kind that follows from the layer's number.
std::string kind_by_number(const ConfigValues& values, int64_t layer, bool has_window) {
  const auto other = values.text("other");
  if (const auto full = values.value("full_list"); other && !full.is_null()) {
    if (!full.is_array()) values.fail("full_attn_idxs", "an array", full);
    return std::find(full.begin(), full.end(), layer) != full.end() ? kFull : *other;
  }
  const auto rule = values.value("sliding");
  TORCH_CHECK(rule != "listed" && (!other || !rule.is_null()), values.path(),
              ": expected a list of the layers' kinds, found none");
  if (rule == "chunked_where_rotated") {
    const bool is_chunked = !values.value("chunk").is_null();
    return is_chunked && is_rotated(values, layer, kFull, has_window) ? kChunked : kFull;
  }
  if (rule.is_null() || (!has_window && !other)) return kFull;
  const std::string sliding = other.value_or(kSliding);
  if (rule == "all") return sliding;
  if (rule == "where_not_rotated") {
    return is_rotated(values, layer, kFull, has_window) ? kFull : sliding;
  }
  const std::string& name = rule.begin().key();
  const auto number = values.evaluated(rule.begin().value());
  // A number of layers may be 0, a period may not.
  const int64_t n = number == 0 ? 0 : values.count_of(number, name);
  if (name == "from") return layer >= n ? sliding : kFull;
  if (name == "even_below") return layer % 2 == 0 && layer < n ? sliding : kFull;
  if (n == 0) values.fail(name, "a number above 0", number);
  if (name == "full_first_and_every") {
    return layer == 0 || (layer + 1) % n == 0 ? kFull : sliding;
  }
  const int64_t at = name == "full_every" ? layer + 1 : layer;
  return at % n == 0 ? kFull : sliding;
}

}  // namespace

LayerKind layer_kind(const ConfigValues& values, int64_t layer) {
  auto window = values.count("window");
  const auto both_sides = values.count("window_half");
  if (const auto twice = values.count("window_half_causal")) {
    TORCH_CHECK(*twice >= 2, values.path(), ": local_attention: expected at least 2, found ",
                *twice);
    window = *twice / 2;
  }
  if (const auto before = values.count("window_before")) window = *before + 1;
  const bool has_window = window || both_sides;
  LayerKind kind;
  const auto given = values.value("kinds");
  const auto types = values.config().find("layer_types");
  const bool has_types = types != values.config().end() && !types->is_null();
  if (!given.is_null() || has_types) {
    const auto& list = given.is_null() ? *types : given;
    const auto& entry = entry_of(values, list, "layer_types", layer);
    if (!entry.is_string()) values.fail("layer_types", "strings", entry);
    kind.name = entry.get<std::string>();
  } else {
    kind.name = kind_by_number(values, layer, has_window);
  }
  if (kind.name == "global") kind.name = kFull;
  if (kind.name == "local") kind.name = kSliding;
  if (kind.name == kChunked) {
    kind.chunk = values.count("chunk");
    TORCH_CHECK(kind.chunk, values.path(), ": layer ", layer,
                ": expected attention_chunk_size beside chunked_attention, found none");
  }
  TORCH_CHECK(kind.name == kFull || kind.name == kSliding || kind.chunk, values.path(),
              ": layer ", layer, ": expected full_attention or sliding_attention, found ",
              excerpt(kind.name));
  if (kind.name == kSliding) {
    TORCH_CHECK(has_window, values.path(), ": layer ", layer,
                ": expected a sliding window's size, found none");
    kind.left = both_sides ? *both_sides / 2 : *window - 1;
    if (both_sides) kind.right = kind.left;
  }
  kind.is_rotated = is_rotated(values, layer, kind.name, has_window);
  return kind;
}

}  // namespace mha::detail
