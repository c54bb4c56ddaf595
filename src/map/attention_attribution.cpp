#include <mha/attention_attribution.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/matmul.h>
#include <c10/util/Exception.h>

#include <ostream>
#include <utility>

#include "map/attribution_state.h"
#include "map/view_methods.h"
#include "runtime/enum_check.h"
#include "runtime/finite.h"
#include "runtime/given_tensor.h"

namespace mha {
namespace {

constexpr const char* attribution_subject = "AttentionAttribution";

// A given tensor (..., heads, rows, columns) of a call, as (N, heads, rows, columns). The last
// size of the values is theirs to choose.
at::Tensor tensor_of_call(const char* name, const char* shape, const at::Tensor& given,
                          const detail::MapState& map, at::IntArrayRef last_sizes,
                          const at::Tensor& like, const char* like_name) {
  const auto tensor = detail::given_tensor({attribution_subject, name}, given,
                                           detail::Numbers::floating, detail::Memory::or_meta);
  TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), attribution_subject, ": ", name,
              ": expected the dtype of the map's ", like_name, ", ", like.scalar_type(),
              ", found ", tensor.scalar_type());
  TORCH_CHECK(tensor.device() == like.device(), attribution_subject, ": ", name,
              ": expected the device of the map's ", like_name, ", ", like.device(), ", found ",
              tensor.device());
  auto sizes = map.leading;
  sizes.insert(sizes.end(), last_sizes.begin(), last_sizes.end());
  TORCH_CHECK(tensor.sizes() == sizes, attribution_subject, ": ", name, ": expected shape ",
              shape, " = ", at::IntArrayRef(sizes), ", found ", tensor.sizes());
  return tensor.dim() == 4 ? tensor
                           : tensor.reshape({map.query.size(0), tensor.size(-3),
                                             tensor.size(-2), tensor.size(-1)});
}

std::shared_ptr<const detail::AttributionState> state_of(const detail::MapState& map,
                                                         const at::Tensor& given_value,
                                                         const at::Tensor& given_grad) {
  const int64_t value_dim =
      given_value.defined() && given_value.dim() > 0 ? given_value.size(-1) : 0;
  const auto value =
      tensor_of_call("value", "(..., Hk, S, Dv)", given_value, map,
                     {map.key.size(1), map.key.size(2), value_dim}, map.key, "keys");
  const auto grad =
      tensor_of_call("grad_output", "(..., H, L, Dv)", given_grad, map,
                     {map.query.size(1), map.query.size(2), value_dim}, map.query, "queries");
  return std::make_shared<detail::AttributionState>(map, value, grad);
}

}  // namespace

std::ostream& operator<<(std::ostream& stream, Attribution shown) {
  switch (shown) {
    case Attribution::gradient:
      return stream << "gradient";
    case Attribution::relevance:
      return stream << "relevance";
    case Attribution::positive_relevance:
      return stream << "positive_relevance";
  }
  return stream << "?";
}

AttentionAttribution::AttentionAttribution(const AttentionMap& map, const at::Tensor& value,
                                           const at::Tensor& grad_output)
    : state_(state_of(map.state(), value, grad_output)) {}

AttentionAttribution::AttentionAttribution(
    std::shared_ptr<const detail::AttributionState> state)
    : state_(std::move(state)) {}

const detail::AttributionState& AttentionAttribution::state() const {
  TORCH_CHECK(state_,
              "AttentionAttribution: expected an attribution, found one that was moved from");
  return *state_;
}

namespace {

detail::MapView view_of(const detail::AttributionState& state, Attribution shown) {
  detail::check_enum({attribution_subject, "shown"}, shown, Attribution::positive_relevance,
                     "gradient, relevance or positive_relevance");
  return state.view(shown);
}

at::Tensor restore(const detail::AttributionState& state, const at::Tensor& tensor) {
  return restore_leading(*state.map, tensor);
}

}  // namespace

at::Tensor AttentionAttribution::dense(Attribution shown) const {
  return restore(state(), numbers_of(view_of(state(), shown)));
}

at::Tensor AttentionAttribution::head(Attribution shown, int64_t h) const {
  const auto view = view_of(state(), shown);
  detail::check_head(attribution_subject, h, view.query.size(1));
  return restore(state(), numbers_of(select_head(view, h)).squeeze(1));
}

