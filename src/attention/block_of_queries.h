#pragma once

#include <cstdint>
#include <vector>

#include "attention/plain_attention.h"
#include "attention/plain_blocks.h"

// The blocks that the composition of ATen calls is computed in.
namespace mha::detail {

/// A range of a dimension.
struct Span {
  int64_t from, count;
  at::Tensor of(const at::Tensor& tensor, int64_t dim) const {
    return tensor.narrow(dim, from, count);
  }
};

/// Queries of some heads and samples, and the keys, extra ones included, outside of which the
/// mask's band lets none of them attend.
struct BlockOfQueries {
  Span samples, heads, kv_heads, queries, keys;
  int64_t index;  ///< among the blocks

  at::Tensor part_of_query(const at::Tensor& query) const {
    return queries.of(heads.of(samples.of(query, 0), 1), 2);
  }
  at::Tensor part_of_key(const at::Tensor& key) const {
    return keys.of(kv_heads.of(samples.of(key, 0), 1), 2);
  }
  at::Tensor part_of_sinks(const at::Tensor& sinks) const { return heads.of(sinks, 0); }
  /// Of weights (N, H, L, S) or (N, L, S).
  at::Tensor part_of_weights(const at::Tensor& weights) const {
    return keys.of(rows_of_weights(weights), -1);
  }
  /// The same with all keys.
  at::Tensor rows_of_weights(const at::Tensor& weights) const {
    const auto part = queries.of(samples.of(weights, 0), -2);
    return weights.dim() == 4 ? heads.of(part, 1) : part;
  }
  ResolvedMask part_of_mask(const ResolvedMask& mask) const;
};

enum class KeysOfBlocks { all, in_band };

/// In ascending order. `kv_heads` of the call.
std::vector<BlockOfQueries> blocks_of_queries(const ResolvedMask& mask, int64_t kv_heads,
                                              const BlockSizes& sizes, KeysOfBlocks keys);

/// What `plain_part` is told of a block. `finite`: as `is_all_finite` says.
PlainPart part_of_call(const BlockOfQueries& block, const ResolvedMask& mask,
                       const AttentionCall& call, at::Device device, bool finite);

/// Whether a tensor is undefined or known to hold finite numbers.
bool is_known_finite(const at::Tensor& tensor);

/// Whether query, also times the scale, key and value are known to be finite.
bool is_all_finite(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   double scale);

}  // namespace mha::detail
