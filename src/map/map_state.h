#pragma once

#include <ATen/core/Tensor.h>
#include <mha/attention_attribution.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "attention/attention.h"
#include "mask/resolved_mask.h"

namespace mha::detail {

/// A map, or a part of one: what its numbers are rebuilt from, which are weights or what is
/// attributed to the pairs.
struct MapView {
  at::Tensor query, key;  // (N, H, L, D) and (N, Hk, S, D), float32 or float64
  ResolvedMask mask;
  Scoring scoring;           // sinks, if any, as (1, H, 1, 1) of query's dtype
  RowStatistics statistics;  // undefined: the plain path
  std::optional<Attribution> attribution = {};  // none: the weights
  at::Tensor value = {}, grad_output = {};  // of an attribution, (N, Hk, S, Dv), (N, H, L, Dv)

  bool is_fused() const { return statistics.maximum.defined(); }
};

/// What one walk over the weights of a view says: per row, (N, H, rows) each, the entropy and
/// over the given keys the sums of weight * distance and of weight; and per key, (N, H, S), the
/// sum over the rows.
struct SummaryParts {
  at::Tensor entropy, distance, placed, received;
};

/// Sums of the numbers of a view: (N, H, rows) over the keys and (N, H, S) over the rows.
struct SumParts {
  at::Tensor by_query, by_key;
};

/// The parts of a view. A part of the keys keeps the statistics of whole rows, so only a fused
/// view has one.
MapView select_head(const MapView& view, int64_t head);
MapView select_rows(const MapView& view, int64_t from, int64_t to);
MapView select_keys(const MapView& view, int64_t from, int64_t to);

/// The position among the keys of each sample's first query, (N) or (1) int64.
at::Tensor first_positions(const MapView& view);

/// How often a tensor was modified in place; inference tensors do not count it.
int64_t version_of(const at::Tensor& tensor);
/// Throws unless a tensor that `subject` keeps is still at this version.
void check_version(const char* subject, const char* name, const at::Tensor& tensor,
                   int64_t version);

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
  /// The same on another device. Throws likewise.
  std::shared_ptr<const MapState> to(at::Device device) const;

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
