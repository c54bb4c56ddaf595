// Guards masks of keys and of queries in calls of the module: numbers added to keys over a
// cache whose samples have different lengths and beside appended keys, padded queries beside
// appended keys, and what padding holds. Against each sample alone and against the oracle's
// loops.
//
// Tolerance: results of order 1; float32 sums err by some 1e-6 of that.
#include <mha/multi_head_attention.h>

#include <vector>

#include "support/expect.h"
#include "support/oracle.h"

namespace mha {
namespace {

using test::infinity;
using test::is_close;
using test::leaf;
using test::nan;
using test::Random;

MultiHeadAttention make(const MultiHeadAttentionOptions& options) {
  torch::manual_seed(91);
  MultiHeadAttention module(options);
  module->eval();
  return module;
}

TEST(ModuleKeyMaskTest, AddKeysOverARaggedCacheIsEachSampleAlone) {
  const at::NoGradGuard no_grad;
  auto module = make(MultiHeadAttentionOptions(24, 4).num_kv_heads(2));
  Random random(92);
  const auto prompt = random.normal({2, 6, 24}), token = random.normal({2, 2, 24});
  const std::vector<int64_t> lengths{6, 3};
  auto keys = random.normal({2, 8});
  keys[1][2] = -infinity;
  KVCache cache;
  module->attend(prompt,
                 CallOptions(Mask::causal()).cache(cache).new_lengths(torch::tensor(lengths)));
  const auto together =
      module->attend(token, CallOptions(Mask::causal() & Mask::add_keys(keys)).cache(cache));
  for (int64_t n = 0; n < 2; ++n) {
    const int64_t length = lengths[static_cast<size_t>(n)];
    KVCache own;
    module->attend(prompt.narrow(0, n, 1).narrow(1, 0, length),
                   CallOptions(Mask::causal()).cache(own));
    const auto own_keys = Mask::add_keys(keys[n].narrow(0, 0, length + 2));
    const auto alone = module->attend(token.narrow(0, n, 1),
                                      CallOptions(Mask::causal() & own_keys).cache(own));
    EXPECT_TRUE(is_close(together.output[n], alone.output[0], 2e-6)) << n;
    EXPECT_TRUE(is_close(together.weights[n].narrow(2, 0, length + 2), alone.weights[0], 1e-6))
        << n;
  }
}

// Keys that are appended are open to a padded query, as under every mask.
TEST(ModuleKeyMaskTest, KeysAndQueriesAgreeWithLoopsBesideAppendedKeys) {
  Random random(93);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    auto module = make(
        MultiHeadAttentionOptions(24, 4).add_bias_kv(true).add_zero_attn(true).dtype(dtype));
    const auto query = random.normal({2, 5, 24}, dtype), key = random.normal({2, 7, 24}, dtype);
    auto keys = random.normal({2, 7}, dtype);
    keys[0].fill_(-infinity);
    keys[1][3] = -infinity;
    for (const auto& mask :
         {Mask::add_keys(keys), Mask::query_lengths(torch::tensor({2, 5})),
          Mask::real_queries(random.coins({5}, 0.5)) & Mask::causal(),
          Mask::add_keys(keys) & Mask::query_lengths(torch::tensor({0, 3}))}) {
      const auto expected = test::oracle_module(module, query, key, key, mask);
      const double tolerance = dtype == at::kDouble ? 1e-13 : 5e-6;
      const auto [output, weights] = module->forward(query, key, key, mask);
      EXPECT_TRUE(is_close(output, expected.output, tolerance)) << mask;
      EXPECT_TRUE(is_close(weights, expected.weights, tolerance)) << mask;
      const auto traced = module->trace(query, key, key, mask);
      EXPECT_TRUE(is_close(traced.map.dense(), expected.weights, tolerance)) << mask;
      const auto term = leaf(keys), pairs = leaf(keys);
      const auto by_pairs = Mask::add(pairs.view({2, 1, 1, 7}).expand({2, 1, 5, 7}));
      module->forward(query, key, key, Mask::add_keys(term)).output.square().sum().backward();
      module->forward(query, key, key, by_pairs).output.square().sum().backward();
      EXPECT_TRUE(is_close(term.grad(), pairs.grad(), 10 * tolerance)) << mask;
    }
  }
}

TEST(ModuleKeyMaskTest, APaddedQueryGivesTheOutputsBias) {
  auto module = make(MultiHeadAttentionOptions(24, 4));
  const auto x = Random(94).normal({2, 5, 24});
  const auto [output, weights] =
      module->forward(x, {}, {}, Mask::query_lengths(torch::tensor({3, 5})));
  const auto bias = module->W_o->bias.expand({2, 24});
  EXPECT_TRUE(is_close(output[0].narrow(0, 3, 2), bias, 0));
  EXPECT_TRUE(test::all_zero(weights[0].narrow(1, 3, 2)));
}

TEST(ModuleKeyMaskTest, PaddedTokensMayHoldNan) {
  auto module = make(MultiHeadAttentionOptions(24, 4).qk_norm(QKNorm::rms));
  const auto lengths = torch::tensor({3, 5});
  const auto mask = Mask::query_lengths(lengths) & Mask::lengths(lengths);
  auto x = Random(95).normal({2, 5, 24});
  x[0].narrow(0, 3, 2).fill_(0);
  const auto clean = module->forward(x, {}, {}, mask).output;
  x[0].narrow(0, 3, 2).fill_(nan);
  const auto output = module->forward(x, {}, {}, mask).output;
  EXPECT_TRUE(test::is_same_result(output.detach(), clean.detach()));
  output.sum().backward();
  for (const auto& parameter : module->named_parameters()) {
    EXPECT_TRUE(test::is_finite(parameter.value().grad())) << parameter.key();
  }
}

TEST(ModuleKeyMaskTest, AnEmptyBatchTakesDocumentsOfTwoShapes) {
  auto module = make(MultiHeadAttentionOptions(24, 4));
  const auto ids = [](at::IntArrayRef sizes) { return at::zeros(sizes, at::kLong); };
  const auto x = at::zeros({0, 5, 24});
  const auto mask = Mask::documents(ids({5})) & Mask::documents(ids({0, 5}), ids({5}));
  EXPECT_EQ(module->forward(x, {}, {}, mask).output.sizes(), at::IntArrayRef({0, 5, 24}));
  EXPECT_EQ(module->trace(x, {}, {}, mask).map.dense().sizes(), at::IntArrayRef({0, 4, 5, 5}));
}

}  // namespace
}  // namespace mha
