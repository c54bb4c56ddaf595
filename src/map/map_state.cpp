#include "map/map_state.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <memory>
#include <utility>

#include "attention/kernel_attention.h"
#include "mask/mask_parts.h"
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

ResolvedMask without_gradient(ResolvedMask mask) {
  for (auto* list : added_lists(mask)) {
    for (auto& term : *list) term = term.detach();
  }
  return mask;
}

RowStatistics narrow_rows(const RowStatistics& statistics, int64_t dim, int64_t from,
                          int64_t count) {
  if (!statistics.maximum.defined()) return {};
  return {statistics.maximum.narrow(dim, from, count),
          statistics.factor.narrow(dim, from, count)};
}

void narrow_if_given(at::Tensor& tensor, int64_t dim, int64_t from, int64_t count) {
  if (tensor.defined()) tensor = tensor.narrow(dim, from, count);
}

}  // namespace

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

void check_version(const char* subject, const char* name, const at::Tensor& tensor,
                   int64_t version) {
  TORCH_CHECK(version_of(tensor) == version, subject, ": ", name,
              ": expected a tensor as it was when the map was made, at version ", version,
              ", found it modified in place, at version ", version_of(tensor));
}

MapView select_head(const MapView& view, int64_t head) {
  MapView part = view;
  const int64_t kv_head = head / (view.query.size(1) / view.key.size(1));
  part.query = view.query.narrow(1, head, 1);
  part.key = view.key.narrow(1, kv_head, 1);
  part.statistics = narrow_rows(view.statistics, 1, head, 1);
  part.mask = select_head(view.mask, head);
  auto& sinks = part.scoring.sinks;
  narrow_if_given(sinks, 1, head, 1);
  narrow_if_given(part.value, 1, kv_head, 1);
  narrow_if_given(part.grad_output, 1, head, 1);
  return part;
}

MapView select_rows(const MapView& view, int64_t from, int64_t to) {
  MapView part = view;
  part.query = view.query.narrow(2, from, to - from);
  part.statistics = narrow_rows(view.statistics, 2, from, to - from);
  part.mask = select_rows(view.mask, from, to);
  narrow_if_given(part.grad_output, 2, from, to - from);
  return part;
}

MapView select_keys(const MapView& view, int64_t from, int64_t to) {
  MapView part = view;
  part.key = view.key.narrow(2, from, to - from);
  part.mask = select_keys(view.mask, from, to);
  narrow_if_given(part.value, 2, from, to - from);
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
    check_version("AttentionMap", name, tensor, *version++);
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
  MapView view{query.to(dtype), key.to(dtype), mask, scoring, {}, {}, {}, {}};
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

std::shared_ptr<const MapState> MapState::to(at::Device device) const {
  check_unmodified();
  auto moved_mask = mask;
  for (auto* list : tensor_lists(moved_mask)) {
    for (auto& tensor : *list) tensor = tensor.to(device);
  }
  auto moved_scoring = scoring;
  for (auto* tensor : {&moved_mask.offsets, &moved_scoring.sinks}) {
    if (tensor->defined()) *tensor = tensor->to(device);
  }
  // Statistics are the kernels' alone, which form them where they are first wanted.
  return std::make_shared<MapState>(query.to(device), key.to(device), std::move(moved_mask),
                                    std::move(moved_scoring), leading);
}

}  // namespace mha::detail
