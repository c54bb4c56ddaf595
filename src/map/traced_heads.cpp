#include <mha/attention_map.h>
#include <mha/scaled_dot_product_attention.h>

#include <memory>
#include <utility>

#include "attention/attention.h"
#include "attention/split_heads.h"
#include "map/map_state.h"

// Maps of heads that are split already.
namespace mha {

TracedAttention trace_scaled_dot_product_attention(const at::Tensor& query,
                                                   const at::Tensor& key,
                                                   const at::Tensor& value, const Mask& mask,
                                                   const AttentionOptions& options) {
  const auto call = detail::split_heads(query, key, value, mask, options);
  const auto without_weights = AttentionOptions(call.options).weights(Weights::none);
  detail::RowStatistics statistics;
  const auto result =
      detail::attention(call.query, call.key, call.value, call.mask, without_weights,
                        /*output_is_passing=*/false, &statistics);
  auto state = std::make_shared<detail::MapState>(
      call.query, call.key, call.mask, detail::scoring_of(call.options, call.query.size(-1)),
      call.leading, std::move(statistics));
  return {detail::with_leading(result.output, call.leading), AttentionMap(std::move(state))};
}

AttentionMap::AttentionMap(const at::Tensor& query, const at::Tensor& key, const Mask& mask,
                           std::optional<double> scale)
    : AttentionMap(query, key, mask, AttentionOptions().scale(scale)) {}

AttentionMap::AttentionMap(const at::Tensor& query, const at::Tensor& key, const Mask& mask,
                           const AttentionOptions& options) {
  const auto call = detail::split_heads(query, key, key, mask, options);
  state_ = std::make_shared<detail::MapState>(
      call.query, call.key, call.mask, detail::scoring_of(call.options, call.query.size(-1)),
      call.leading);
}

}  // namespace mha
