// Calls of the module over a cache: step by step, in chunks or at once they give what one call
// over all tokens gives. The expected numbers are formed in double from the module's parameters
// and the keys that were stored, by the oracle's loops.
//
// Tolerance: outputs are of order 1. float32 sums err by some 1e-6 of that. A stored key or
// value that lies between two half numbers may be rounded to the other one, 2^-8 (bfloat16) or
// 2^-11 (float16) of itself, and bfloat16 products round the weights too. A token lost or seen
// too early changes an output by 0.05 or more.

#include <gtest/gtest.h>
#include <mha/multi_head_attention.h>

#include <cmath>
#include <utility>
#include <vector>

#include "support/expect.h"
#include "support/options_oracle.h"
#include "support/oracle.h"
#include "support/support.h"
#include "support/torch_headers.h"
#include "support/values.h"

namespace mha::test {
namespace {

double tolerance(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 3e-2 : dtype == at::kHalf ? 4e-3 : 5e-6;
}

// Self-attention over all of x (N, T, E), with keys and values rounded to `stored`.
AttentionOutput expected_output(const MultiHeadAttention& module, const at::Tensor& x,
                                const Mask& mask, at::ScalarType stored = at::kDouble) {
  const int64_t n = x.size(0), t = x.size(1), h = module->options.num_heads();
  const auto q = oracle_heads(module->W_q, x, h);
  auto k = oracle_heads(module->W_k, x, module->num_kv_heads());
  auto v = oracle_heads(module->W_v, x, module->num_kv_heads());
  const int64_t extra = append_own_keys(module, k, v);
  const auto result =
      oracle_attention(q, k.to(stored).to(at::kDouble), v.to(stored).to(at::kDouble),
                       dense_mask(mask, n, h, t, t, extra),
                       1 / std::sqrt(static_cast<double>(module->head_dim())));
  return {oracle_linear(module->W_o, result.output.transpose(1, 2).flatten(2)), result.weights};
}

MultiHeadAttention seeded_module(const MultiHeadAttentionOptions& options) {
  torch::manual_seed(1);
  MultiHeadAttention module(options);
  module->eval();
  return module;
}

// The outputs of x in chunks of random sizes, one behind the other.
at::Tensor in_chunks(MultiHeadAttention& module, const at::Tensor& x, const KVCache& cache,
                     const Mask& mask, int64_t longest, Random& random) {
  std::vector<at::Tensor> outputs;
  for (int64_t at = 0; at < x.size(1);) {
    const int64_t count = std::min(random.between(1, longest), x.size(1) - at);
    outputs.push_back(module
                          ->attend(x.narrow(1, at, count),
                                   CallOptions(mask).weights(Weights::none).cache(cache))
                          .output);
    at += count;
  }
  return at::cat(outputs, 1);
}

TEST(CachedAttentionTest, AnyChunksGiveTheOutputsOfOneCausalCall) {
  at::NoGradGuard no_grad;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    Random random(seed);
    const int64_t heads = random.pick(std::vector<int64_t>{1, 2, 4});
    const auto kv_heads = heads / random.pick(std::vector<int64_t>{1, heads});
    const auto options = MultiHeadAttentionOptions(heads * 8, heads)
                             .num_kv_heads(kv_heads)
                             .head_dim(random.pick(std::vector<int64_t>{5, 8, 16}))
                             .bias(random.chance(0.5))
                             .add_bias_kv(random.chance(0.3))
                             .add_zero_attn(random.chance(0.3));
    auto module = seeded_module(options);
    const auto x = random.normal({random.between(1, 3), random.between(1, 50), heads * 8});
    for (const auto stored : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      const KVCache cache(KVCacheOptions().dtype(stored));
      const auto actual =
          in_chunks(module, x, cache, Mask::causal(), random.between(1, 20), random);
      ASSERT_TRUE(is_close(actual, expected_output(module, x, Mask::causal(), stored).output,
                           tolerance(stored)))
          << stored << "; seed " << seed;
    }
  }
}

TEST(CachedAttentionTest, LongCachesAreReadWhereTheyLie) {
  at::NoGradGuard no_grad;
  auto module = seeded_module(MultiHeadAttentionOptions(32, 4).num_kv_heads(2).head_dim(16));
  Random random(1);
  const auto x = random.normal({2, 700, 32});
  for (const auto stored : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const KVCache cache(KVCacheOptions().dtype(stored));
    module->attend(x.narrow(1, 0, 690), CallOptions(Mask::causal()).cache(cache));
    const auto last = in_chunks(module, x.narrow(1, 690, 10), cache, Mask::causal(), 3, random);
    const auto expected = expected_output(module, x, Mask::causal(), stored).output;
    EXPECT_TRUE(is_close(last, expected.narrow(1, 690, 10), tolerance(stored))) << stored;
  }
}

TEST(CachedAttentionTest, ModulesOfEveryDtypeStoreTheirOwn) {
  at::NoGradGuard no_grad;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    auto module = seeded_module(MultiHeadAttentionOptions(32, 4).dtype(dtype));
    Random random(2);
    const auto x = random.normal({2, 20, 32}, dtype);
    const KVCache cache;
    const auto actual = in_chunks(module, x, cache, Mask::causal(), 4, random);
    EXPECT_EQ(actual.scalar_type(), dtype);
    EXPECT_EQ(cache.key().scalar_type(), dtype);
    EXPECT_TRUE(
        is_close(actual, expected_output(module, x, Mask::causal()).output, tolerance(dtype)))
        << dtype;
  }
}

