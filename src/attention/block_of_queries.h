#pragma once

#include <cstdint>
#include <vector>

#include "attention/plain_attention.h"

// The blocks that the composition of ATen calls is computed in.
namespace mha::detail {

/// Queries [from, from + rows) and the keys [first_key, first_key + keys), extra ones included,
/// outside of which the mask's band lets none of them attend.
struct BlockOfQueries {
  int64_t from, rows, first_key, keys;

  at::Tensor rows_of(const at::Tensor& tensor) const { return tensor.narrow(2, from, rows); }
  at::Tensor keys_of(const at::Tensor& tensor) const {
    return tensor.narrow(2, first_key, keys);
  }
  /// Of weights (N, H, L, S) or (N, L, S).
  at::Tensor pairs_of(const at::Tensor& weights) const {
    return weights.narrow(-2, from, rows).narrow(-1, first_key, keys);
  }
  ResolvedMask part_of(const ResolvedMask& mask) const;
};

enum class KeysOfBlocks { all, in_band };

/// In ascending order.
std::vector<BlockOfQueries> blocks_of_queries(const ResolvedMask& mask, int64_t rows,
                                              KeysOfBlocks keys);

/// What `plain_part` is told of a block. `finite`: as `is_all_finite` says.
PlainPart part_of_call(const BlockOfQueries& block, const ResolvedMask& mask,
                       const AttentionCall& call, at::Device device, bool finite);

/// Whether a tensor is undefined or known to hold finite numbers.
bool is_known_finite(const at::Tensor& tensor);

/// Whether query, also times the scale, key and value are known to be finite.
bool is_all_finite(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   double scale);

}  // namespace mha::detail
