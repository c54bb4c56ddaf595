#pragma once

#include <functional>
#include <vector>

#include "map/map_state.h"

namespace mha::detail {

/// Some rows of some heads of a view; `head` and `row` are the first ones.
struct MapPart {
  MapView view;
  int64_t head, row;
};

/// What a map is asked for: results that are known part by part.
struct MapMethod {
  /// By ATen calls, with gradients. Each result is (N, heads, rows, ...), or (N, heads, ...) if
  /// summed over the rows.
  std::function<std::vector<at::Tensor>(const MapPart&)> part;
  /// By the kernels, whole, of a fused view.
  std::function<std::vector<at::Tensor>(const MapView&)> fused;
  /// Of each result: whether parts of the rows are summed and not put together.
  std::vector<bool> sums_rows;
  /// Whether parts of the heads are summed: results have one.
  bool sums_heads = false;
};

/// Whether gradients flow through the view: one of its tensors asks, and the gradient mode is
/// on.
bool map_wants_gradient(const MapView& view);

/// The method's results. On the plain path, and in the backward on every path, no more than
/// some 2^21 weights are formed at a time; a backward with a graph of its own holds them all.
std::vector<at::Tensor> apply(const MapMethod& method, const MapView& view);

}  // namespace mha::detail
