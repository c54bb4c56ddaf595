#include "map/view_methods.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

#include "map/fused_map.h"
#include "map/plain_map.h"

namespace mha::detail {
namespace {

// How many of `size` indices each of `cells` cells holds.
at::Tensor cell_sizes(int64_t cells, int64_t size, const at::Tensor& like) {
  const auto ends =
      (at::arange(cells + 1, like.options().dtype(at::kLong)) * size).div(cells, "floor");
  return (ends.narrow(0, 1, cells) - ends.narrow(0, 0, cells)).to(like.scalar_type());
}

}  // namespace

void check_head(const char* subject, int64_t h, int64_t heads) {
  TORCH_CHECK(h >= 0 && h < heads, subject, ": head: expected an index from 0 to ", heads - 1,
              ", found ", h);
}

void check_range(const char* subject, const char* name, int64_t from, int64_t to,
                 int64_t size) {
  TORCH_CHECK(from >= 0 && from <= to && to <= size, subject, ": ", name,
              ": expected a range within [0, ", size, "), found [", from, ", ", to, ")");
}

void check_count(const char* subject, const char* name, int64_t count, int64_t size) {
  TORCH_CHECK(count >= 1 && count <= size, subject, ": ", name,
              ": expected a number from 1 to ", size, ", found ", count);
}

at::Tensor restore_leading(const MapState& state, const at::Tensor& tensor) {
  std::vector<int64_t> sizes = state.leading;
  for (int64_t d = 1; d < tensor.dim(); ++d) sizes.push_back(tensor.size(d));
  return tensor.reshape(sizes);
}

at::Tensor numbers_of(const MapView& view) {
  return row_by_row(
      view, [](const MapPart& part) { return plain_numbers(part.view); }, fused_numbers);
}

at::Tensor numbers_over(const MapView& view, IndexRange keys) {
  return row_by_row(
      view,
      [keys](const MapPart& part) {
        return plain_numbers(part.view).narrow(3, keys.begin, keys.end - keys.begin);
      },
      [keys](const MapView& v) { return fused_numbers(select_keys(v, keys.begin, keys.end)); });
}

at::Tensor mean_of(const MapView& view) {
  const auto heads = static_cast<double>(view.query.size(1));
  const MapMethod method{
      [heads](const MapPart& part) {
        return std::vector<at::Tensor>{plain_numbers(part.view).sum(1, /*keepdim=*/true) /
                                       heads};
      },
      [](const MapView& v) { return std::vector<at::Tensor>{fused_mean(v).unsqueeze(1)}; },
      {false},
      /*sums_heads=*/true};
  return apply(method, view)[0].squeeze(1);
}

SumParts sums_of(const MapView& view) {
  const MapMethod method{[](const MapPart& part) {
                           const auto sums = plain_sums(part.view);
                           return std::vector<at::Tensor>{sums.by_query, sums.by_key};
                         },
                         [](const MapView& v) {
                           const auto sums = fused_sums(v);
                           return std::vector<at::Tensor>{sums.by_query, sums.by_key};
                         },
                         {false, true}};
  const auto results = apply(method, view);
  return {results[0], results[1]};
}

TopKeys top_of(const MapView& view, int64_t count) {
  const MapMethod search{[count](const MapPart& part) {
                           const auto top = plain_top(part.view, count);
                           return std::vector<at::Tensor>{top.values, top.keys};
                         },
                         [count](const MapView& v) {
                           const auto top = fused_top(v, count);
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
  const MapMethod gather{
      [all_keys = top.keys](const MapPart& part) {
        const auto& v = part.view;
        const auto keys =
            all_keys.narrow(1, part.head, v.query.size(1)).narrow(2, part.row, v.query.size(2));
        const auto values = plain_numbers(v).gather(3, keys.clamp_min(0));
        // A row of NaN has no keys, and stays NaN.
        return std::vector<at::Tensor>{values.masked_fill(
            keys.eq(-1).logical_and(values.detach().isnan().logical_not()), 0)};
      },
      [values = top.values](const MapView&) { return std::vector<at::Tensor>{values}; },
      {false}};
  return {apply(gather, view)[0], top.keys};
}

at::Tensor pooled_of(const MapView& view, int64_t rows, int64_t columns) {
  const int64_t queries = view.query.size(2);
  const MapMethod method{
      [=](const MapPart& part) {
        return std::vector<at::Tensor>{plain_pool(part.view, part.row, queries, rows, columns)};
      },
      [=](const MapView& v) { return std::vector<at::Tensor>{fused_pool(v, rows, columns)}; },
      {true}};
  const auto sums = apply(method, view)[0];
  return sums / cell_sizes(rows, queries, sums).unsqueeze(1);
}

}  // namespace mha::detail
