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
#include "runtime/enum_check.h"
#include "runtime/finite.h"

namespace mha {
namespace {

using detail::MapPart;
using detail::MapState;
using detail::MapView;

// The leading dimensions of the call in place of N.
at::Tensor restore_leading(const MapState& state, const at::Tensor& tensor) {
  std::vector<int64_t> sizes = state.leading;
  for (int64_t d = 1; d < tensor.dim(); ++d) sizes.push_back(tensor.size(d));
  return tensor.reshape(sizes);
}

void check_head(const MapState& state, int64_t h) {
  const int64_t heads = state.query.size(1);
  TORCH_CHECK(h >= 0 && h < heads, "AttentionMap: head: expected an index from 0 to ",
              heads - 1, ", found ", h);
}

void check_range(const char* name, int64_t from, int64_t to, int64_t size) {
  TORCH_CHECK(from >= 0 && from <= to && to <= size, "AttentionMap: ", name,
              ": expected a range within [0, ", size, "), found [", from, ", ", to, ")");
}

void check_count(const char* name, int64_t count, int64_t size) {
  TORCH_CHECK(count >= 1 && count <= size, "AttentionMap: ", name,
              ": expected a number from 1 to ", size, ", found ", count);
}

// A method with one result that is a tensor a row.
template <typename Part, typename Fused>
at::Tensor row_by_row(const MapView& view, const Part& part, const Fused& fused) {
  const detail::MapMethod method{
      [part](const MapPart& p) { return std::vector<at::Tensor>{part(p)}; },
      [fused](const MapView& v) { return std::vector<at::Tensor>{fused(v)}; },
      {false}};
  return apply(method, view)[0];
}

at::Tensor weights_of(const MapView& view) {
  return row_by_row(
      view, [](const MapPart& part) { return detail::plain_weights(part.view); },
      detail::fused_weights);
}

at::Tensor mean_of(const MapView& view) {
  const auto heads = static_cast<double>(view.query.size(1));
  const detail::MapMethod method{
      [heads](const MapPart& part) {
        return std::vector<at::Tensor>{
            detail::plain_weights(part.view).sum(1, /*keepdim=*/true) / heads};
      },
      [](const MapView& v) {
        return std::vector<at::Tensor>{detail::fused_mean(v).unsqueeze(1)};
      },
      {false},
      /*sums_heads=*/true};
  return apply(method, view)[0].squeeze(1);
}

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

TopKeys top_of(const MapView& view, int64_t count) {
  const detail::MapMethod search{[count](const MapPart& part) {
                                   const auto top = detail::plain_top(part.view, count);
                                   return std::vector<at::Tensor>{top.values, top.keys};
                                 },
                                 [count](const MapView& v) {
                                   const auto top = detail::fused_top(v, count);
                                   return std::vector<at::Tensor>{top.values, top.keys};
                                 },
                                 {false, false}};
  TopKeys top;
  {
    const at::NoGradGuard no_grad;
    const auto found = apply(search, view);
    top = {found[0], found[1]};
  }
  if (!map_wants_gradient(view)) return top;
  // Gradients flow into the keys that were found, whatever another rounding would find.
  const detail::MapMethod gather{
      [all_keys = top.keys](const MapPart& part) {
        const auto& v = part.view;
        const auto keys =
            all_keys.narrow(1, part.head, v.query.size(1)).narrow(2, part.row, v.query.size(2));
        const auto values = detail::plain_weights(v).gather(3, keys.clamp_min(0));
        // A row of NaN has no keys, and stays NaN.
        return std::vector<at::Tensor>{values.masked_fill(
            keys.eq(-1).logical_and(values.detach().isnan().logical_not()), 0)};
      },
      [values = top.values](const MapView&) { return std::vector<at::Tensor>{values}; },
      {false}};
  return {apply(gather, view)[0], top.keys};
}

at::Tensor pool_of(const MapView& view, int64_t rows, int64_t columns) {
  const int64_t queries = view.query.size(2);
  const detail::MapMethod method{
      [=](const MapPart& part) {
        return std::vector<at::Tensor>{
            detail::plain_pool(part.view, part.row, queries, rows, columns)};
      },
      [=](const MapView& v) {
        return std::vector<at::Tensor>{detail::fused_pool(v, rows, columns)};
      },
      {true}};
  return apply(method, view)[0];
}

// How many of `size` indices each of `cells` cells holds.
at::Tensor cell_sizes(int64_t cells, int64_t size, const at::Tensor& like) {
  const auto ends =
      (at::arange(cells + 1, like.options().dtype(at::kLong)) * size).div(cells, "floor");
  return (ends.narrow(0, 1, cells) - ends.narrow(0, 0, cells)).to(like.scalar_type());
}

}  // namespace

AttentionMap::AttentionMap(std::shared_ptr<const MapState> state) : state_(std::move(state)) {}

const MapState& AttentionMap::state() const {
  TORCH_CHECK(state_, "AttentionMap: expected a map, found one that was moved from");
  return *state_;
}

at::Tensor AttentionMap::dense() const {
  return restore_leading(state(), weights_of(state().view()));
}

at::Tensor AttentionMap::head(int64_t h) const {
  check_head(state(), h);
  return restore_leading(state(), weights_of(select_head(state().view(), h)).squeeze(1));
}

at::Tensor AttentionMap::rows(int64_t from, int64_t to) const {
  check_range("rows", from, to, num_queries());
  return restore_leading(state(), weights_of(select_rows(state().view(), from, to)));
}

at::Tensor AttentionMap::block(int64_t h, IndexRange rows, IndexRange keys) const {
  check_head(state(), h);
  check_range("rows", rows.begin, rows.end, num_queries());
  check_range("keys", keys.begin, keys.end, num_keys());
  const auto view = select_rows(select_head(state().view(), h), rows.begin, rows.end);
  const auto weights = row_by_row(
      view,
      [keys](const MapPart& part) {
        return detail::plain_weights(part.view).narrow(3, keys.begin, keys.end - keys.begin);
      },
      [keys](const MapView& v) {
        return detail::fused_weights(select_keys(v, keys.begin, keys.end));
      });
  return restore_leading(state(), weights.squeeze(1));
}

at::Tensor AttentionMap::mean() const {
  return mean(0, num_queries());
}

at::Tensor AttentionMap::mean(int64_t from, int64_t to) const {
  check_range("mean", from, to, num_queries());
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
  check_count("top_k", k, num_keys());
  const auto top = top_of(state().view(), k);
  return {restore_leading(state(), top.values), restore_leading(state(), top.keys)};
}

at::Tensor AttentionMap::pooled(int64_t rows, int64_t columns) const {
  check_count("pooled: rows", rows, num_queries());
  check_count("pooled: columns", columns, num_keys());
  const auto sums = pool_of(state().view(), rows, columns);
  return restore_leading(state(), sums / cell_sizes(rows, num_queries(), sums).unsqueeze(1));
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
  check_range("scores", from, to, num_queries());
  auto view = select_rows(state().view(), from, to);
  if (stage != ScoreStage::masked) view.mask = {};
  if (stage == ScoreStage::scaled) view.scoring.softcap = 0;
  return restore_leading(state(),
                         detail::plain_scores(view.query, view.key, view.mask, view.scoring));
}

AttentionMap AttentionMap::detach() const {
  return AttentionMap(state().detach());
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