TEST(CachedAttentionTest, EveryLayoutOfTheInputsWorks) {
  at::NoGradGuard no_grad;
  auto module = seeded_module(MultiHeadAttentionOptions(16, 2));
  Random random(3);
  const auto x = random.normal({2, 6, 16});
  const auto expected = expected_output(module, x, Mask::causal()).output;
  const KVCache alone, sequence_first;
  module->options.batch_first(false);
  for (int64_t i = 0; i < 6; ++i) {
    const auto step = module->attend(x.narrow(1, i, 1).transpose(0, 1),
                                     CallOptions(Mask::causal()).cache(sequence_first));
    EXPECT_TRUE(is_close(step.output.transpose(0, 1), expected.narrow(1, i, 1), 5e-6));
    const auto unbatched =
        module->attend(x[0].narrow(0, i, 1), CallOptions(Mask::causal()).cache(alone));
    EXPECT_TRUE(is_close(unbatched.output, expected[0].narrow(0, i, 1), 5e-6));
    EXPECT_EQ(unbatched.weights.sizes(), (std::vector<int64_t>{2, 1, i + 1}));
  }
}

TEST(CachedAttentionTest, WeightsAndMapsSpeakOfTheCachedKeysAndTheNewOnes) {
  at::NoGradGuard no_grad;
  auto module = seeded_module(MultiHeadAttentionOptions(16, 2).add_zero_attn(true));
  Random random(4);
  const auto x = random.normal({2, 9, 16});
  const auto expected = expected_output(module, x, Mask::causal()).weights;
  for (const auto stored : {at::kFloat, at::kBFloat16}) {
    const KVCache cache(KVCacheOptions().dtype(stored));
    module->attend(x.narrow(1, 0, 5), CallOptions(Mask::causal()).cache(cache));
    const KVCache same = cache.clone();
    const CallOptions call = CallOptions(Mask::causal()).cache(cache);
    const auto weights = module->attend(x.narrow(1, 5, 4), call).weights;
    const auto traced = module->trace(x.narrow(1, 5, 4), {}, {}, CallOptions(call).cache(same));
    const double allowed = tolerance(stored);
    EXPECT_TRUE(is_close(weights, expected.narrow(2, 5, 4), allowed));
    EXPECT_TRUE(is_close(traced.map.dense(), expected.narrow(2, 5, 4), allowed));
    EXPECT_TRUE(is_close(traced.map.dense(), weights, 1e-6));
  }
}

