#pragma once

#include <cstdint>

#include "support/torch_headers.h"

// What the methods of an attention map say of dense weights (..., H, L, S), written again.
namespace mha::test {

inline at::Tensor entropy_of(const at::Tensor& weights) {
  return -(weights * at::log(weights.masked_fill(weights == 0, 1))).sum(-1);
}

/// `given` keys, the first ones, have a position.
inline at::Tensor distance_of(const at::Tensor& weights, int64_t given) {
  const int64_t l = weights.size(-2);
  const auto seen = weights.narrow(-1, 0, given);
  const auto index = at::TensorOptions(at::kDouble);
  const auto apart =
      (at::arange(l, index).unsqueeze(1) + (given - l) - at::arange(given, index)).abs();
  const auto total = seen.sum({-2, -1});
  return (seen * apart).sum({-2, -1}) / total.masked_fill(total == 0, 1);
}

/// (cells, size): 1 where a cell holds an index.
inline at::Tensor cells_of(int64_t size, int64_t cells) {
  auto holds = at::zeros({cells, size}, at::kDouble);
  for (int64_t c = 0; c < cells; ++c) {
    const int64_t first = c * size / cells, last = (c + 1) * size / cells;
    holds[c].narrow(0, first, last - first).fill_(1);
  }
  return holds;
}

/// The mean over the rows of each cell of the sums over its columns.
inline at::Tensor pooled_of(const at::Tensor& weights, int64_t rows, int64_t columns) {
  const auto of_rows = cells_of(weights.size(-2), rows);
  const auto mean = of_rows / of_rows.sum(-1, /*keepdim=*/true);
  return mean.matmul(weights).matmul(cells_of(weights.size(-1), columns).t());
}

}  // namespace mha::test
