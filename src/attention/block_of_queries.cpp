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
BlockOfQueries block_from(const ResolvedMask& mask, int64_t from, int64_t rows,
                          KeysOfBlocks keys) {
  const int64_t all = mask.keys + mask.extra_keys;
  BlockOfQueries block{from, rows, 0, all};
  if (keys == KeysOfBlocks::all || all == 0) return block;
  const int64_t last_given = std::max<int64_t>(mask.keys - 1, 0);
  if (mask.band.low != -Band::open) {
    block.first_key = std::clamp<int64_t>(from + mask.band.low, 0, last_given);
  }
  // Extra keys, which lie behind the given ones, are open to all.
  int64_t end = all;
  if (mask.band.high != Band::open && mask.extra_keys == 0) {
    end = std::clamp(from + rows + mask.band.high, block.first_key + 1, all);
  }
  block.keys = end - block.first_key;
  return block;
}

double largest_size(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  const auto [low, high] = at::aminmax(tensor.detach());  // NaN if any number is
  return at::maximum(low.abs(), high.abs()).item<double>();
}

}  // namespace

ResolvedMask BlockOfQueries::part_of(const ResolvedMask& mask) const {
  return select_keys(select_rows(mask, from, from + rows), first_key, first_key + keys);
}

std::vector<BlockOfQueries> blocks_of_queries(const ResolvedMask& mask, int64_t rows,
                                              KeysOfBlocks keys) {
  std::vector<BlockOfQueries> blocks;
  for (int64_t from = 0; from < mask.queries; from += rows) {
    blocks.push_back(block_from(mask, from, std::min(rows, mask.queries - from), keys));
  }
  return blocks;
}

PlainPart part_of_call(const BlockOfQueries& block, const ResolvedMask& mask,
                       const AttentionCall& call, at::Device device, bool finite) {
  PlainPart part;
  part.first_query = block.from;
  part.queries = mask.queries;
  part.first_key = block.first_key;
  part.finite = finite;
  if (call.dropout > 0 && !device.is_cpu()) {
    // A generator of its own for each block, which draws the same when it is computed again.
    part.generator = at::globalContext().defaultGenerator(device).clone();
    part.generator.set_current_seed(call.dropout_seed + static_cast<uint64_t>(block.from));
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
