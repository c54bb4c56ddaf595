#include "map/map_state.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "attention/kernel_attention.h"
#include "runtime/attention_path.h"

namespace mha::detail {
namespace {

template <typename Visit>
void for_each_tensor(const MapState& state, const Visit& visit) {
  visit("query", state.query);
  visit("key", state.key);
  if (state.scoring.sinks.defined()) visit("sinks", state.scoring.sinks);
  for (const auto* list : tensor_lists(state.mask)) {
    for (const auto& tensor : *list) visit("mask", tensor);
  }
}

// Inference tensors count no versions.
int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

ResolvedMask without_gradient(ResolvedMask mask) {
  for (auto* list : added_lists(mask)) {
    for (auto& term : *list) term = term.detach();
  }
  return mask;
}

// A size of 1 may stand for all.
at::Tensor narrow_unless_shared(const at::Tensor& tensor, int64_t dim, int64_t from,
                                int64_t count) {
  return tensor.size(dim) == 1 ? tensor : tensor.narrow(dim, from, count);
}

std::vector<std::vector<at::Tensor>*> pair_masks(ResolvedMask& mask) {
  return {&mask.keep, &mask.block, &mask.add};
}

void shift_band(ResolvedMask& mask, int64_t by) {
  Band& band = mask.band;
  if (band.low != -Band::open) band.low += by;
  if (band.high != Band::open) band.high += by;
  for (auto* list : {&mask.lows, &mask.highs}) {
    for (auto& edge : *list) edge = edge + by;
  }
}

RowStatistics narrow_rows(const RowStatistics& statistics, int64_t dim, int64_t from,
                          int64_t count) {
  if (!statistics.maximum.defined()) return {};
  return {statistics.maximum.narrow(dim, from, count),
          statistics.factor.narrow(dim, from, count)};
}

}  // namespace

MapView select_head(const MapView& view, int64_t head) {
  MapView part = view;
  const int64_t kv_head = head / (view.query.size(1) / view.key.size(1));
  part.query = view.query.narrow(1, head, 1);
  part.key = view.key.narrow(1, kv_head, 1);
  part.statistics = narrow_rows(view.statistics, 1, head, 1);
  part.mask.heads = 1;
  auto& sinks = part.scoring.sinks;
  if (sinks.defined()) sinks = sinks.narrow(1, head, 1);
  for (auto* list : {&part.mask.keep, &part.mask.block, &part.mask.add, &part.mask.add_keys,
                     &part.mask.relative}) {
    for (auto& tensor : *list) tensor = narrow_unless_shared(tensor, 1, head, 1);
  }
  return part;
}

MapView select_rows(const MapView& view, int64_t from, int64_t to) {
  MapView part = view;
  const int64_t count = to - from;
  part.query = view.query.narrow(2, from, count);
  part.statistics = narrow_rows(view.statistics, 2, from, count);
  part.mask.queries = count;
  shift_band(part.mask, from);
  for (auto& ids : part.mask.query_documents) ids = ids.narrow(1, from, count);
  for (auto& table : part.mask.relative) {
    const int64_t distances = std::max<int64_t>(count + view.mask.keys - 1, 0);
    const int64_t start = table.size(3) - distances - from;
    table = table.narrow(3, std::max<int64_t>(start, 0), distances);
  }
  for (auto* list : pair_masks(part.mask)) {
    for (auto& tensor : *list) tensor = narrow_unless_shared(tensor, 2, from, count);
  }
  return part;
}

MapView select_keys(const MapView& view, int64_t from, int64_t to) {
  MapView part = view;
  const int64_t given = view.mask.keys, first = std::min(from, given);
  const int64_t count = std::min(to, given) - first;
  part.key = view.key.narrow(2, from, to - from);
  part.mask.keys = count;
  part.mask.extra_keys = to - from - count;
  shift_band(part.mask, -first);
  for (auto& ids : part.mask.key_documents) ids = ids.narrow(1, first, count);
  for (auto& table : part.mask.relative) {
    const int64_t distances = std::max<int64_t>(view.mask.queries + count - 1, 0);
    table = table.narrow(3, std::min(first, table.size(3) - distances), distances);
  }
  for (auto& lengths : part.mask.lengths) lengths = (lengths - first).clamp(0, count);
  for (auto* list : {&part.mask.keep_keys, &part.mask.block_keys, &part.mask.add_keys}) {
    for (auto& tensor : *list) tensor = tensor.narrow(3, first, count);
  }
  for (auto* list : pair_masks(part.mask)) {
    for (auto& tensor : *list) tensor = narrow_unless_shared(tensor, 3, first, count);
  }
  return part;
}

at::Tensor first_positions(const MapView& view) {
  if (view.mask.offsets.defined()) return view.mask.offsets;
  return at::full({1}, view.mask.keys - view.query.size(2),
                  view.query.options().dtype(at::kLong));
}

MapState::MapState(at::Tensor query_, at::Tensor key_, ResolvedMask mask_, Scoring scoring_,
                   std::vector<int64_t> leading_, RowStatistics statistics)
    : query(std::move(query_)),
      key(std::move(key_)),
      mask(std::move(mask_)),
      scoring(std::move(scoring_)),
      leading(std::move(leading_)),
      lazy_(std::make_shared<LazyStatistics>()) {
  lazy_->statistics = std::move(statistics);
  for_each_tensor(*this, [this](const char*, const at::Tensor& tensor) {
    versions_.push_back(version_of(tensor));
  });
}

void MapState::check_unmodified() const {
  auto version = versions_.begin();
  for_each_tensor(*this, [&](const char* name, const at::Tensor& tensor) {
    TORCH_CHECK(version_of(tensor) == *version, "AttentionMap: ", name,
                ": expected a tensor as it was when the map was made, at version ", *version,
                ", found it modified in place, at version ", version_of(tensor));
    ++version;
  });
}

const RowStatistics& MapState::statistics() const {
  std::call_once(lazy_->once, [this] {
    if (lazy_->statistics.maximum.defined()) return;
    const at::NoGradGuard no_grad;
    lazy_->statistics = row_statistics(query.to(at::kFloat), key.to(at::kFloat), mask, scoring);
  });
  return lazy_->statistics;
}

MapView MapState::view() const {
  check_unmodified();
  const auto dtype = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  MapView view{query.to(dtype), key.to(dtype), mask, scoring, {}};
  auto& sinks = view.scoring.sinks;
  if (sinks.defined()) sinks = sinks.to(dtype).view({1, sinks.size(0), 1, 1});
  // The values are not read; their head size is as good as the keys'.
  const int64_t d = query.size(3);
  auto followed = added_terms(mask);
  followed.insert(followed.end(), {query, key, scoring.sinks});
  if (choose_path(view.query.device(), dtype, d, d, is_followed(followed)).path ==
      Path::fused) {
    view.statistics = statistics();
  }
  return view;
}

std::shared_ptr<const MapState> MapState::detach() const {
  check_unmodified();
  auto without = scoring;
  if (without.sinks.defined()) without.sinks = without.sinks.detach();
  auto copy = std::make_shared<MapState>(query.detach(), key.detach(), without_gradient(mask),
                                         std::move(without), leading);
  copy->lazy_ = lazy_;
  return copy;
}

}  // namespace mha::detail
