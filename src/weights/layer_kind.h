#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "weights/config_value.h"

namespace mha::detail {

/// What tells one layer of a model from another.
struct LayerKind {
  std::string name;              // full_attention, sliding_attention, chunked_attention
  std::optional<int64_t> left;   // keys before its own that a query of a sliding layer sees
  std::optional<int64_t> right;  // and behind, if it sees any
  std::optional<int64_t> chunk;  // of chunked attention: its size
  bool is_rotated = true;
};

/// Throws `c10::Error` with the kind's name if it is none that this module computes.
LayerKind layer_kind(const ConfigValues& values, int64_t layer);

}  // namespace mha::detail
