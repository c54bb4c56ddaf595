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
  const auto heads = detail::split_heads(query, key, value, mask, options);
  auto call = detail::call_of(heads.options, heads.query);
  call.weights = Weights::none;
  call.statistics = detail::Statistics::if_formed;
  auto result = detail::attention(heads.query, heads.key, heads.value, heads.mask, call);
  auto state =
      std::make_shared<detail::MapState>(heads.query, heads.key, heads.mask, call.scoring,
                                         heads.leading, std::move(result.statistics));
  return {detail::with_leading(result.output, heads.leading), AttentionMap(std::move(state))};
}

AttentionMap::AttentionMap(const at::Tensor& query, const at::Tensor& key, const Mask& mask,
                           std::optional<double> scale)
    : AttentionMap(query, key, mask, AttentionOptions().scale(scale)) {}

AttentionMap::AttentionMap(const at::Tensor& query, const at::Tensor& key, const Mask& mask,
                           const AttentionOptions& options) {
  const auto heads = detail::split_heads(query, key, key, mask, options);
  state_ = std::make_shared<detail::MapState>(
      heads.query, heads.key, heads.mask,
      detail::scoring_of(heads.options, heads.query.size(-1)), heads.leading);
}

}  // namespace mha
