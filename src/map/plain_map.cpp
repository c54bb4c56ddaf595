#include "map/plain_map.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <limits>

#include "attention/plain_attention.h"
#include "attention/unread_products.h"
#include "mask/dense_mask.h"

namespace mha::detail {
namespace {

at::Tensor index_range(const MapView& view, int64_t from, int64_t count) {
  return at::arange(from, from + count, view.query.options().dtype(at::kLong));
}

// The cell of 0 .. cells - 1 that each index of `size` falls into.
at::Tensor cells_of(const at::Tensor& index, int64_t cells, int64_t size) {
  return ((index + 1) * cells - 1).div(size, "floor");
}

// 0 * ln(0) is 0, and has no gradient.
at::Tensor row_entropy(const at::Tensor& weights) {
  const auto safe = weights.masked_fill(weights.eq(0), 1);
  return (weights * at::log(safe)).sum(-1).neg();
}

// The gradient with respect to the weights (N, H, rows, S) of an attribution. What is not
// finite leaves nothing where the mask blocks: each pair has a product of its own.
at::Tensor weight_gradient(const MapView& view) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto gradient =
      grouped_matmul(view.grad_output.contiguous(), view.value.contiguous().transpose(-2, -1));
  const auto allowed = allowed_pairs(view.mask, gradient.device());
  return allowed.defined() ? gradient.masked_fill(allowed.logical_not(), 0) : gradient;
}

}  // namespace

at::Tensor plain_numbers(const MapView& view) {
  if (view.attribution == Attribution::gradient) return weight_gradient(view);
  const AttentionCall call{view.scoring, Weights::per_head};
  // Any values will do for an output that is not wanted.
  const auto weights =
      plain_attention(view.query, view.key, view.key.narrow(3, 0, 1), view.mask, call).weights;
  if (!view.attribution) return weights;
  const auto product = weights * weight_gradient(view);
  return view.attribution == Attribution::relevance ? product : product.clamp_min(0);
}

at::Tensor plain_log_sum_exp(const MapView& view) {
  const bool has_numbers = view.key.size(2) > 0 && !view.key.is_meta();
  const auto of_keys =
      has_numbers
          ? at::logsumexp(plain_scores(view.query, view.key, view.mask, view.scoring), {-1})
          : at::full({view.query.size(0), view.query.size(1), view.query.size(2)}, -infinity,
                     view.query.options());
  const auto& sinks = view.scoring.sinks;
  return sinks.defined() ? at::logaddexp(of_keys, sinks.squeeze(-1)) : of_keys;
}

SummaryParts plain_summary(const MapView& view, const at::Tensor& positions) {
  const auto weights = plain_numbers(view);
  const auto query =
      positions.view({-1, 1, 1, 1}) + index_range(view, 0, weights.size(2)).unsqueeze(1);
  const auto key = index_range(view, 0, view.mask.keys);
  const auto apart = at::maximum(query - key, key - query).to(weights.scalar_type());
  const auto given = weights.narrow(3, 0, view.mask.keys);
  return {row_entropy(weights), (given * apart).sum(-1), given.sum(-1), weights.sum(2)};
}

SumParts plain_sums(const MapView& view) {
  const auto numbers = plain_numbers(view);
  return {numbers.sum(3), numbers.sum(2)};
}

TopKeys plain_top(const MapView& view, int64_t count) {
  const auto numbers = plain_numbers(view);
  const auto [sorted, order] = at::sort(numbers, /*stable=*/true, -1, /*descending=*/true);
  const auto largest = sorted.narrow(3, 0, count).clamp_min(0);
  const auto unknown = numbers.ne(numbers).any(-1, /*keepdim=*/true);
  const auto unseen = largest.le(0) | unknown;
  return {largest.masked_fill(unknown, std::numeric_limits<double>::quiet_NaN()),
          order.narrow(3, 0, count).masked_fill(unseen, -1)};
}

at::Tensor plain_pool(const MapView& view, int64_t row, int64_t queries, int64_t rows,
                      int64_t columns) {
  const auto numbers = plain_numbers(view);
  const int64_t n = numbers.size(0), h = numbers.size(1), count = numbers.size(2);
  const int64_t keys = numbers.size(3);
  const auto column = cells_of(index_range(view, 0, keys), columns, keys);
  const auto by_column =
      at::zeros({n, h, count, columns}, numbers.options()).index_add(3, column, numbers);
  return at::zeros({n, h, rows, columns}, numbers.options())
      .index_add(2, cells_of(index_range(view, row, count), rows, queries), by_column);
}

}  // namespace mha::detail
