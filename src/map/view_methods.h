#pragma once

#include <mha/attention_map.h>

#include <cstdint>

#include "map/map_method.h"
#include "map/map_state.h"

// The methods that an `AttentionMap` and an `AttentionAttribution` share, on the numbers of a
// view, with gradients where it asks for them; and the checks of their arguments. `subject`
// begins the message.
namespace mha::detail {

/// Throws unless `h` is a head of the view's call.
void check_head(const char* subject, int64_t h, int64_t heads);
/// Throws unless [from, to) lies within [0, size).
void check_range(const char* subject, const char* name, int64_t from, int64_t to, int64_t size);
/// Throws unless `count` is a number from 1 to `size`.
void check_count(const char* subject, const char* name, int64_t count, int64_t size);

/// `tensor` (N, ...) with the leading dimensions of the call in place of N.
at::Tensor restore_leading(const MapState& state, const at::Tensor& tensor);

/// A method with one result that is a tensor a row.
template <typename Part, typename Fused>
at::Tensor row_by_row(const MapView& view, const Part& part, const Fused& fused) {
  const MapMethod method{
      [part](const MapPart& p) { return std::vector<at::Tensor>{part(p)}; },
      [fused](const MapView& v) { return std::vector<at::Tensor>{fused(v)}; },
      {false}};
  return apply(method, view)[0];
}

at::Tensor numbers_of(const MapView& view);                     ///< (N, H, L, S)
at::Tensor numbers_over(const MapView& view, IndexRange keys);  ///< (N, H, L, keys)
at::Tensor mean_of(const MapView& view);                        ///< (N, L, S)
SumParts sums_of(const MapView& view);
/// The values and keys (N, H, L, count).
TopKeys top_of(const MapView& view, int64_t count);
/// (N, H, rows, columns): the mean over a cell's queries of the sums over its keys.
at::Tensor pooled_of(const MapView& view, int64_t rows, int64_t columns);

}  // namespace mha::detail
