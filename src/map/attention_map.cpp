#include <mha/attention_map.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/matmul.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <utility>

#include "attention/plain_attention.h"
#include "map/fused_map.h"
#include "map/map_method.h"
#include "map/map_state.h"
#include "map/plain_map.h"
#include "map/view_methods.h"
#include "runtime/enum_check.h"
#include "runtime/finite.h"

namespace mha {
namespace {

constexpr const char* map_subject = "AttentionMap";

using detail::check_count;
using detail::check_head;
using detail::check_range;
using detail::MapPart;
using detail::MapState;
using detail::MapView;

// (N, H, L) each -> (N, H): distance / placed summed over the queries; 0 where nothing is seen.
at::Tensor mean_distance(const at::Tensor& distance, const at::Tensor& placed) {
  // In float64, so that the order of ATen's sum leaves no trace in float32.
  const auto wide = detail::widest_dtype(placed.device());
  const auto total = placed.to(wide).sum(-1);
  const auto mean = distance.to(wide).sum(-1) / total.masked_fill(total.eq(0), 1);
  return mean.to(distance.scalar_type());
}

MapSummary summary_of(const MapView& view) {
  const detail::MapMethod method{
      [first = first_positions(view)](const MapPart& part) {
        const auto s = detail::plain_summary(part.view, first + part.row);
        return std::vector<at::Tensor>{s.entropy, s.distance, s.placed, s.received};
      },
      [](const MapView& v) {
        const auto s = detail::fused_summary(v);
        return std::vector<at::Tensor>{s.entropy, s.distance, s.placed, s.received};
      },
      {false, false, false, true}};
  const auto results = apply(method, view);
  return {results[0], results[3], mean_distance(results[1], results[2])};
}

}  // namespace

AttentionMap::AttentionMap(std::shared_ptr<const MapState> state) : state_(std::move(state)) {}

const MapState& AttentionMap::state() const {
  TORCH_CHECK(state_, "AttentionMap: expected a map, found one that was moved from");
  return *state_;
}

at::Tensor AttentionMap::dense() const {
  return restore_leading(state(), numbers_of(state().view()));
}

at::Tensor AttentionMap::head(int64_t h) const {
  check_head(map_subject, h, num_heads());
  return restore_leading(state(), numbers_of(select_head(state().view(), h)).squeeze(1));
}

at::Tensor AttentionMap::rows(int64_t from, int64_t to) const {
  check_range(map_subject, "rows", from, to, num_queries());
  return restore_leading(state(), numbers_of(select_rows(state().view(), from, to)));
}

at::Tensor AttentionMap::block(int64_t h, IndexRange rows, IndexRange keys) const {
  check_head(map_subject, h, num_heads());
  check_range(map_subject, "rows", rows.begin, rows.end, num_queries());
  check_range(map_subject, "keys", keys.begin, keys.end, num_keys());
  const auto view = select_rows(select_head(state().view(), h), rows.begin, rows.end);
  const auto weights = detail::numbers_over(view, keys);
  return restore_leading(state(), weights.squeeze(1));
}

at::Tensor AttentionMap::mean() const {
  return mean(0, num_queries());
}

at::Tensor AttentionMap::mean(int64_t from, int64_t to) const {
  check_range(map_subject, "mean", from, to, num_queries());
  return restore_leading(state(), mean_of(select_rows(state().view(), from, to)));
}

at::Tensor AttentionMap::entropy() const {
  return summary().entropy;
}

at::Tensor AttentionMap::received() const {
  return summary().received;
}

at::Tensor AttentionMap::distance() const {
  return summary().distance;
}

MapSummary AttentionMap::summary() const {
  const auto found = summary_of(state().view());
  return {restore_leading(state(), found.entropy), restore_leading(state(), found.received),
          restore_leading(state(), found.distance)};
}

TopKeys AttentionMap::top_k(int64_t k) const {
  check_count(map_subject, "top_k", k, num_keys());
  const auto top = top_of(state().view(), k);
  return {restore_leading(state(), top.values), restore_leading(state(), top.keys)};
}

at::Tensor AttentionMap::pooled(int64_t rows, int64_t columns) const {
  check_count(map_subject, "pooled: rows", rows, num_queries());
  check_count(map_subject, "pooled: columns", columns, num_keys());
  return restore_leading(state(), pooled_of(state().view(), rows, columns));
}

at::Tensor AttentionMap::log_sum_exp() const {
  const auto sums = row_by_row(
      state().view(), [](const MapPart& part) { return detail::plain_log_sum_exp(part.view); },
      detail::fused_log_sum_exp);
  return restore_leading(state(), sums);
}

at::Tensor AttentionMap::scores(ScoreStage stage) const {
  return scores(stage, 0, num_queries());
}

at::Tensor AttentionMap::scores(ScoreStage stage, int64_t from, int64_t to) const {
  detail::check_enum({"AttentionMap", "scores: stage"}, stage, ScoreStage::masked,
                     "scaled, softcapped or masked");
  check_range(map_subject, "scores", from, to, num_queries());
  auto view = select_rows(state().view(), from, to);
  if (stage != ScoreStage::masked) view.mask = {};
  if (stage == ScoreStage::scaled) view.scoring.softcap = 0;
  return restore_leading(state(),
                         detail::plain_scores(view.query, view.key, view.mask, view.scoring));
}

AttentionMap AttentionMap::detach() const {
  return AttentionMap(state().detach());
}

AttentionMap AttentionMap::to(at::Device device) const {
  return AttentionMap(state().to(device));
}

int64_t AttentionMap::num_heads() const {
  return state().query.size(1);
}

int64_t AttentionMap::num_queries() const {
  return state().query.size(2);
}

int64_t AttentionMap::num_keys() const {
  return state().key.size(2);
}

at::Tensor AttentionMap::query() const {
  return restore_leading(state(), state().query);
}

at::Tensor AttentionMap::key() const {
  return restore_leading(state(), state().key);
}

double AttentionMap::scale() const {
  return state().scoring.scale;
}

double AttentionMap::softcap() const {
  return state().scoring.softcap;
}

at::Tensor AttentionMap::sinks() const {
  return state().scoring.sinks;
}

int64_t AttentionMap::nbytes() const {
  const auto &query = state().query, &key = state().key;
  const int64_t rows = query.size(0) * query.size(1) * query.size(2);
  return static_cast<int64_t>(query.nbytes() + key.nbytes()) +
         rows * 2 * int64_t{sizeof(float)};
}

at::Tensor attention_rollout(const std::vector<AttentionMap>& layers) {
  TORCH_CHECK(!layers.empty(),
              "attention_rollout: layers: expected at least one map, found none");
  const int64_t tokens = layers[0].num_queries();
  at::Tensor rollout;
  for (size_t i = 0; i < layers.size(); ++i) {
    TORCH_CHECK(layers[i].num_queries() == tokens && layers[i].num_keys() == tokens,
                "attention_rollout: layers[", i, "]: expected ", tokens,
                " queries and keys, found ", layers[i].num_queries(), " and ",
                layers[i].num_keys());
    auto mean = layers[i].mean();
    TORCH_CHECK(!rollout.defined() || mean.sizes() == rollout.sizes(),
                "attention_rollout: layers[", i, "]: expected maps of shape ", rollout.sizes(),
                ", found ", mean.sizes());
    const auto mixed = mean * 0.5 + at::eye(tokens, mean.options()) * 0.5;
    rollout = rollout.defined() ? at::matmul(mixed, rollout) : mixed;
  }
  return rollout;
}

}  // namespace mha
