#include "mask/kernel_mask.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <tuple>

#include "mask/dense_mask.h"
#include "mask/mask_views.h"
#include "runtime/finite.h"
#include "runtime/uncomputed.h"

namespace mha::detail {
namespace {

// Whether the kernels read what a list blocks in a form of its own, and not as flags of keys
// or, which takes L x S bits, of pairs.
bool has_own_form(Meaning meaning) {
  switch (meaning) {
    case Meaning::low_edge:
    case Meaning::high_edge:
    case Meaning::length:
    case Meaning::query_document:
    case Meaning::key_document:
      return true;
    case Meaning::keep:
    case Meaning::block:
    case Meaning::add:
    case Meaning::add_finite:
      break;
  }
  return false;
}

// (.., L, S) with the numbers of a row side by side; one that all queries share stays one.
at::Tensor as_rows(const at::Tensor& tensor, const ResolvedMask& mask) {
  auto rows = tensor.expand({-1, -1, -1, mask.keys});
  if (rows.size(3) > 1 && rows.stride(3) != 1) rows = rows.contiguous();
  return rows.expand({-1, -1, mask.queries, -1});
}

// The conjunction of all other lists; undefined: open.
struct OpenFlags {
  at::Tensor keys;   // (N or 1, S), of those that speak of single keys
  at::Tensor pairs;  // (N or 1, H or 1, L, S)
};

OpenFlags merge_flags(const ResolvedMask& mask) {
  OpenFlags merged;
  for (const MaskList& list : mask_lists) {
    if (has_own_form(list.meaning)) continue;
    for (size_t i = 0; i < (mask.*list.tensors).size(); ++i) {
      const auto open = open_pairs(mask, list, i);
      if (!open.defined() || (list.is_added() && open.all().item<bool>())) continue;
      auto& flags = open.size(1) == 1 && open.size(2) == 1 ? merged.keys : merged.pairs;
      flags = flags.defined() ? flags.logical_and(open) : open;
    }
  }
  if (merged.keys.defined()) {
    merged.keys = merged.keys.expand({-1, 1, 1, mask.keys}).flatten(1).contiguous();
  }
  if (merged.pairs.defined()) merged.pairs = as_rows(merged.pairs, mask);
  return merged;
}

// The sum of a list's terms in float32, (N or 1, H or 1, L, S) or, by distance, (N or 1, H or
// 1, 1, L + S - 1), with -inf only where a term was; undefined: none.
at::Tensor merge_added(const MaskList& list, const ResolvedMask& mask) {
  constexpr double lowest = lowest_of(at::kFloat);
  const bool by_distance = list.has(Axis::distance);
  at::Tensor sum;
  for (const auto& term : mask.*list.tensors) {
    auto values = by_distance ? term.detach() : without_repeats(term.detach());
    // No other dtype holds less, and a half type could not hold the limit.
    if (values.scalar_type() == at::kDouble) values = values.clamp(lowest, -lowest);
    values = values.to(at::kFloat);
    sum = sum.defined() ? (sum.clamp(lowest, -lowest) + values.clamp(lowest, -lowest))
                              .clamp(lowest, -lowest)
                        : values;
  }
  if (!sum.defined()) return sum;
  return by_distance ? sum.contiguous() : as_rows(sum, mask);
}

}  // namespace

at::Tensor number_documents(const ResolvedMask& mask) {
  // By sorting: how many numbers there are, which `unique` would wait for, is not asked.
  const auto number = [](const at::Tensor& ids) {
    if (ids.numel() == 0) return ids;
    const auto [sorted, order] = ids.sort(1);
    const auto rises = sorted.slice(1, 1).ne(sorted.slice(1, 0, -1)).to(at::kLong);
    return at::zeros_like(ids).scatter(1, order, at::constant_pad_nd(rises.cumsum(1), {1, 0}));
  };
  at::Tensor numbers;
  for (size_t i = 0; i < mask.key_documents.size(); ++i) {
    const auto queries = mask.query_documents[i].to(at::kLong);
    const auto keys = mask.key_documents[i].to(at::kLong);
    const int64_t n = queries.size(0) == 1 ? keys.size(0) : queries.size(0);
    const auto found = number(at::cat({queries.expand({n, -1}), keys.expand({n, -1})}, 1));
    const int64_t count = mask.queries + mask.keys;  // of each sample
    numbers = numbers.defined() ? number(numbers * count + found) : found;
  }
  return numbers;
}

namespace {

// The keys that each query's document reaches over, by one pass over the keys of a sample.
void find_documents(const int32_t* queries, int64_t query_count, const int32_t* keys,
                    int64_t key_count, std::vector<int32_t>& first, std::vector<int32_t>& end,
                    int32_t* begins, int32_t* ends) {
  const auto none = static_cast<int32_t>(key_count);
  for (int64_t j = key_count - 1; j >= 0; --j) {
    const auto document = static_cast<size_t>(keys[j]);
    first[document] = static_cast<int32_t>(j);
    if (end[document] == 0) end[document] = static_cast<int32_t>(j + 1);
  }
  for (int64_t i = 0; i < query_count; ++i) {
    const auto document = static_cast<size_t>(queries[i]);
    begins[i] = end[document] == 0 ? none : first[document];
    ends[i] = end[document];
  }
  for (int64_t j = 0; j < key_count; ++j) end[static_cast<size_t>(keys[j])] = 0;
}

void pack_documents(const ResolvedMask& resolved, const cpu::PairBlocks& kernels,
                    PackedMask& packed) {
  const auto numbers = number_documents(resolved);
  if (!numbers.defined() || numbers.numel() == 0) return;
  const int64_t n = numbers.size(0), l = resolved.queries, s = resolved.keys;
  const int64_t row = l + kernels.tile;
  const auto as_int = numbers.to(at::kInt);
  const auto queries = at::constant_pad_nd(as_int.narrow(1, 0, l), {0, kernels.tile}, -1);
  const auto keys = as_int.narrow(1, l, s).contiguous();
  const auto spans = at::zeros({2, n, row}, at::kInt);
  auto* begins = spans.data_ptr<int32_t>();
  const auto count = static_cast<size_t>(numbers.max().item<int64_t>() + 1);
  std::vector<int32_t> first(count), end(count);
  for (int64_t i = 0; i < n; ++i) {
    find_documents(queries.data_ptr<int32_t>() + i * row, l, keys.data_ptr<int32_t>() + i * s,
                   s, first, end, begins + i * row, begins + (n + i) * row);
  }
  cpu::KernelMask& mask = packed.mask;
  mask.query_documents = queries.data_ptr<int32_t>();
  mask.key_documents = keys.data_ptr<int32_t>();
  mask.query_documents_n = n > 1 ? row : 0;
  mask.key_documents_n = n > 1 ? s : 0;
  mask.document_begins = begins;
  mask.document_ends = begins + n * row;
  packed.storage.insert(packed.storage.end(), {queries, keys, spans});
}

// Each sample's edge where one is given beside `shared`; undefined: none is.
at::Tensor merge_edges(int64_t shared, const std::vector<at::Tensor>& given, bool is_low) {
  at::Tensor merged;
  for (const auto& edge : given) {
    merged = !merged.defined() ? edge
             : is_low          ? at::maximum(merged, edge)
                               : at::minimum(merged, edge);
  }
  if (!merged.defined()) return merged;
  return (is_low ? merged.clamp_min(shared) : merged.clamp_max(shared)).contiguous();
}

void pack_band(const ResolvedMask& resolved, PackedMask& packed) {
  cpu::KernelMask& mask = packed.mask;
  mask.low = resolved.band.low;
  mask.high = resolved.band.high;
  auto lows = merge_edges(mask.low, resolved.lows, true);
  auto highs = merge_edges(mask.high, resolved.highs, false);
  if (!lows.defined() && !highs.defined()) return;
  if (!lows.defined()) lows = at::full_like(highs, mask.low);
  if (!highs.defined()) highs = at::full_like(lows, mask.high);
  mask.lows = lows.data_ptr<int64_t>();
  mask.highs = highs.data_ptr<int64_t>();
  packed.storage.insert(packed.storage.end(), {lows, highs});
}

int64_t stride_or_zero(const at::Tensor& tensor, int64_t dim) {
  return tensor.size(dim) > 1 ? tensor.stride(dim) : 0;
}

void pack_open_pairs(const at::Tensor& pairs, const cpu::PairBlocks& kernels,
                     PackedMask& packed) {
  const int64_t n = pairs.size(0), h = pairs.size(1), l = pairs.size(2), s = pairs.size(3);
  const int64_t tiles = (l + kernels.tile - 1) / kernels.tile;
  const int64_t blocks = (s + kernels.key_block - 1) / kernels.key_block;
  const auto bits = uncomputed({n * h * tiles * s}, at::kLong);
  const auto classes = uncomputed({n * h * tiles * blocks}, at::kByte);
  auto* bits_data = reinterpret_cast<uint64_t*>(bits.data_ptr<int64_t>());
  auto* class_data = classes.data_ptr<uint8_t>();
  const auto* allowed = reinterpret_cast<const uint8_t*>(pairs.data_ptr<bool>());
  for (int64_t plane = 0; plane < n * h; ++plane) {
    kernels.pack_pairs(allowed + plane / h * pairs.stride(0) + plane % h * pairs.stride(1),
                       pairs.stride(2), l, s, bits_data + plane * tiles * s,
                       class_data + plane * tiles * blocks);
  }
  packed.mask.pair_bits = bits_data;
  packed.mask.pair_classes = class_data;
  packed.mask.pair_plane_n = n > 1 ? h : 0;
  packed.mask.pair_plane_h = h > 1 ? 1 : 0;
  packed.storage.push_back(bits);
  packed.storage.push_back(classes);
}

void pack_added(const ResolvedMask& resolved, PackedMask& packed) {
  static_assert(count_added() == cpu::KernelMask::added_lists);
  cpu::Rows<const float>* next = packed.mask.added;
  for (const MaskList& list : mask_lists) {
    if (!list.is_added()) continue;
    cpu::Rows<const float>& rows = *next++;
    const auto sum = merge_added(list, resolved);
    // Without queries there is no place in a table to point at.
    if (!sum.defined() || sum.numel() == 0 || resolved.queries == 0) continue;
    rows = {sum.data_ptr<float>(), stride_or_zero(sum, 0), stride_or_zero(sum, 1), 0};
    if (list.has(Axis::query)) rows.t = sum.stride(2);
    if (list.has(Axis::distance)) {
      rows.data += resolved.queries - 1;
      rows.t = -1;
    }
    packed.storage.push_back(sum);
  }
}

}  // namespace

PackedMask pack_mask(const ResolvedMask& resolved, const cpu::PairBlocks& kernels) {
  PackedMask packed;
  cpu::KernelMask& mask = packed.mask;
  pack_band(resolved, packed);
  pack_documents(resolved, kernels, packed);
  mask.keys = resolved.keys;

  at::Tensor lengths;
  for (const auto& given : resolved.lengths) {
    lengths = lengths.defined() ? at::minimum(lengths, given) : given;
  }
  if (lengths.defined()) {
    lengths = lengths.contiguous();
    mask.lengths = lengths.data_ptr<int64_t>();
    packed.storage.push_back(lengths);
  }

  const auto open = merge_flags(resolved);
  if (open.keys.defined()) {
    mask.keep_keys = reinterpret_cast<const uint8_t*>(open.keys.data_ptr<bool>());
    mask.keep_keys_n = stride_or_zero(open.keys, 0);
    packed.storage.push_back(open.keys);
  }
  if (open.pairs.defined()) pack_open_pairs(open.pairs, kernels, packed);
  pack_added(resolved, packed);
  return packed;
}

}  // namespace mha::detail
