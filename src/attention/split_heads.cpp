#include "attention/split_heads.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <utility>

#include "attention/attention.h"
#include "runtime/enum_check.h"
#include "runtime/given_tensor.h"

namespace mha::detail {
namespace {

void check_options(const AttentionOptions& options) {
  check_enum({"scaled_dot_product_attention", "weights"}, options.weights(), Weights::per_head,
             "none, averaged or per_head");
  TORCH_CHECK(options.dropout() >= 0 && options.dropout() <= 1,
              "scaled_dot_product_attention: dropout: expected a probability in [0, 1], found ",
              options.dropout());
  TORCH_CHECK(!options.scale() || std::isfinite(*options.scale()),
              "scaled_dot_product_attention: scale: expected a finite number, found ",
              options.scale().value_or(0));
  TORCH_CHECK(is_softcap(options.softcap()), "scaled_dot_product_attention: softcap: expected ",
              softcap_range, ", found ", options.softcap());
}

// May be on meta, since all are on the query's device.
at::Tensor given(const char* name, const at::Tensor& tensor) {
  return given_tensor({"scaled_dot_product_attention", name}, tensor, Numbers::floating,
                      Memory::or_meta);
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

// The options with sinks as their memory says.
AttentionOptions with_given_sinks(const AttentionOptions& options, const at::Tensor& query) {
  if (!options.sinks().defined()) return options;
  AttentionOptions found = options;
  found.sinks(given("sinks", options.sinks()));
  check_sinks(found.sinks(), query);
  return found;
}

// Merges (or, if there are none, adds) the dimensions before the heads.
at::Tensor with_one_batch(const at::Tensor& tensor, int64_t batch) {
  return tensor.dim() == 4
             ? tensor
             : tensor.reshape({batch, tensor.size(-3), tensor.size(-2), tensor.size(-1)});
}

}  // namespace

SplitHeads split_heads(const at::Tensor& given_query, const at::Tensor& given_key,
                       const at::Tensor& given_value, const Mask& mask,
                       const AttentionOptions& options) {
  check_options(options);
  const auto query = given("query", given_query), key = given("key", given_key),
             value = given("value", given_value);
  check_inputs(query, key, value);
  check_result("value", query, value.size(-1));
  auto with_sinks = with_given_sinks(options, query);
  const auto leading = query.sizes().slice(0, query.dim() - 3);
  const int64_t batch = c10::multiply_integers(leading);
  auto resolved = resolve(
      mask,
      {leading, batch, query.size(-3), query.size(-2), key.size(-2), {}, query.scalar_type()},
      query.device());
  return {with_one_batch(query, batch), with_one_batch(key, batch),
          with_one_batch(value, batch), std::move(resolved),
          std::move(with_sinks),        leading.vec()};
}

at::Tensor with_leading(const at::Tensor& tensor, at::IntArrayRef leading) {
  if (!tensor.defined() || leading.size() == 1) return tensor;
  std::vector<int64_t> sizes = leading.vec();
  for (int64_t d = 1; d < tensor.dim(); ++d) sizes.push_back(tensor.size(d));
  return tensor.view(sizes);
}

}  // namespace mha::detail