TEST(CachedAttentionTest, AMapOfAStepOutlivesLaterSteps) {
  at::NoGradGuard no_grad;
  auto module = seeded_module(MultiHeadAttentionOptions(16, 2));
  Random random(5);
  const auto x = random.normal({1, 100, 16});
  const KVCache cache;
  std::vector<AttentionMap> maps;
  for (int64_t i = 0; i < 100; ++i) {
    maps.push_back(
        module->trace(x.narrow(1, i, 1), {}, {}, CallOptions(Mask::causal()).cache(cache)).map);
  }
  const auto expected = expected_output(module, x, Mask::causal()).weights;
  for (int64_t i = 0; i < 100; i += 9) {
    EXPECT_TRUE(is_close(maps[i].dense(), expected.narrow(2, i, 1).narrow(3, 0, i + 1), 1e-6));
  }
}

TEST(CachedAttentionTest, APaddedPromptIsMaskedByItsKeys) {
  at::NoGradGuard no_grad;
  auto module = seeded_module(MultiHeadAttentionOptions(16, 2));
  Random random(6);
  const auto x = random.normal({2, 8, 16});
  const auto real = torch::tensor({{0, 0, 1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1, 1, 1}});
  const KVCache cache;
  module->attend(
      x.narrow(1, 0, 5),
      CallOptions(Mask::causal() & Mask::keep_keys(real.narrow(1, 0, 5))).cache(cache));
  const auto last = module->attend(
      x.narrow(1, 5, 3), CallOptions(Mask::causal() & Mask::keep_keys(real)).cache(cache));
  const auto expected = expected_output(module, x, Mask::causal() & Mask::keep_keys(real));
  EXPECT_TRUE(is_close(last.output, expected.output.narrow(1, 5, 3), 5e-6));
}

TEST(CachedAttentionTest, AWindowGivesTheOutputsOfAWindowedCallInBoundedMemory) {
  at::NoGradGuard no_grad;
  for (const int64_t window : {1, 2, 7, 20}) {
    auto module = seeded_module(MultiHeadAttentionOptions(16, 2));
    Random random(window);
    const auto x = random.normal({2, 150, 16});
    const auto mask = Mask::causal() & Mask::window(window - 1, 0);
    const auto expected = expected_output(module, x, mask).output;
    for (const int64_t longest : {1, 5, 60}) {
      const KVCache cache(KVCacheOptions().window(window));
      const auto actual = in_chunks(module, x, cache, Mask::causal(), longest, random);
      EXPECT_TRUE(is_close(actual, expected, 5e-6)) << window << ", chunks to " << longest;
      EXPECT_LE(cache.nbytes(), 2 * (2 * 16 * 4) * 2 * window);
    }
  }
}

TEST(CachedAttentionTest, SamplesOfDifferentLengthsAreEachAsAlone) {
  at::NoGradGuard no_grad;
  for (const int64_t window : {0, 6}) {
    for (uint64_t seed = 0; seed < 6; ++seed) {
      auto module = seeded_module(
          MultiHeadAttentionOptions(16, 2).num_kv_heads(1).add_bias_kv(seed % 2 == 0));
      Random random(seed);
      const auto cache_options =
          window > 0 ? KVCacheOptions().window(window) : KVCacheOptions();
      const KVCache cache(cache_options);
      const std::vector<KVCache> alone{KVCache(cache_options), KVCache(cache_options)};
      for (int step = 0; step < 12; ++step) {
        const int64_t tokens = step == 0 ? 12 : random.between(1, 4);
        const auto x = random.normal({2, tokens, 16});
        const std::vector<int64_t> added{random.between(0, tokens), random.between(0, tokens)};
        const auto actual = module->attend(
            x, CallOptions(Mask::causal()).cache(cache).new_lengths(numbers(added)));
        EXPECT_TRUE(is_finite(actual.output));
        for (int64_t n = 0; n < 2; ++n) {
          if (added[n] == 0) continue;
          const auto expected = module->attend(x[n].narrow(0, 0, added[n]),
                                               CallOptions(Mask::causal()).cache(alone[n]));
          ASSERT_TRUE(is_close(actual.output[n].narrow(0, 0, added[n]), expected.output, 5e-6))
              << "seed " << seed << ", step " << step << ", window " << window;
        }
      }
      EXPECT_TRUE(at::equal(cache.next_positions(),
                            at::cat({alone[0].next_positions(), alone[1].next_positions()})));
    }
  }
}

