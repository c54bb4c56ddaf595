#pragma once

#include <mha/attention_map.h>

#include "map/map_state.h"

namespace mha::detail {

// What can be said of a fused view by the kernels. Statistics of rows and summaries are those
// of the weights, the rest of whatever numbers the view is of. Sums over queries are formed in
// chunks that depend on L alone.

at::Tensor fused_numbers(const MapView& view);      ///< (N, H, L, S)
at::Tensor fused_mean(const MapView& view);         ///< (N, L, S)
at::Tensor fused_log_sum_exp(const MapView& view);  ///< (N, H, L)

SummaryParts fused_summary(const MapView& view);

SumParts fused_sums(const MapView& view);

TopKeys fused_top(const MapView& view, int64_t count);

/// Sums over (N, H, rows, columns) cells.
at::Tensor fused_pool(const MapView& view, int64_t rows, int64_t columns);

}  // namespace mha::detail
