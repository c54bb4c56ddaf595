#include "attention/unread_products.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "runtime/attention_path.h"
#include "runtime/finite.h"
#include "runtime/wants_gradient.h"

namespace mha::detail {
namespace {

constexpr double unbounded = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

// (.., T) of rows (.., T, X): NaN for those that are not finite, 0 for others.
at::Tensor zero_or_nan(const at::Tensor& rows) {
  const auto finite = row_is_finite(rows);
  return at::zeros(finite.sizes(), rows.options().requires_grad(false))
      .masked_fill(finite.logical_not(), not_a_number);
}

at::Tensor held_product(const at::Tensor& query, const at::Tensor& key, double scale) {
  const double highest = -lowest_of(query.scalar_type());
  return grouped_matmul(query * scale, key.transpose(-2, -1)).clamp(-highest, highest);
}

bool may_want_gradient(const at::Tensor& left, const at::Tensor& right) {
  return is_tracing() || wants_gradient(left, right);
}

// (N, H, L or 1, X): whether an open key has a mark, of marks (N, Hk, S, X).
at::Tensor sees_mark(const at::Tensor& allowed, const at::Tensor& marks, int64_t heads) {
  const int64_t kv_heads = marks.size(1), rows = allowed.size(2), keys = marks.size(2);
  const bool shared = allowed.size(1) == 1;
  auto pairs = allowed.to(at::kBFloat16).expand({-1, -1, -1, keys});
  if (!shared)
    pairs = pairs.reshape({allowed.size(0), kv_heads, heads / kv_heads * rows, keys});
  // Counts of marks, of which a rounded one is above 0 all the same.
  const auto seen = at::matmul(pairs, marks.to(at::kBFloat16)).gt(0);
  return shared ? expand_heads(seen, heads)
                : seen.view({marks.size(0), heads, rows, marks.size(3)});
}

}  // namespace

at::Tensor grouped_matmul(const at::Tensor& left, const at::Tensor& right) {
  const int64_t n = left.size(0), h = left.size(1), l = left.size(2), x = left.size(3);
  const int64_t kv_heads = right.size(1);
  const auto product = at::matmul(left.reshape({n, kv_heads, h / kv_heads * l, x}), right);
  return product.view({n, h, l, right.size(3)});
}

at::Tensor expand_heads(const at::Tensor& tensor, int64_t heads) {
  return tensor.size(1) == heads ? tensor : tensor.repeat_interleave(heads / tensor.size(1), 1);
}

at::Tensor unseen_keys(const at::Tensor& allowed, int64_t kv_heads) {
  auto seen = allowed.any(2);
  if (seen.size(1) > 1) seen = seen.unflatten(1, {kv_heads, seen.size(1) / kv_heads}).any(2);
  return seen.logical_not().unsqueeze(3);
}

at::Tensor unread_scores(const at::Tensor& query, const at::Tensor& key, double scale) {
  // A score is of its own two rows alone. Only the products of a backward meet them all.
  if (!may_want_gradient(query, key)) return held_product(query, key, scale);
  return held_product(finite_rows(query), finite_rows(key), scale)
      .add_(zero_or_nan(query).unsqueeze(3))
      .add_(expand_heads(zero_or_nan(key), query.size(1)).unsqueeze(2));
}

at::Tensor unread_output(const at::Tensor& weights, const at::Tensor& value,
                         const at::Tensor& allowed) {
  const auto given = value.detach();
  auto left_out = at::isfinite(given).logical_not();
  // A gradient of NaN, which any query may have, must not reach keys that nobody sees.
  if (may_want_gradient(weights, value)) {
    left_out = left_out.logical_or(unseen_keys(allowed, value.size(1)));
  }
  return with_unread_values(grouped_matmul(weights, value.masked_fill(left_out, 0)), value,
                            allowed);
}

at::Tensor with_unread_values(const at::Tensor& output, const at::Tensor& value,
                              const at::Tensor& allowed) {
  const auto given = value.detach();
  const auto unknown = given.isnan();
  const auto marks = at::cat(
      {given.eq(unbounded).logical_or(unknown), given.eq(-unbounded).logical_or(unknown)}, 3);
  const auto seen = sees_mark(allowed, marks, output.size(1)).chunk(2, 3);
  return output.masked_fill(seen[0], unbounded)
      .masked_fill(seen[1], -unbounded)
      .masked_fill(seen[0].logical_and(seen[1]), not_a_number);
}

}  // namespace mha::detail
