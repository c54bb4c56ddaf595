#pragma once

#include <ATen/core/Tensor.h>
#include <mha/mask.h>

#include <array>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

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
struct ResolvedMask {
  int64_t batch = 0, heads = 0, queries = 0, keys = 0;
  /// Keys appended after the given ones, open to every query (bias_k, zero attention).
  int64_t extra_keys = 0;
  /// (N) int64, where the sample's first query stands, as `AttentionSizes::offsets`.
  at::Tensor offsets = {};
  Band band;
  std::vector<at::Tensor> lows;             // (N) int64, the lower edge of a sample's band
  std::vector<at::Tensor> highs;            // (N) int64, the upper edge
  std::vector<at::Tensor> lengths;          // (N) integers
  std::vector<at::Tensor> keep_keys;        // (N or 1, 1, 1, S), 0 blocks
  std::vector<at::Tensor> block_keys;       // (N or 1, 1, 1, S), true blocks
  std::vector<at::Tensor> keep;             // (N or 1, H or 1, L or 1, S or 1), 0 blocks
  std::vector<at::Tensor> block;            // (N or 1, H or 1, L or 1, S or 1), true blocks
  std::vector<at::Tensor> add;              // (N or 1, H or 1, L or 1, S or 1), -inf blocks
  std::vector<at::Tensor> add_keys;         // (N or 1, H or 1, 1, S), -inf blocks
  std::vector<at::Tensor> query_documents;  // (N or 1, L) ids, and
  std::vector<at::Tensor> key_documents;    // (N or 1, S) those of the same term
  std::vector<at::Tensor> relative;  // (N or 1, H or 1, 1, L + S - 1), by key - query + L - 1

  bool allows_everything() const;
};

/// All lists of tensors of a mask, always in this order.
template <typename Mask>
auto tensor_lists(Mask& mask) {
  using List = std::conditional_t<std::is_const_v<Mask>, const std::vector<at::Tensor>,
                                  std::vector<at::Tensor>>;
  return std::array<List*, 12>{&mask.lows,      &mask.highs,           &mask.lengths,
                               &mask.keep_keys, &mask.block_keys,      &mask.keep,
                               &mask.block,     &mask.query_documents, &mask.key_documents,
                               &mask.add,       &mask.add_keys,        &mask.relative};
}

/// Those that are added to the scores, into which gradients may flow, in this order.
template <typename Mask>
auto added_lists(Mask& mask) {
  using List = std::conditional_t<std::is_const_v<Mask>, const std::vector<at::Tensor>,
                                  std::vector<at::Tensor>>;
  return std::array<List*, 3>{&mask.add, &mask.add_keys, &mask.relative};
}

/// All tensors of `added_lists`, one list after the other.
std::vector<at::Tensor> added_terms(const ResolvedMask& mask);

/// Checks every term of `mask` against `sizes` and `device`. Throws `c10::Error` naming the
/// constructor, the shapes it accepts and the one found.
ResolvedMask resolve(const Mask& mask, const AttentionSizes& sizes, at::Device device);

/// A mask as the plain path uses it. Both broadcast to (N, H, L, S + extra).
struct DenseMask {
  at::Tensor allowed;  // bool; undefined: everything is allowed
  at::Tensor added;    // `dtype` of the scores, finite or NaN; undefined: nothing is added
};

/// Merges all terms. Blocks are decided on the tensors as given, before any of them is rounded
/// to `dtype` or summed, so that large finite terms never turn into blocks.
DenseMask densify(const ResolvedMask& mask, at::ScalarType dtype, at::Device device);

}  // namespace mha::detail
