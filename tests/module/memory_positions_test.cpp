// Guards that each sample of a memory stands at its own positions: queries are placed by the
// sample's own last key, for masks, tables, the distance of a map and rotary positions, and in
// a cache that has dropped tokens by the place of these in the whole text. Expected is each
// sample alone, over a memory of its own tokens.
//
// Tolerance: float32 sums of numbers of order 1, in another order, 5e-6. A place that is off by
// one moves an output by 0.01 or more.
#include <mha/multi_head_attention.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "support/expect.h"
#include "support/support.h"
#include "support/values.h"

namespace mha::test {
namespace {

constexpr int64_t E = 32, H = 4;

MultiHeadAttention placed_layer(bool rotary, at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(81);
  auto options = MultiHeadAttentionOptions(E, H).num_kv_heads(2).head_dim(16).dtype(dtype);
  if (rotary) options.rotary(RotaryOptions());
  MultiHeadAttention module(options);
  module->eval();
  return module;
}

// A mask for any numbers of queries and keys.
struct PlacedMask {
  const char* name;
  std::function<Mask(int64_t queries, int64_t keys)> of;
};

std::vector<PlacedMask> placed_masks() {
  const auto by_distance = at::linspace(-3, 3, H * 121).view({H, 121}).sin();
  const auto slopes = at::linspace(0.1, 1, H);
  return {{"none", [](int64_t, int64_t) { return Mask(); }},
          {"causal", [](int64_t, int64_t) { return Mask::causal(); }},
          {"window(1, 0)", [](int64_t, int64_t) { return Mask::window(1, 0); }},
          {"window(2, 1)", [](int64_t, int64_t) { return Mask::window(2, 1); }},
          {"alibi", [=](int64_t, int64_t) { return Mask::alibi(slopes); }},
          {"a table", [=](int64_t queries, int64_t keys) {
             return Mask::causal() &
                    Mask::relative(by_distance.narrow(1, 60 - (keys - 1), queries + keys - 1));
           }}};
}

TEST(MemoryPositionsTest, EachSampleOfAMemoryStandsAtItsOwnPlaces) {
  at::NoGradGuard no_grad;
  const std::vector<int64_t> lengths{6, 3};
  for (const bool rotary : {false, true}) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      auto module = placed_layer(rotary, dtype);
      Random random(82);
      const auto tokens = random.normal({2, 6, E}, dtype);
      const KVCache memory, whole = module->project_keys(tokens);
      KVCache(memory).append(whole.key(), whole.value(), numbers(lengths));
      for (const int64_t queries : {1, 2, 4, 8, 40}) {
        const auto query = random.normal({2, queries, E}, dtype);
        for (const auto& mask : placed_masks()) {
          SCOPED_TRACE(std::string(mask.name) + (rotary ? ", rotary" : ""));
          const auto call = CallOptions(mask.of(queries, 6)).memory(memory);
          const auto actual = module->attend(query, call);
          const auto map = module->trace(query, {}, {}, call).map;
          for (int64_t n = 0; n < 2; ++n) {
            const int64_t keys = lengths[static_cast<size_t>(n)];
            const auto own = module->project_keys(tokens.narrow(0, n, 1).narrow(1, 0, keys));
            const auto alone = CallOptions(mask.of(queries, keys)).memory(own);
            const auto expected = module->attend(query.narrow(0, n, 1), alone);
            EXPECT_TRUE(is_close(actual.output[n], expected.output[0], 5e-6)) << queries;
            EXPECT_TRUE(
                is_close(actual.weights[n].narrow(2, 0, keys), expected.weights[0], 5e-6));
            const auto expected_map = module->trace(query.narrow(0, n, 1), {}, {}, alone).map;
            EXPECT_TRUE(
                is_close(map.dense()[n].narrow(2, 0, keys), expected_map.dense()[0], 5e-6));
            EXPECT_TRUE(is_close(map.distance()[n], expected_map.distance()[0], 2e-5));
          }
        }
      }
    }
  }
}

