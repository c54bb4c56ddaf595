#pragma once

#include <ATen/core/Tensor.h>
#include <mha/mask.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "mask/mask_lists.h"

namespace mha::detail {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// The sizes that a mask is resolved against.
struct AttentionSizes {
  at::IntArrayRef leading;  // dimensions before the heads, whose product is `batch`
  int64_t batch, heads, queries, keys;
  /// (N) int64: query i of sample n stands at key offsets[n] + i, where a mask says bottom
  /// right. Undefined: the last query stands at the last key.
  at::Tensor offsets = {};
  /// Of the query. Scores are float64 for float64, else float32.
  at::ScalarType dtype = at::kDouble;
};

/// Key j is allowed for query i where low <= j - i <= high.
struct Band {
  static constexpr int64_t open = std::numeric_limits<int64_t>::max() / 4;
  int64_t low = -open, high = open;
  bool is_open() const { return low == -open && high == open; }
};

/// A `Mask` checked against the sizes of one call and sorted by what a path can do with it.
/// Nothing is copied or materialised; all conditions hold together.
struct ResolvedMask : MaskLists {
  int64_t batch = 0, heads = 0, queries = 0, keys = 0;
  /// Keys appended after the given ones, open to every query (bias_k, zero attention).
  int64_t extra_keys = 0;
  /// (N) int64, where the sample's first query stands, as `AttentionSizes::offsets`.
  at::Tensor offsets = {};
  Band band;

  bool allows_everything() const;
};

/// How many distances key - query there are, from -(L - 1) to S - 1.
inline int64_t count_distances(int64_t queries, int64_t keys) {
  return std::max<int64_t>(queries + keys - 1, 0);
}

/// All tensors of `added_lists`, one list after the other.
std::vector<at::Tensor> added_terms(const ResolvedMask& mask);

/// Checks every term of `mask` against `sizes` and `device`. Throws `c10::Error` naming the
/// constructor, the shapes it accepts and the one found.
ResolvedMask resolve(const Mask& mask, const AttentionSizes& sizes, at::Device device);

}  // namespace mha::detail
