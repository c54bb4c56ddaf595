#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "attention/attention.h"
#include "mask/resolved_mask.h"

namespace mha::detail {

/// A map, or a part of one: what its weights are rebuilt from.
struct MapView {
  at::Tensor query, key;  // (N, H, L, D) and (N, Hk, S, D), float32 or float64
  ResolvedMask mask;
  Scoring scoring;           // sinks, if any, as (1, H, 1, 1) of query's dtype
  RowStatistics statistics;  // undefined: the plain path

  bool is_fused() const { return statistics.maximum.defined(); }
};

/// What one walk over the weights of a view says: per row, (N, H, rows) each, the entropy and
/// over the given keys the sums of weight * distance and of weight; and per key, (N, H, S), the
/// sum over the rows.
struct SummaryParts {
  at::Tensor entropy, distance, placed, received;
};

/// The parts of a view. A part of the keys keeps the statistics of whole rows, so only a fused
/// view has one.
MapView select_head(const MapView& view, int64_t head);
MapView select_rows(const MapView& view, int64_t from, int64_t to);
MapView select_keys(const MapView& view, int64_t from, int64_t to);

/// The position among the keys of each sample's first query, (N) or (1) int64.
at::Tensor first_positions(const MapView& view);

/// What an `AttentionMap` keeps.
struct MapState {
  /// query (N, H, L, D), key (N, Hk, S, D), S including the mask's extra keys. `leading` stands
  /// in the place of N in results; its product is N.
  MapState(at::Tensor query, at::Tensor key, ResolvedMask mask, Scoring scoring,
           std::vector<int64_t> leading, RowStatistics statistics = {});

  /// What a method computes from. Throws if a kept tensor was modified since.
  MapView view() const;
  /// The same without gradients. Throws likewise.
  std::shared_ptr<const MapState> detach() const;

  at::Tensor query, key;
  ResolvedMask mask;
  Scoring scoring;
  std::vector<int64_t> leading;

 private:
  void check_unmodified() const;
  const RowStatistics& statistics() const;

  // Formed when first wanted, if the call left none.
  struct LazyStatistics {
    std::once_flag once;
    RowStatistics statistics;
  };

  std::vector<int64_t> versions_;  // of the kept tensors
  std::shared_ptr<LazyStatistics> lazy_;
};

}  // namespace mha::detail
