#include "module/head_positions.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "cache/kv_cache_state.h"
#include "rotary/rotary.h"
#include "runtime/constant.h"

namespace mha::detail {
namespace {

// Positions from `from` to `to` beyond each sample's: (T), or (N, T) where samples differ.
at::Tensor range(int64_t from, int64_t to, const std::vector<int64_t>& samples) {
  const bool equal = std::all_of(samples.begin(), samples.end(),
                                 [&](int64_t place) { return place == samples.front(); });
  if (!equal) return constant(samples).unsqueeze(1) + at::arange(from, to);
  const int64_t place = samples.empty() ? 0 : samples.front();
  return at::arange(place + from, place + to);
}

// The last query stands where the last key does, the first ones of more queries than keys
// before the first: of the keys that the call projects, or of each sample of a memory. So both
// kinds of call agree on how far queries are from appended keys, too, which are not rotated.
HeadPositions default_positions(const InputSizes& sizes, KeyTokens keys,
                                const std::vector<int64_t>& first) {
  if (keys == KeyTokens::projected) return {range(-sizes.queries, 0, first), {}};
  auto query = range(sizes.keys - sizes.queries, sizes.keys, first);
  if (keys == KeyTokens::queries) return {query, query};
  return {query, range(0, sizes.keys, first)};
}

void check_given(const CallOptions& call, KeyTokens keys) {
  const auto &positions = call.positions(), &key_positions = call.key_positions();
  if (keys == KeyTokens::others) {
    TORCH_CHECK(positions.defined() == key_positions.defined(),
                "MultiHeadAttention: positions and key_positions: expected both or none where "
                "keys are other tokens than the queries, found only ",
                positions.defined() ? "positions" : "key_positions");
    return;
  }
  TORCH_CHECK(!key_positions.defined(), "MultiHeadAttention: key_positions: expected none ",
              keys == KeyTokens::queries
                  ? "in self-attention, where positions are those of queries and keys, found "
                  : "beside a memory, whose keys have theirs already, found ",
              key_positions.sizes());
}

}  // namespace

HeadPositions head_positions(const MultiHeadAttentionOptions& options, const CallOptions& call,
                             const InputSizes& sizes, KeyTokens keys,
                             const std::vector<int64_t>& first) {
  const auto &positions = call.positions(), &key_positions = call.key_positions();
  if (!options.rotary()) {
    TORCH_CHECK(
        !positions.defined() && !key_positions.defined(),
        "MultiHeadAttention: positions: expected none in a module without rotary, found ",
        positions.defined() ? "positions" : "key_positions");
    return {};
  }
  check_given(call, keys);
  if (!positions.defined()) return default_positions(sizes, keys, first);
  check_positions("MultiHeadAttention: positions", positions, sizes.batch, sizes.queries);
  if (keys == KeyTokens::queries) return {positions, positions};
  if (keys == KeyTokens::projected) return {positions, {}};
  check_positions("MultiHeadAttention: key_positions", key_positions, sizes.batch, sizes.keys);
  return {positions, key_positions};
}

}  // namespace mha::detail