// A window cache and, of each sample, the whole text, projected at once.
struct Text {
  KVCache window;
  std::vector<KVCache> whole;
};

Text read_text(MultiHeadAttention& module, const std::vector<int64_t>& lengths,
               const KVCacheOptions& options) {
  Random random(83);
  Text text{KVCache(options), {}};
  std::vector<std::vector<at::Tensor>> tokens(lengths.size());
  std::vector<int64_t> left = lengths;
  while (*std::max_element(left.begin(), left.end()) > 0) {
    const auto batch = static_cast<int64_t>(lengths.size());
    const auto x = random.normal({batch, 3, E});
    std::vector<int64_t> added;
    for (size_t n = 0; n < left.size(); ++n) {
      added.push_back(std::min<int64_t>(left[n], 3));
      left[n] -= added[n];
      tokens[n].push_back(x[static_cast<int64_t>(n)].narrow(0, 0, added[n]));
    }
    module->attend(x,
                   CallOptions(Mask::causal()).cache(text.window).new_lengths(numbers(added)));
  }
  for (const auto& sample : tokens) {
    text.whole.push_back(module->project_keys(at::cat(sample).unsqueeze(0)));
  }
  return text;
}

TEST(MemoryPositionsTest, AWindowCacheThatHasDroppedTokensIsReadAtPlacesInTheWholeText) {
  at::NoGradGuard no_grad;
  for (const bool rotary : {false, true}) {
    auto module = placed_layer(rotary);
    for (const auto& lengths : std::vector<std::vector<int64_t>>{{40, 40}, {41, 17}, {38, 4}}) {
      const auto text = read_text(module, lengths, KVCacheOptions().window(6));
      ASSERT_FALSE(at::equal(text.window.lengths(), text.window.next_positions()));
      for (const int64_t queries : {1, 2, 3}) {
        const auto query = at::randn({2, queries, E});
        const auto mask = Mask::causal() & Mask::window(5, 0) & Mask::alibi(at::ones({H}));
        const auto actual = module->attend(query, CallOptions(mask).memory(text.window));
        for (int64_t n = 0; n < 2; ++n) {
          const auto expected =
              module->attend(query.narrow(0, n, 1),
                             CallOptions(mask).memory(text.whole[static_cast<size_t>(n)]));
          EXPECT_TRUE(is_close(actual.output[n], expected.output[0], 5e-6))
              << queries << (rotary ? " rotary" : "");
        }
      }
    }
  }
}

TEST(MemoryPositionsTest, AppendedKeysStandOutsideTheText) {
  at::NoGradGuard no_grad;
  torch::manual_seed(84);
  MultiHeadAttention module(MultiHeadAttentionOptions(E, H)
                                .rotary(RotaryOptions())
                                .add_bias_kv(true)
                                .add_zero_attn(true));
  const auto query = at::randn({2, 2, E}), key = at::randn({2, 5, E});
  const auto memory = module->project_keys(key);
  const auto actual = module->attend(query, CallOptions(Mask::causal()).memory(memory));
  const auto expected = module->forward(query, key, key, Mask::causal());
  EXPECT_TRUE(is_close(actual.output, expected.output, 5e-6));
  EXPECT_TRUE(is_close(actual.weights, expected.weights, 5e-6));
}

TEST(MemoryPositionsTest, GivenPositionsStayThoseOfTheCaller) {
  at::NoGradGuard no_grad;
  auto module = placed_layer(/*rotary=*/true);
  const auto text = read_text(module, {20, 9}, {});
  const auto query = at::randn({2, 2, E});
  const auto positions = numbers({18, 19, 7, 8}).view({2, 2});
  const auto call = CallOptions(Mask::causal()).memory(text.window);
  EXPECT_TRUE(
      is_same_result(module->attend(query, call).output,
                     module->attend(query, CallOptions(call).positions(positions)).output));
}

}  // namespace
}  // namespace mha::test
