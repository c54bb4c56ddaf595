// Guards what the module's calls read of a cache. Of a memory of different lengths
// (`CallOptions::memory`) no token behind a sample's end, not even what lay there before a
// reset: expected is each sample alone, over a memory of its own tokens. Of a half cache the
// numbers as they are stored, with nothing else rounded to half: expected is a formula in
// double. Tolerance: float32 sums of numbers of order 1, in another order, 5e-6; one forgotten
// token moves an output by 0.05 or more, a rounded query by 1e-4.

#include <gtest/gtest.h>
#include <mha/multi_head_attention.h>

#include <limits>
#include <vector>

#include "support/expect.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

// Keys and values of `tokens` (N, S, E), with the first lengths[n] of sample n, over memory
// that other tokens had before.
KVCache ragged_memory(MultiHeadAttention& module, const at::Tensor& tokens,
                      const std::vector<int64_t>& lengths, const at::Tensor& forgotten,
                      const KVCacheOptions& options = {}) {
  at::NoGradGuard no_grad;
  KVCache memory(options);
  const KVCache old = module->project_keys(forgotten), held = module->project_keys(tokens);
  memory.append(old.key(), old.value());
  memory.reset();
  memory.append(held.key(), held.value(), at::tensor(lengths, at::kLong));
  return memory;
}

MultiHeadAttention seeded_layer(const MultiHeadAttentionOptions& options) {
  torch::manual_seed(3);
  MultiHeadAttention module(options);
  module->eval();
  return module;
}

struct Lengths {
  int64_t queries;
  std::vector<int64_t> keys;
};

TEST(CacheReadingTest, EachSampleAttendsToItsOwnTokensAlone) {
  for (const auto& rotary : {std::optional<RotaryOptions>(), std::optional(RotaryOptions())}) {
    auto module = seeded_layer(
        MultiHeadAttentionOptions(32, 4).num_kv_heads(2).head_dim(16).rotary(rotary));
    // Few queries over many keys are read in chunks, many queries in tiles.
    for (const auto& [queries, lengths] :
         {Lengths{3, {4, 1}}, {1, {700, 513}}, {40, {33, 90}}, {2, {5, 0}}}) {
      const int64_t longest = std::max(lengths[0], lengths[1]);
      Random random(4);
      const auto query = random.normal({2, queries, 32});
      const auto tokens = random.normal({2, longest, 32});
      auto forgotten = random.normal({2, longest + 2, 32}) * 5;
      forgotten[1][longest].fill_(std::numeric_limits<float>::quiet_NaN());
      const auto memory = ragged_memory(module, tokens, lengths, forgotten);
      const auto positions = at::arange(queries) + 10;
      const auto call = [&](const KVCache& cache) {
        CallOptions options = CallOptions().memory(cache);
        if (rotary) options.positions(positions);
        return options;
      };
      const auto actual = module->attend(query, call(memory));
      for (int64_t n = 0; n < 2; ++n) {
        const int64_t length = lengths[static_cast<size_t>(n)];
        at::NoGradGuard no_grad;
        const auto own = module->project_keys(tokens.narrow(0, n, 1).narrow(1, 0, length));
        const auto expected = module->attend(query.narrow(0, n, 1), call(own));
        EXPECT_TRUE(is_close(actual.output[n], expected.output[0], 5e-6)) << length;
        EXPECT_TRUE(
            is_close(actual.weights[n].narrow(2, 0, length), expected.weights[0], 5e-6));
        EXPECT_TRUE(is_close(actual.weights[n].narrow(2, length, longest - length),
                             at::zeros({4, queries, longest - length}), 0));
      }
      at::NoGradGuard no_grad;
      const auto none = module->attend(query, call(memory).weights(Weights::none));
      EXPECT_TRUE(is_close(none.output, actual.output, 5e-6));
      const auto traced = module->trace(query, {}, {}, call(memory));
      EXPECT_TRUE(is_close(traced.map.dense(), actual.weights, 5e-6));
    }
  }
}

TEST(CacheReadingTest, TheCallersMaskHoldsBesideTheLengths) {
  auto module = seeded_layer(MultiHeadAttentionOptions(32, 4));
  Random random(5);
  const auto query = random.normal({2, 3, 32}), tokens = random.normal({2, 6, 32});
  const auto memory = ragged_memory(module, tokens, {6, 3}, random.normal({2, 9, 32}));
  const auto mask = Mask::block_keys(torch::tensor({0, 1, 0, 0, 0, 0}).to(at::kBool)) &
                    Mask::add(random.normal({3, 6}));
  at::NoGradGuard no_grad;
  const auto actual = module->attend(query, CallOptions(mask).memory(memory));
  const auto expected = module->forward(query, tokens, tokens,
                                        mask & Mask::lengths(at::tensor({6, 3}, at::kLong)));
  EXPECT_TRUE(is_close(actual.output, expected.output, 5e-6));
  EXPECT_TRUE(is_close(actual.weights, expected.weights, 5e-6));
}

TEST(CacheReadingTest, AppendedKeysNeedSamplesOfOneLength) {
  auto module = seeded_layer(MultiHeadAttentionOptions(32, 4).add_bias_kv(true));
  Random random(6);
  const auto query = random.normal({2, 3, 32}), tokens = random.normal({2, 6, 32});
  const auto memory = ragged_memory(module, tokens, {6, 3}, tokens);
  EXPECT_TRUE(refuses([&] { module->attend(query, CallOptions().memory(memory)); },
                      {"memory", "one length", "add_bias_kv", "[6, 3]"}));
}

TEST(CacheReadingTest, AFloat32ModuleLosesNothingBesideWhatAHalfCacheRounded) {
  at::NoGradGuard no_grad;
  auto module =
      seeded_layer(MultiHeadAttentionOptions(128, 4).num_kv_heads(2).head_dim(64).bias(false));
  Random random(7);
  const auto tokens = random.normal({2, 600, 128});
  for (const auto stored : {at::kBFloat16, at::kHalf}) {
    const KVCache cache(KVCacheOptions().dtype(stored));
    module->attend(tokens, CallOptions(Mask::causal()).cache(cache));
    for (const int64_t count : {1, 3, 40}) {  // in chunks of keys, and in tiles of queries
      const auto query = 2 * random.normal({2, count, 128});
      const auto in_double = [](const at::Tensor& t) { return t.to(at::kDouble); };
      const auto q = in_double(query).matmul(in_double(module->W_q->weight).t());
      const auto shared = [&](const at::Tensor& t) {
        return in_double(t).repeat_interleave(2, 1);
      };
      const auto scores = q.unflatten(2, {4, 64})
                              .transpose(1, 2)
                              .matmul(shared(cache.key()).transpose(2, 3) / 8);
      const auto weights = scores.softmax(3);
      const auto output = weights.matmul(shared(cache.value())).transpose(1, 2).flatten(2);
      const auto expected = output.matmul(in_double(module->W_o->weight).t());

      const auto call = CallOptions().memory(cache);
      const auto actual = module->attend(query, call);
      EXPECT_TRUE(is_close(actual.output, expected, 5e-6)) << stored << ", " << count;
      EXPECT_TRUE(is_close(actual.weights, weights, 5e-6)) << stored << ", " << count;
      const auto alone = module->attend(query, CallOptions(call).weights(Weights::none));
      EXPECT_TRUE(is_close(alone.output, expected, 5e-6)) << stored << ", " << count;
      const auto traced = module->trace(query, {}, {}, call);
      EXPECT_TRUE(is_close(traced.map.dense(), weights, 5e-6)) << stored << ", " << count;
    }
  }
}

}  // namespace
}  // namespace mha::test