at::Tensor AttentionAttribution::rows(Attribution shown, int64_t from, int64_t to) const {
  const auto view = view_of(state(), shown);
  detail::check_range(attribution_subject, "rows", from, to, view.query.size(2));
  return restore(state(), numbers_of(select_rows(view, from, to)));
}

at::Tensor AttentionAttribution::block(Attribution shown, int64_t h, IndexRange rows,
                                       IndexRange keys) const {
  const auto view = view_of(state(), shown);
  detail::check_head(attribution_subject, h, view.query.size(1));
  detail::check_range(attribution_subject, "rows", rows.begin, rows.end, view.query.size(2));
  detail::check_range(attribution_subject, "keys", keys.begin, keys.end, view.key.size(2));
  const auto part = select_rows(select_head(view, h), rows.begin, rows.end);
  return restore(state(), numbers_over(part, keys).squeeze(1));
}

at::Tensor AttentionAttribution::mean(Attribution shown) const {
  return mean(shown, 0, state().map->query.size(2));
}

at::Tensor AttentionAttribution::mean(Attribution shown, int64_t from, int64_t to) const {
  const auto view = view_of(state(), shown);
  detail::check_range(attribution_subject, "mean", from, to, view.query.size(2));
  return restore(state(), mean_of(select_rows(view, from, to)));
}

at::Tensor AttentionAttribution::pooled(Attribution shown, int64_t rows,
                                        int64_t columns) const {
  const auto view = view_of(state(), shown);
  detail::check_count(attribution_subject, "pooled: rows", rows, view.query.size(2));
  detail::check_count(attribution_subject, "pooled: columns", columns, view.key.size(2));
  return restore(state(), pooled_of(view, rows, columns));
}

TopKeys AttentionAttribution::top_k(Attribution shown, int64_t k) const {
  const auto view = view_of(state(), shown);
  detail::check_count(attribution_subject, "top_k", k, view.key.size(2));
  const auto top = top_of(view, k);
  return {restore(state(), top.values), restore(state(), top.keys)};
}

AttributionSums AttentionAttribution::sums(Attribution shown) const {
  const auto sums = sums_of(view_of(state(), shown));
  // In float64, so that the order of ATen's sum leaves no trace in float32.
  const auto wide = detail::widest_dtype(sums.by_query.device());
  const auto by_head = sums.by_query.to(wide).sum(-1).to(sums.by_query.scalar_type());
  return {restore(state(), by_head), restore(state(), sums.by_query),
          restore(state(), sums.by_key)};
}

AttentionMap AttentionAttribution::map() const {
  return AttentionMap(state().map);
}

AttentionAttribution AttentionAttribution::to(at::Device device) const {
  return AttentionAttribution(state().to(device));
}

at::Tensor AttentionAttribution::value() const {
  return restore(state(), state().value);
}

at::Tensor AttentionAttribution::grad_output() const {
  return restore(state(), state().grad_output);
}

int64_t AttentionAttribution::nbytes() const {
  return map().nbytes() +
         static_cast<int64_t>(state().value.nbytes() + state().grad_output.nbytes());
}

at::Tensor attention_relevance(const std::vector<AttentionAttribution>& layers) {
  TORCH_CHECK(!layers.empty(),
              "attention_relevance: layers: expected at least one attribution, found none");
  const int64_t tokens = layers[0].map().num_queries();
  at::Tensor relevance;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto map = layers[i].map();
    TORCH_CHECK(map.num_queries() == tokens && map.num_keys() == tokens,
                "attention_relevance: layers[", i, "]: expected ", tokens,
                " queries and keys, found ", map.num_queries(), " and ", map.num_keys());
    const auto mean = layers[i].mean(Attribution::positive_relevance);
    TORCH_CHECK(!relevance.defined() || mean.sizes() == relevance.sizes(),
                "attention_relevance: layers[", i, "]: expected attributions of shape ",
                relevance.sizes(), ", found ", mean.sizes());
    if (!relevance.defined()) relevance = at::eye(tokens, mean.options()).expand_as(mean);
    relevance = relevance + at::matmul(mean, relevance);
  }
  return relevance;
}

}  // namespace mha