TEST(CachedAttentionTest, CroppedReorderedAndLoadedCachesGoOn) {
  at::NoGradGuard no_grad;
  auto module = seeded_module(MultiHeadAttentionOptions(16, 2));
  Random random(7);
  const auto x = random.normal({1, 10, 16}), wrong = random.normal({1, 4, 16});
  const auto expected = expected_output(module, x, Mask::causal()).output;
  KVCache cache;
  module->attend(x.narrow(1, 0, 6), CallOptions(Mask::causal()).cache(cache));
  module->attend(wrong, CallOptions(Mask::causal()).cache(cache));
  cache.crop(6);
  cache.repeat(2);
  module->attend(at::cat({wrong.narrow(1, 0, 1), x.narrow(1, 6, 1)}),
                 CallOptions().cache(cache));
  cache.reorder(numbers({1, 1, 0}));
  const auto rest = x.narrow(1, 7, 3).expand({3, 3, 16});
  const auto output = module->attend(rest, CallOptions(Mask::causal()).cache(cache)).output;
  EXPECT_TRUE(is_close(output[0], expected[0].narrow(0, 7, 3), 5e-6));
  EXPECT_TRUE(is_same_result(output[1], output[0]));
  EXPECT_GT(largest_difference(output[2], output[0]), 1e-2);
}

// Speculative decoding: of four drafted tokens a sample keeps two, another all, the third none.
TEST(CachedAttentionTest, DraftsThatAreRejectedFromDifferentPlacesOnLeaveNothingBehind) {
  at::NoGradGuard no_grad;
  auto module = seeded_module(MultiHeadAttentionOptions(16, 2).rotary(RotaryOptions()));
  Random random(9);
  const auto drafts = random.normal({3, 4, 16}), next = random.normal({3, 2, 16});
  for (const auto& options : {KVCacheOptions(), KVCacheOptions().window(5)}) {
    const auto prompt = random.normal({3, 9, 16});
    const std::vector<int64_t> kept = {2, 4, 0};
    const auto call = [&](const KVCache& cache) {
      return CallOptions(Mask::causal()).cache(cache);
    };
    KVCache cache(options);
    module->attend(prompt, call(cache));
    module->attend(drafts, call(cache));
    cache.crop(numbers({11, 13, 9}));
    const auto output = module->attend(next, call(cache)).output;
    for (int64_t n = 0; n < 3; ++n) {
      KVCache alone(options);
      module->attend(prompt.narrow(0, n, 1), call(alone));
      if (kept[n] > 0)
        module->attend(drafts.narrow(0, n, 1).narrow(1, 0, kept[n]), call(alone));
      EXPECT_TRUE(is_close(output.narrow(0, n, 1),
                           module->attend(next.narrow(0, n, 1), call(alone)).output, 5e-6))
          << "sample " << n;
      EXPECT_TRUE(at::equal(cache.next_positions()[n], alone.next_positions()[0]));
    }
  }
}

