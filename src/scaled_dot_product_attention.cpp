#include <mha/attention_map.h>
#include <mha/scaled_dot_product_attention.h>

#include <c10/util/Exception.h>

#include <cmath>
#include <memory>
#include <ostream>
#include <utility>

#include "attention.h"
#include "attention_map_state.h"
#include "enum_check.h"
#include "given_tensor.h"
#include "resolved_mask.h"

namespace mha {
namespace {

void check_options(const AttentionOptions& options) {
  detail::check_enum({"scaled_dot_product_attention", "weights"}, options.weights(),
                     Weights::per_head, "none, averaged or per_head");
  TORCH_CHECK(options.dropout() >= 0 && options.dropout() <= 1,
              "scaled_dot_product_attention: dropout: expected a probability in [0, 1], found ",
              options.dropout());
  TORCH_CHECK(!options.scale() || std::isfinite(*options.scale()),
              "scaled_dot_product_attention: scale: expected a finite number, found ",
              options.scale().value_or(0));
  TORCH_CHECK(detail::is_softcap(options.softcap()),
              "scaled_dot_product_attention: softcap: expected ", detail::softcap_range,
              ", found ", options.softcap());
}

// The tensors of a call, with memory as their strides say.
struct GivenTensors {
  at::Tensor query, key, value;
};

// Those beside the query may be on meta, since their device is compared with the query's.
at::Tensor given(const char* name, const at::Tensor& tensor,
                 detail::Memory memory = detail::Memory::or_meta) {
  return detail::given_tensor({"scaled_dot_product_attention", name}, tensor,
                              detail::Numbers::floating, memory);
}

void check_sinks(const at::Tensor& sinks, const at::Tensor& query) {
  TORCH_CHECK(sinks.dim() == 1 && sinks.size(0) == query.size(-3),
              "scaled_dot_product_attention: sinks: expected shape (H) = [", query.size(-3),
              "], one for each head of query ", query.sizes(), ", found ", sinks.sizes());
  TORCH_CHECK(sinks.device() == query.device(),
              "scaled_dot_product_attention: sinks: expected the device of query, ",
              query.device(), ", found ", sinks.device());
}

void check_like_query(const char* name, const at::Tensor& tensor, const at::Tensor& query) {
  TORCH_CHECK(tensor.scalar_type() == query.scalar_type(),
              "scaled_dot_product_attention: ", name, ": expected the dtype of query, ",
              query.scalar_type(), ", found ", tensor.scalar_type());
  TORCH_CHECK(tensor.device() == query.device(), "scaled_dot_product_attention: ", name,
              ": expected the device of query, ", query.device(), ", found ", tensor.device());
  TORCH_CHECK(tensor.dim() == query.dim(), "scaled_dot_product_attention: ", name,
              ": expected ", query.dim(), " dimensions like query ", query.sizes(), ", found ",
              tensor.sizes());
  const auto leading = query.dim() - 3;
  TORCH_CHECK(tensor.sizes().slice(0, leading) == query.sizes().slice(0, leading),
              "scaled_dot_product_attention: ", name,
              ": expected the leading dimensions of query ", query.sizes(), ", found ",
              tensor.sizes());
}

void check_inputs(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  TORCH_CHECK(query.dim() >= 3,
              "scaled_dot_product_attention: query: expected shape (..., H, L, D), found ",
              query.sizes());
  check_like_query("key", key, query);
  check_like_query("value", value, query);
  TORCH_CHECK(
      query.size(-1) > 0 && query.size(-3) > 0,
      "scaled_dot_product_attention: query: expected H > 0 and D > 0 in (..., H, L, D), "
      "found ",
      query.sizes());
  TORCH_CHECK(key.size(-1) == query.size(-1),
              "scaled_dot_product_attention: key: expected the head size of query, ",
              query.size(-1), ", found ", key.size(-1), " in ", key.sizes());
  TORCH_CHECK(
      key.size(-3) > 0 && query.size(-3) % key.size(-3) == 0,
      "scaled_dot_product_attention: key: expected a number of heads that divides query's ",
      query.size(-3), ", found ", key.size(-3), " in ", key.sizes());
  TORCH_CHECK(value.size(-3) == key.size(-3) && value.size(-2) == key.size(-2),
              "scaled_dot_product_attention: value: expected the heads and length of key, ",
              key.size(-3), " and ", key.size(-2), ", found ", value.size(-3), " and ",
              value.size(-2), " in ", value.sizes());
}

// Views of little memory may ask for results that no memory holds.
void check_result(const char* name, const at::Tensor& query, int64_t columns) {
  constexpr double most = 0x1p44;
  const double numbers =
      static_cast<double>(query.numel() / query.size(-1)) * static_cast<double>(columns);
  TORCH_CHECK(numbers <= most, "scaled_dot_product_attention: ", name,
              ": expected a result of up to 2^44 numbers, found ", columns,
              " for each query of ", query.sizes());
}

GivenTensors given_tensors(const at::Tensor& query, const at::Tensor& key,
                           const at::Tensor& value) {
  GivenTensors found{given("query", query, detail::Memory::needed), given("key", key),
                     given("value", value)};
  check_inputs(found.query, found.key, found.value);
  check_result("value", found.query, found.value.size(-1));
  return found;
}

// The options with sinks as their memory says.
AttentionOptions with_given_sinks(const AttentionOptions& options, const at::Tensor& query) {
  if (!options.sinks().defined()) return options;
  AttentionOptions found = options;
  found.sinks(given("sinks", options.sinks()));
  check_sinks(found.sinks(), query);
  return found;
}

detail::ResolvedMask resolve_for(const Mask& mask, const at::Tensor& query,
                                 const at::Tensor& key) {
  const auto leading = query.sizes().slice(0, query.dim() - 3);
  const int64_t batch = c10::multiply_integers(leading);
  return detail::resolve(
      mask,
      {leading, batch, query.size(-3), query.size(-2), key.size(-2), {}, query.scalar_type()},
      query.device());
}

detail::Scoring scoring_of(const AttentionOptions& options, const at::Tensor& query) {
  const double default_scale = 1.0 / std::sqrt(static_cast<double>(query.size(-1)));
  return {options.scale().value_or(default_scale), options.softcap(), options.sinks()};
}

// Merges (or, if there are none, adds) the dimensions before the heads.
at::Tensor with_one_batch(const at::Tensor& tensor, int64_t batch) {
  return tensor.reshape({batch, tensor.size(-3), tensor.size(-2), tensor.size(-1)});
}

at::Tensor with_leading(const at::Tensor& tensor, at::IntArrayRef leading) {
  if (!tensor.defined()) return tensor;
  std::vector<int64_t> sizes = leading.vec();
  for (int64_t d = 1; d < tensor.dim(); ++d) sizes.push_back(tensor.size(d));
  return tensor.view(sizes);
}

}  // namespace

std::ostream& operator<<(std::ostream& stream, Weights weights) {
  switch (weights) {
    case Weights::none:
      return stream << "none";
    case Weights::averaged:
      return stream << "averaged";
    case Weights::per_head:
      return stream << "per_head";
  }
  return stream << "?";
}

AttentionOutput scaled_dot_product_attention(const at::Tensor& given_query,
                                             const at::Tensor& given_key,
                                             const at::Tensor& given_value, const Mask& mask,
                                             const AttentionOptions& given_options) {
  check_options(given_options);
  const auto [query, key, value] = given_tensors(given_query, given_key, given_value);
  const auto options = with_given_sinks(given_options, query);
  const auto resolved = resolve_for(mask, query, key);
  if (query.dim() == 4) {
    return detail::attention(query, key, value, resolved, options);
  }
  const auto result = detail::attention(
      with_one_batch(query, resolved.batch), with_one_batch(key, resolved.batch),
      with_one_batch(value, resolved.batch), resolved, options);
  const auto leading = query.sizes().slice(0, query.dim() - 3);
  return {with_leading(result.output, leading), with_leading(result.weights, leading)};
}

TracedAttention trace_scaled_dot_product_attention(const at::Tensor& given_query,
                                                   const at::Tensor& given_key,
                                                   const at::Tensor& given_value,
                                                   const Mask& mask,
                                                   const AttentionOptions& given_options) {
  check_options(given_options);
  const auto [query, key, value] = given_tensors(given_query, given_key, given_value);
  const auto options = with_given_sinks(given_options, query);
  const auto resolved = resolve_for(mask, query, key);
  const auto q = with_one_batch(query, resolved.batch);
  const auto k = with_one_batch(key, resolved.batch);
  const auto without_weights = AttentionOptions(options).weights(Weights::none);
  detail::RowStatistics statistics;
  const auto result =
      detail::attention(q, k, with_one_batch(value, resolved.batch), resolved, without_weights,
                        /*output_is_passing=*/false, &statistics);
  const auto leading = query.sizes().slice(0, query.dim() - 3);
  return {with_leading(result.output, leading), AttentionMap(std::make_shared<detail::MapState>(
                                                    q, k, resolved, scoring_of(options, query),
                                                    leading.vec(), std::move(statistics)))};
}

AttentionMap::AttentionMap(const at::Tensor& query, const at::Tensor& key, const Mask& mask,
                           std::optional<double> scale)
    : AttentionMap(query, key, mask, AttentionOptions().scale(scale)) {}

AttentionMap::AttentionMap(const at::Tensor& given_query, const at::Tensor& given_key,
                           const Mask& mask, const AttentionOptions& given_options) {
  check_options(given_options);
  const auto [query, key, value] = given_tensors(given_query, given_key, given_key);
  const auto options = with_given_sinks(given_options, query);
  const auto resolved = resolve_for(mask, query, key);
  state_ = std::make_shared<detail::MapState>(
      with_one_batch(query, resolved.batch), with_one_batch(key, resolved.batch), resolved,
      scoring_of(options, query), query.sizes().slice(0, query.dim() - 3).vec());
}

}  // namespace mha
