#include "mask/kernel_mask.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_unique.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "mask/mask_views.h"
#include "runtime/uncomputed.h"

namespace mha::detail {
namespace {

// The conjunction of all masks that speak of single keys, (N or 1, S) bytes; undefined: none.
at::Tensor merge_key_masks(const ResolvedMask& mask) {
  at::Tensor merged;
  const auto merge = [&merged](const at::Tensor& open) {
    merged = merged.defined() ? merged.logical_and(open) : open;
  };
  for (const auto& keep : mask.keep_keys) merge(keep.ne(0));
  for (const auto& block : mask.block_keys) merge(block.logical_not());
  for (const auto& term : mask.add_keys) {
    if (term.size(1) != 1) continue;
    const auto blocks = term.detach().eq(-infinity);
    if (blocks.any().item<bool>()) merge(blocks.logical_not());
  }
  return merged.defined() ? merged.flatten(1).contiguous() : merged;
}

// (.., L, S) with the numbers of a row side by side; one that all queries share stays one.
at::Tensor as_rows(const at::Tensor& tensor, const ResolvedMask& mask) {
  auto rows = tensor.expand({-1, -1, -1, mask.keys});
  if (rows.size(3) > 1 && rows.stride(3) != 1) rows = rows.contiguous();
  return rows.expand({-1, -1, mask.queries, -1});
}

// The conjunction of all masks that speak of pairs, (N or 1, H or 1, L, S); undefined: none.
at::Tensor merge_pair_masks(const ResolvedMask& mask) {
  at::Tensor merged;
  const auto merge = [&merged](const at::Tensor& open) {
    merged = merged.defined() ? merged.logical_and(open) : open;
  };
  for (const auto& keep : mask.keep) merge(keep.scalar_type() == at::kBool ? keep : keep.ne(0));
  for (const auto& block : mask.block) merge(block.logical_not());
  const auto merge_blocks = [&merge](const at::Tensor& term) {
    const auto blocks = without_repeats(term.detach()).eq(-infinity);
    if (blocks.any().item<bool>()) merge(blocks.logical_not());
  };
  for (const auto& term : mask.add) merge_blocks(term);
  for (const auto& term : mask.add_keys) {
    if (term.size(1) != 1) merge_blocks(term);
  }
  return merged.defined() ? as_rows(merged, mask) : merged;
}

// The sum of added terms in float32, (N or 1, H or 1, L, S), -inf only where a term was;
// undefined: none.
at::Tensor merge_added(const std::vector<at::Tensor>& terms, const ResolvedMask& mask) {
  constexpr double lowest = std::numeric_limits<float>::lowest();
  at::Tensor sum;
  for (const auto& term : terms) {
    auto values = without_repeats(term.detach());
    // No other dtype holds less, and a half type could not hold the limit.
    if (values.scalar_type() == at::kDouble) values = values.clamp(lowest, -lowest);
    values = values.to(at::kFloat);
    sum = sum.defined() ? (sum.clamp(lowest, -lowest) + values.clamp(lowest, -lowest))
                              .clamp(lowest, -lowest)
                        : values;
  }
  return sum.defined() ? as_rows(sum, mask) : sum;
}

// The sum of the terms by distance, (N or 1, H or 1, 1, L + S - 1) float32; undefined: none.
at::Tensor merge_relative(const ResolvedMask& mask) {
  constexpr double lowest = std::numeric_limits<float>::lowest();
  at::Tensor sum;
  for (const auto& term : mask.relative) {
    auto values = term.detach();
    if (values.scalar_type() == at::kDouble) values = values.clamp(lowest, -lowest);
    values = values.to(at::kFloat);
    sum = sum.defined() ? (sum + values).clamp(lowest, -lowest) : values;
  }
  return sum.defined() ? sum.contiguous() : sum;
}

}  // namespace

at::Tensor number_documents(const ResolvedMask& mask) {
  const auto number = [](const at::Tensor& ids) {
    return std::get<1>(at::_unique(ids, /*sorted=*/true, /*return_inverse=*/true));
  };
  at::Tensor numbers;
  for (size_t i = 0; i < mask.key_documents.size(); ++i) {
    const auto queries = mask.query_documents[i].to(at::kLong);
    const auto keys = mask.key_documents[i].to(at::kLong);
    const int64_t n = queries.size(0) == 1 ? keys.size(0) : queries.size(0);
    const auto found = number(at::cat({queries.expand({n, -1}), keys.expand({n, -1})}, 1));
    const int64_t count = mask.queries + mask.keys;  // of each sample
    numbers = numbers.defined() ? number(numbers * (n * count) + found) : found;
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

void pack_documents(const ResolvedMask& resolved, const cpu::Kernels& kernels,
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

}  // namespace

PackedMask pack_mask(const ResolvedMask& resolved, const cpu::Kernels& kernels) {
  PackedMask packed;
  cpu::KernelMask& mask = packed.mask;
  pack_band(resolved, packed);
  pack_documents(resolved, kernels, packed);
  mask.keys = resolved.keys;

  at::Tensor lengths;
  for (const auto& given : resolved.lengths) {
    const auto as_long = given.to(at::kLong);
    lengths = lengths.defined() ? at::minimum(lengths, as_long) : as_long;
  }
  if (lengths.defined()) {
    lengths = lengths.contiguous();
    mask.lengths = lengths.data_ptr<int64_t>();
    packed.storage.push_back(lengths);
  }

  if (const auto keys = merge_key_masks(resolved); keys.defined()) {
    mask.keep_keys = reinterpret_cast<const uint8_t*>(keys.data_ptr<bool>());
    mask.keep_keys_n = stride_or_zero(keys, 0);
    packed.storage.push_back(keys);
  }

  if (const auto pairs = merge_pair_masks(resolved); pairs.defined()) {
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
    mask.pair_bits = bits_data;
    mask.pair_classes = class_data;
    mask.pair_plane_n = n > 1 ? h : 0;
    mask.pair_plane_h = h > 1 ? 1 : 0;
    packed.storage.push_back(bits);
    packed.storage.push_back(classes);
  }

  if (const auto added = merge_added(resolved.add, resolved); added.defined()) {
    mask.added = {added.data_ptr<float>(), stride_or_zero(added, 0), stride_or_zero(added, 1),
                  added.stride(2)};
    packed.storage.push_back(added);
  }

  if (const auto added = merge_added(resolved.add_keys, resolved); added.defined()) {
    mask.added_keys = {added.data_ptr<float>(), stride_or_zero(added, 0),
                       stride_or_zero(added, 1), 0};
    packed.storage.push_back(added);
  }

  // Without queries there is no place in the table to point at.
  if (const auto table = merge_relative(resolved);
      table.defined() && table.numel() > 0 && resolved.queries > 0) {
    mask.relative = {table.data_ptr<float>() + resolved.queries - 1, stride_or_zero(table, 0),
                     stride_or_zero(table, 1), -1};
    packed.storage.push_back(table);
  }
  return packed;
}

}  // namespace mha::detail
