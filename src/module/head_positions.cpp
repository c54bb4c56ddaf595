#include "module/head_positions.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/maximum.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <ostream>
#include <utility>
#include <variant>

#include "rotary/rotary.h"
#include "runtime/constant.h"
#include "runtime/finite.h"

namespace mha {

std::ostream& operator<<(std::ostream& stream, const TemperatureTuning& tuning) {
  return stream << "(scale=" << tuning.scale() << ", floor_scale=" << tuning.floor_scale()
                << ", offset=" << tuning.offset() << ")";
}

}  // namespace mha

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

bool has_positions(const MultiHeadAttentionOptions& options) {
  return options.rotary() || options.temperature_tuning();
}

at::Tensor query_tuning(const MultiHeadAttentionOptions& options, const at::Tensor& positions,
                        at::Device device) {
  const auto& tuning = options.temperature_tuning();
  if (!tuning) return {};
  // In float64, if the device has it, which long positions need. Before the first: as there.
  const auto wide = widest_dtype(device);
  const auto place = positions.is_meta() || wide == at::kDouble ? device : at::Device(at::kCPU);
  const auto steps = ((positions.to(place, at::kDouble) + tuning->offset()) /
                      static_cast<double>(tuning->floor_scale()))
                         .floor()
                         .clamp_min(0);
  const auto factors = (steps.log1p() * tuning->scale() + 1).to(device, wide);
  return (factors.dim() == 1 ? factors.unsqueeze(0) : factors).unsqueeze(1).unsqueeze(3);
}

at::Tensor longest_position(const MultiHeadAttentionOptions& options,
                            const HeadPositions& positions) {
  if (!options.rotary() ||
      !std::holds_alternative<LongRopeScaling>(options.rotary()->scaling())) {
    return {};
  }
  at::Tensor longest;
  for (const auto& tensor : {positions.query, positions.key, positions.rotated}) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    const auto largest = tensor.max();
    longest = longest.defined() ? at::maximum(longest, largest.to(longest.device())) : largest;
  }
  return longest;
}

HeadPositions head_positions(const MultiHeadAttentionOptions& options, const CallOptions& call,
                             const Tokens& tokens, const std::vector<int64_t>& first) {
  const auto &positions = call.positions(), &key_positions = call.key_positions();
  if (!has_positions(options)) {
    TORCH_CHECK(!positions.defined() && !key_positions.defined(),
                "MultiHeadAttention: positions: expected none in a module without rotary or "
                "temperature_tuning, found ",
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
  if (kind == KeyTokens::projected) return {positions, {}, range(-1, 0, first)};
  check_positions("MultiHeadAttention: key_positions", key_positions, n, tokens.key.size(1),
                  device);
  return {positions, key_positions};
}

}  // namespace mha::detail
