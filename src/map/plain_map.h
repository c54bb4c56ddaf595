#pragma once

#include <mha/attention_map.h>

#include "map/map_state.h"

namespace mha::detail {

// What can be said of some rows by a composition of ATen calls, with gradients: any device,
// float32 and float64. Each holds the part's numbers, and copies of them. Summaries are those
// of the weights.

/// The weights, or what is attributed to the pairs, (N, H, rows, S).
at::Tensor plain_numbers(const MapView& view);
at::Tensor plain_log_sum_exp(const MapView& view);  ///< (N, H, rows)

/// `positions`, (N) or (1) int64, are those of the first row among the given keys.
SummaryParts plain_summary(const MapView& view, const at::Tensor& positions);

SumParts plain_sums(const MapView& view);

TopKeys plain_top(const MapView& view, int64_t count);

/// What the rows give to the (N, H, rows, columns) cells of a map of `queries` rows, of which
/// `row` is the first here.
at::Tensor plain_pool(const MapView& view, int64_t row, int64_t queries, int64_t rows,
                      int64_t columns);

}  // namespace mha::detail
