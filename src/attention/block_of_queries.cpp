#include "attention/block_of_queries.h"

#include <ATen/Context.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/maximum.h>

#include <algorithm>
#include <cmath>

#include "mask/mask_parts.h"
#include "runtime/finite.h"

namespace mha::detail {
namespace {

// At least one key, if there is one, since queries that see none are known by the mask.
Span keys_in_band(const ResolvedMask& mask, const Span& queries) {
  const int64_t all = mask.keys + mask.extra_keys;
  if (all == 0) return {0, 0};
  const int64_t last_given = std::max<int64_t>(mask.keys - 1, 0);
  int64_t from = 0, end = all;
  if (mask.band.low != -Band::open) {
    from = std::clamp<int64_t>(queries.from + mask.band.low, 0, last_given);
  }
  // Extra keys, which lie behind the given ones, are open to all.
  if (mask.band.high != Band::open && mask.extra_keys == 0) {
    end = std::clamp(queries.from + queries.count + mask.band.high, from + 1, all);
  }
  return {from, end - from};
}

// [0, whole) in spans of `count`.
std::vector<Span> spans_of(int64_t whole, int64_t count) {
  std::vector<Span> spans;
  for (int64_t from = 0; from < whole; from += count) {
    spans.push_back({from, std::min(count, whole - from)});
  }
  return spans;
}

double largest_size(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  const auto [low, high] = at::aminmax(tensor.detach());  // NaN if any number is
  return at::maximum(low.abs(), high.abs()).item<double>();
}

}  // namespace

ResolvedMask BlockOfQueries::part_of_mask(const ResolvedMask& mask) const {
  const auto planes = select_planes(mask, samples.from, samples.count, heads.from, heads.count);
  const auto rows = select_rows(planes, queries.from, queries.from + queries.count);
  return select_keys(rows, keys.from, keys.from + keys.count);
}

std::vector<BlockOfQueries> blocks_of_queries(const ResolvedMask& mask, int64_t kv_heads,
                                              const BlockSizes& sizes, KeysOfBlocks keys) {
  const int64_t group = kv_heads > 0 ? mask.heads / kv_heads : 0;
  const Span all_keys{0, mask.keys + mask.extra_keys};
  std::vector<BlockOfQueries> blocks;
  for (const auto& samples : spans_of(mask.batch, sizes.samples)) {
    for (const auto& kv : spans_of(kv_heads, sizes.kv_heads)) {
      for (const auto& queries : spans_of(mask.queries, sizes.queries)) {
        const Span seen = keys == KeysOfBlocks::all ? all_keys : keys_in_band(mask, queries);
        const Span heads{kv.from * group, kv.count * group};
        blocks.push_back(
            {samples, heads, kv, queries, seen, static_cast<int64_t>(blocks.size())});
      }
    }
  }
  return blocks;
}

PlainPart part_of_call(const BlockOfQueries& block, const ResolvedMask& mask,
                       const AttentionCall& call, at::Device device, bool finite) {
  PlainPart part;
  part.first_sample = block.samples.from;
  part.first_head = block.heads.from;
  part.first_query = block.queries.from;
  part.first_key = block.keys.from;
  part.heads = mask.heads;
  part.queries = mask.queries;
  part.finite = finite;
  if (call.dropout > 0 && !device.is_cpu()) {
    // A generator of its own for each block, which draws the same when it is computed again.
    part.generator = at::globalContext().defaultGenerator(device).clone();
    part.generator.set_current_seed(call.dropout_seed + static_cast<uint64_t>(block.index));
  }
  return part;
}

bool is_known_finite(const at::Tensor& tensor) {
  return !tensor.defined() ||
         (may_branch_on_numbers(tensor) && std::isfinite(largest_size(tensor)));
}

bool is_all_finite(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   double scale) {
  if (!is_known_finite(key) || !is_known_finite(value) || !may_branch_on_numbers(query)) {
    return false;
  }
  return largest_size(query) * std::max(std::abs(scale), 1.0) <=
         -lowest_of(query.scalar_type());
}

}  // namespace mha::detail
