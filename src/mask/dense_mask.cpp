#include "mask/dense_mask.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/ones.h>

#include "mask/mask_parts.h"
#include "mask/mask_views.h"
#include "runtime/attention_path.h"
#include "runtime/finite.h"

namespace mha::detail {
namespace {

// (1, 1, L, 1) and (1, 1, 1, S)
at::Tensor query_places(const ResolvedMask& mask, at::Device device) {
  return at::arange(mask.queries, at::TensorOptions().dtype(at::kLong).device(device))
      .view({1, 1, mask.queries, 1});
}
at::Tensor key_places(const ResolvedMask& mask, at::Device device) {
  return at::arange(mask.keys, at::TensorOptions().dtype(at::kLong).device(device))
      .view({1, 1, 1, mask.keys});
}

// (N, 1, 1, 1)
at::Tensor of_sample(const at::Tensor& numbers) {
  return numbers.view({-1, 1, 1, 1});
}

// With `value` for the extra keys.
at::Tensor with_extra_keys(const at::Tensor& pairs, const ResolvedMask& mask, double value) {
  if (!pairs.defined() || mask.extra_keys == 0) return pairs;
  return at::constant_pad_nd(pairs.expand({-1, -1, -1, mask.keys}), {0, mask.extra_keys},
                             value);
}

// A term without its blocks, finite or NaN, that broadcasts to (N, H, L, S).
at::Tensor as_pairs(const at::Tensor& term, const MaskList& list, const ResolvedMask& mask) {
  const auto open =
      list.meaning == Meaning::add ? term.masked_fill(term.detach().eq(-infinity), 0) : term;
  if (!list.has(Axis::distance)) return open;
  // Row L - 1 - i of the unfolded table is that of query i.
  return open.unfold(3, mask.keys, 1).squeeze(2).flip(2);
}

}  // namespace

at::Tensor open_pairs(const ResolvedMask& mask, const MaskList& list, size_t i) {
  const at::Tensor& term = (mask.*list.tensors)[i];
  const auto queries = [&] { return query_places(mask, term.device()); };
  const auto keys = [&] { return key_places(mask, term.device()); };
  switch (list.meaning) {
    case Meaning::keep:
      return term.scalar_type() == at::kBool ? term : term.ne(0);
    case Meaning::block:
      return term.logical_not();
    case Meaning::add:
      // A trace holds for tensors with other strides, too.
      return (is_tracing() ? term.detach() : without_repeats(term.detach())).ne(-infinity);
    case Meaning::add_finite:
      return {};
    case Meaning::low_edge:
      return keys().ge(queries() + of_sample(term));
    case Meaning::high_edge:
      return keys().le(queries() + of_sample(term));
    case Meaning::length:
      return keys().lt(of_sample(term));
    case Meaning::query_document:
      return {};  // said by the term's other tensor
    case Meaning::key_document:
      return mask.query_documents[i].unsqueeze(2).eq(term.unsqueeze(1)).unsqueeze(1);
  }
  return {};
}

at::Tensor allowed_pairs(const ResolvedMask& mask, at::Device device) {
  at::Tensor allowed;
  const auto merge = [&allowed](const at::Tensor& open) {
    if (open.defined()) allowed = allowed.defined() ? allowed.logical_and(open) : open;
  };
  const Band& band = mask.band;
  if (!band.is_open()) {
    const auto queries = query_places(mask, device), keys = key_places(mask, device);
    if (band.low != -Band::open) merge(keys.ge(queries + band.low));
    if (band.high != Band::open) merge(keys.le(queries + band.high));
  }
  for (const MaskList& list : mask_lists) {
    for (size_t i = 0; i < (mask.*list.tensors).size(); ++i) merge(open_pairs(mask, list, i));
  }
  return with_extra_keys(allowed, mask, 1);
}

std::array<int64_t, 4> pair_sizes(const ResolvedMask& mask) {
  std::array<int64_t, 4> sizes{1, 1, 1, 1};
  const auto widen = [&](Axis axis) {
    const bool is_distance = axis == Axis::distance;
    if (axis == Axis::sample) sizes[0] = mask.batch;
    if (axis == Axis::head) sizes[1] = mask.heads;
    if (axis == Axis::query || is_distance) sizes[2] = mask.queries;
    if (axis == Axis::key || is_distance) sizes[3] = mask.keys + mask.extra_keys;
  };
  if (!mask.band.is_open()) widen(Axis::distance);
  for (const MaskList& list : mask_lists) {
    for (const auto& term : mask.*list.tensors) {
      widen(list.numbers);
      for (int64_t d = 0; d < term.dim(); ++d) {
        if (term.size(d) != 1) widen(list.axes[static_cast<size_t>(d)]);
      }
    }
  }
  return sizes;
}

at::Tensor open_column(const ResolvedMask& mask, int64_t j, at::Device device) {
  const auto open = allowed_pairs(select_keys(mask, j, j + 1), device);
  return open.defined()
             ? open.select(3, 0)
             : at::ones({1, 1, 1}, at::TensorOptions().dtype(at::kBool).device(device));
}

at::Tensor added_pairs(const ResolvedMask& mask, at::ScalarType dtype) {
  // Clamped, since the lowest value of a wider dtype, or the sum of two, must stay finite.
  const double lowest = lowest_of(dtype);
  const auto add_to = [&](at::Tensor& sum, at::Tensor values) {
    if (values.scalar_type() == at::kDouble) values = values.clamp(lowest, -lowest);
    values = values.to(dtype);
    sum = sum.defined() ? (sum + values).clamp(lowest, -lowest) : values;
  };
  // A list after the other, as the kernels hold their sums.
  at::Tensor added;
  for (const MaskList& list : mask_lists) {
    if (!list.is_added()) continue;
    if (list.has(Axis::distance) && mask.queries * mask.keys == 0) continue;  // no windows
    at::Tensor sum;
    for (const auto& term : mask.*list.tensors) add_to(sum, as_pairs(term, list, mask));
    if (sum.defined()) add_to(added, sum);
  }
  return with_extra_keys(added, mask, 0);
}

}  // namespace mha::detail