TEST(CachedAttentionTest, KeysProjectedOnceGiveTheOutputsOfCallsWithKeyAndValue) {
  for (const bool extra : {false, true}) {
    auto module = seeded_module(
        MultiHeadAttentionOptions(16, 2).kdim(12).vdim(10).add_bias_kv(extra).add_zero_attn(
            extra));
    Random random(8);
    const auto query = leaf(random.normal({2, 3, 16}));
    const auto key = random.normal({2, 7, 12}), value = random.normal({2, 7, 10});
    const auto mask = Mask::lengths(numbers({7, 4}));
    const auto [memory, again] = [&] {
      at::NoGradGuard no_grad;
      const auto projected = module->project_keys(key, value);
      return std::pair{projected,
                       module->project_keys(key, value, KVCacheOptions().capacity(9))};
    }();
    const auto expected = module->forward(query, key, value, mask);
    expected.output.square().sum().backward();
    const auto grad = query.grad().clone(), grad_weight = module->W_q->weight.grad().clone();
    query.mutable_grad() = at::Tensor();
    module->zero_grad();
    const auto actual = module->attend(query, CallOptions(mask).memory(memory));
    EXPECT_TRUE(is_close(actual.output, expected.output, 1e-6));
    EXPECT_TRUE(is_close(actual.weights, expected.weights, 1e-6));
    actual.output.square().sum().backward();
    EXPECT_TRUE(is_close(query.grad(), grad, 2e-5));
    EXPECT_TRUE(is_close(module->W_q->weight.grad(), grad_weight, 2e-5));

    at::NoGradGuard no_grad;
    EXPECT_TRUE(is_close(module->attend(query, CallOptions(mask).memory(again)).output,
                         expected.output, 1e-6));
    EXPECT_TRUE(is_same_result(memory.key(), again.key()));
  }
}

TEST(CachedAttentionTest, WrongCallsAreRefusedAndLeaveTheCacheAsItWas) {
  auto module = seeded_module(MultiHeadAttentionOptions(16, 2));
  Random random(9);
  const auto x = random.normal({2, 3, 16});
  KVCache cache(KVCacheOptions().capacity(5));
  const CallOptions call = CallOptions(Mask::causal()).cache(cache);
  EXPECT_TRUE(refuses([&] { module->attend(x, call); }, {"key", "gradient", "NoGradGuard"}));
  EXPECT_EQ(cache.batch_size(), 0);
  at::NoGradGuard no_grad;
  module->attend(x, call);
  const auto held = cache.key().clone();
  const auto refused = [&](const at::Tensor& query, const CallOptions& wrong,
                           std::initializer_list<std::string> words) {
    const auto result = refuses([&] { module->attend(query, wrong); }, words);
    EXPECT_TRUE(is_bit_equal(cache.key(), held));
    return result;
  };
  EXPECT_TRUE(refused(x, call, {"capacity", "6", "5"}));
  EXPECT_TRUE(refused(x[0].unsqueeze(0), call, {"batch", "2", "1"}));
  EXPECT_TRUE(refused(x.narrow(1, 0, 2), CallOptions(Mask::keep(at::ones({2, 2}))).cache(cache),
                      {"keep", "2", "5"}));
  EXPECT_TRUE(refused(x.narrow(1, 0, 2), CallOptions(call).new_lengths(numbers({1, 3})),
                      {"new_lengths", "2", "3"}));
  EXPECT_TRUE(refused(x, CallOptions().new_lengths(numbers({1, 3})), {"new_lengths", "cache"}));
  EXPECT_TRUE(refused(x, CallOptions(call).memory(cache), {"memory", "cache"}));
  EXPECT_TRUE(refused(x, CallOptions().memory(KVCache()), {"memory", "empty"}));
  EXPECT_TRUE(refused(x[0], CallOptions().memory(cache), {"memory", "batch", "1", "2"}));
  EXPECT_TRUE(refuses([&] { module->attend(x, x, x, CallOptions().memory(cache)); },
                      {"memory", "key", "value"}));
  EXPECT_TRUE(
      refuses([&] { module->project_keys(x, x.narrow(1, 0, 2)); }, {"value", "length"}));
  auto other = seeded_module(MultiHeadAttentionOptions(16, 4));
  EXPECT_TRUE(refuses([&] { other->attend(x, call); }, {"heads", "2", "4"}));
  EXPECT_TRUE(refuses([&] { other->attend(x, CallOptions().memory(cache)); },
                      {"memory", "heads", "4"}));
  EXPECT_TRUE(is_bit_equal(cache.key(), held));
}

}  // namespace
}  // namespace mha::test
