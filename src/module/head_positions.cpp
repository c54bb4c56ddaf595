#include "module/head_positions.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "rotary/rotary.h"
#include "runtime/constant.h"

namespace mha::detail {
namespace {

// What the keys of a call are, for its positions.
enum class KeyTokens {
  queries,    // the queries' tokens
  others,     // tokens of their own
  projected,  // those of a memory, which are rotated already
};

KeyTokens key_tokens_of(const Tokens& tokens) {
  if (!tokens.key.defined()) return KeyTokens::projected;
  return tokens.key.is_same(tokens.query) ? KeyTokens::queries : KeyTokens::others;
}

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
HeadPositions default_positions(const Tokens& tokens, KeyTokens kind,
                                const std::vector<int64_t>& first) {
  const int64_t queries = tokens.query.size(1);
  if (kind == KeyTokens::projected) return {range(-queries, 0, first), {}};
  const int64_t keys = tokens.key.size(1);
  auto query = range(keys - queries, keys, first);
  if (kind == KeyTokens::queries) return {query, query};
  return {query, range(0, keys, first)};
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
                             const Tokens& tokens, const std::vector<int64_t>& first) {
  const auto &positions = call.positions(), &key_positions = call.key_positions();
  if (!options.rotary()) {
    TORCH_CHECK(
        !positions.defined() && !key_positions.defined(),
        "MultiHeadAttention: positions: expected none in a module without rotary, found ",
        positions.defined() ? "positions" : "key_positions");
    return {};
  }
  const KeyTokens kind = key_tokens_of(tokens);
  check_given(call, kind);
  if (!positions.defined()) return default_positions(tokens, kind, first);
  const int64_t n = tokens.query.size(0);
  const auto device = tokens.query.device();
  check_positions("MultiHeadAttention: positions", positions, n, tokens.query.size(1), device);
  if (kind == KeyTokens::queries) return {positions, positions};
  if (kind == KeyTokens::projected) return {positions, {}};
  check_positions("MultiHeadAttention: key_positions", key_positions, n, tokens.key.size(1),
                  device);
  return {positions, key_positions};
}

}  // namespace mha::detail
