// Guards the masks of single keys and of single queries: numbers added for a key, and padded
// queries. Against loops in float64 with every other kind of mask, against the same written as
// a mask of pairs, in maps, gradients of both orders, and by the memory that a call takes.
//
// Tolerance: results near 1 in float32, a few roundings of 6e-8; 1e-13 in float64.
#include <mha/attention_map.h>
#include <mha/mask.h>

#include <sstream>

#include "runtime/attention_path.h"
#include "support/cost.h"
#include "support/expect.h"
#include "support/oracle.h"
#include "support/thread_count.h"
#include "support/values.h"

namespace mha {
namespace {

using test::all_zero;
using test::draw_call_inputs;
using test::infinity;
using test::is_bit_equal;
using test::is_close;
using test::is_same_result;
using test::leaf;
using test::nan;
using test::picture;
using test::Random;
using test::refuses;
using test::uniform_weights;

// (N, S) with some of -inf, and those as the pairs of all queries.
at::Tensor draw_keys(int64_t seed, const test::Sizes& sizes) {
  Random random(static_cast<uint64_t>(seed));
  const auto padding = random.coins({sizes.n, sizes.s}, 0.2);
  return random.normal({sizes.n, sizes.s}, at::kDouble).masked_fill(padding, -infinity);
}

at::Tensor as_pairs(const at::Tensor& keys, const test::Sizes& sizes) {
  return keys.unsqueeze(1).unsqueeze(1).expand({sizes.n, 1, sizes.l, sizes.s});
}

// Output, weights and every gradient against loops, in both widths. `term` is the tensor of the
// mask's first term, or undefined, and gets its gradient as the sum over what it stands for.
void expect_oracle_agrees(const std::function<Mask(const at::Tensor&)>& make,
                          const at::Tensor& given, const test::Sizes& sizes, int64_t seed) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto [q, k, v] = draw_call_inputs(seed, sizes, dtype);
    const auto leaf_q = leaf(q), leaf_k = leaf(k), leaf_v = leaf(v);
    const auto term = given.is_floating_point() ? leaf(given.to(dtype)) : given;
    const auto mask = make(term);
    const auto dense = test::dense_mask(mask, sizes.n, sizes.h, sizes.l, sizes.s);
    const double scale = 1 / std::sqrt(8.0), tolerance = dtype == at::kDouble ? 1e-13 : 3e-6;
    const auto expected = test::oracle_attention(q, k, v, dense, scale);
    const auto [output, weights] = scaled_dot_product_attention(leaf_q, leaf_k, leaf_v, mask);
    EXPECT_TRUE(is_close(output, expected.output, tolerance)) << mask << ' ' << dtype;
    EXPECT_TRUE(is_close(weights, expected.weights, tolerance)) << mask << ' ' << dtype;
    const auto map = AttentionMap(q, k, mask).dense();
    EXPECT_TRUE(is_close(map, expected.weights, tolerance)) << mask << ' ' << dtype;

    const auto upstream = Random(static_cast<uint64_t>(seed)).normal(output.sizes(), dtype);
    const auto alone = scaled_dot_product_attention(leaf_q, leaf_k, leaf_v, mask,
                                                    AttentionOptions().weights(Weights::none));
    alone.output.backward(upstream);
    const auto g = test::oracle_attention_backward(q, k, v, dense, scale, upstream, {});
    EXPECT_TRUE(is_close(leaf_q.grad(), g.query, 10 * tolerance)) << mask << ' ' << dtype;
    EXPECT_TRUE(is_close(leaf_k.grad(), g.key, 10 * tolerance)) << mask << ' ' << dtype;
    EXPECT_TRUE(is_close(leaf_v.grad(), g.value, 10 * tolerance)) << mask << ' ' << dtype;
    if (!term.is_floating_point()) continue;
    const auto of_term = g.added.sum({1, 2}).sum_to_size(given.sizes());
    EXPECT_TRUE(is_close(term.grad(), of_term, 30 * tolerance)) << mask << ' ' << dtype;
  }
}

TEST(KeyMaskTest, AddKeysAddsToTheScoresOfEveryQueryAndBlocksAtMinusInfinity) {
  const auto keys = torch::tensor({{0.0, 1.0, 2.0}, {0.5, -infinity, 0.5}});
  const auto weights = uniform_weights(Mask::add_keys(keys), {2, 2, 2, 3});
  const auto row = at::softmax(torch::tensor({0.0, 1.0, 2.0}, at::kDouble), 0);
  EXPECT_TRUE(is_close(weights[0], row.expand({2, 2, 3}), 1e-15));
  EXPECT_EQ(picture(weights[1][1]), "x.x x.x");
}

TEST(KeyMaskTest, AddKeysTakesTheShapesOfKeysAndThatOfExtendedMasks) {
  const auto keys = torch::tensor({0.0, -1.0, -infinity});
  const auto one = uniform_weights(Mask::add_keys(keys), {2, 1, 1, 3});
  for (const auto& same :
       {keys.expand({2, 3}), keys.view({1, 1, 1, 3}), keys.expand({2, 1, 1, 3})}) {
    EXPECT_TRUE(is_bit_equal(uniform_weights(Mask::add_keys(same), {2, 1, 1, 3}), one));
  }
  for (const auto& wrong : {at::zeros({4}), at::zeros({1, 3}), at::zeros({3, 3}),
                            at::zeros({2, 1, 3}), at::zeros({2, 2, 1, 3}), at::zeros({})}) {
    EXPECT_TRUE(refuses([&] { uniform_weights(Mask::add_keys(wrong), {2, 1, 1, 3}); },
                        {"Mask::add_keys", "(N, S) = (2, 3)", "(N or 1, 1, 1, S)", "found"}));
  }
  EXPECT_TRUE(refuses([] { Mask::add_keys(torch::tensor({1, 0})); },
                      {"Mask::add_keys", "floating", "Long", "Mask::keep_keys"}));
}

TEST(KeyMaskTest, AddKeysAgreesWithLoopsBesideEveryOtherMask) {
  int64_t seed = 0;
  for (const auto& sizes : {test::Sizes{2, 3, 70, 90}, test::Sizes{2, 2, 2, 600}}) {
    Random random(static_cast<uint64_t>(++seed));
    const auto bias = random.normal({1, sizes.h, sizes.l, sizes.s}, at::kDouble);
    const auto flags = random.coins({sizes.n, sizes.l, sizes.s}, 0.8);
    const auto table = random.normal({sizes.h, sizes.l + sizes.s - 1}, at::kDouble);
    const auto ids = at::arange(sizes.l).div(20, "floor");
    for (const auto& other :
         {Mask(), Mask::causal(), Mask::add(bias), Mask::keep(flags), Mask::relative(table),
          Mask::documents(ids, at::arange(sizes.s).div(20, "floor")),
          Mask::lengths(torch::tensor({80, 0})), Mask::add_keys(bias[0][0][0])}) {
      const auto make = [&](const at::Tensor& t) { return Mask::add_keys(t) & other; };
      ++seed;
      expect_oracle_agrees(make, draw_keys(seed, sizes), sizes, seed);
    }
  }
}

TEST(KeyMaskTest, AddKeysForAllSamplesGetsTheGradientOfAll) {
  const test::Sizes sizes{3, 2, 60, 70};
  const auto make = [](const at::Tensor& t) { return Mask::add_keys(t); };
  expect_oracle_agrees(make, draw_keys(50, sizes)[0], sizes, 50);
}

// A key may be padding, and hold anything, in one sample only.
TEST(KeyMaskTest, WhatAddKeysBlocksNeitherShowsNorGetsAGradient) {
  auto [q, k, v] = draw_call_inputs(51, {2, 2, 5, 6}, at::kFloat);
  const auto keys = at::zeros({2, 6});
  keys[1].narrow(0, 4, 2).fill_(-infinity);
  const auto clean = scaled_dot_product_attention(q, k, v, Mask::add_keys(keys)).output;
  k[1].narrow(1, 4, 2).fill_(nan);
  v[1].narrow(1, 4, 2).fill_(infinity);
  const auto leaf_k = leaf(k), leaf_v = leaf(v), term = leaf(keys);
  const auto output =
      scaled_dot_product_attention(q, leaf_k, leaf_v, Mask::add_keys(term)).output;
  EXPECT_TRUE(is_same_result(output.detach(), clean));
  output.sum().backward();
  EXPECT_TRUE(all_zero(leaf_k.grad()[1].narrow(1, 4, 2)));
  EXPECT_TRUE(all_zero(leaf_v.grad()[1].narrow(1, 4, 2)));
  EXPECT_TRUE(test::is_finite(term.grad()));
  EXPECT_TRUE(all_zero(term.grad()[1].narrow(0, 4, 2)));
}

TEST(KeyMaskTest, GradientsOfGradientsOfAddKeysAreThoseOfTheMaskOfPairs) {
  const test::Sizes sizes{2, 2, 5, 6};
  const auto [q, k, v] = draw_call_inputs(52, sizes, at::kDouble);
  const auto keys = draw_keys(52, sizes);
  const auto second = [&](bool by_keys) {
    const auto x = leaf(q), term = leaf(keys);
    const auto mask = by_keys ? Mask::add_keys(term) : Mask::add(as_pairs(term, sizes));
    const auto output = scaled_dot_product_attention(x, k, v, mask).output;
    const auto first =
        torch::autograd::grad({output.square().sum()}, {x, term}, {}, true, true);
    return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()},
                                 {x, term});
  };
  const auto found = second(true), expected = second(false);
  EXPECT_TRUE(is_close(found[0], expected[0], 1e-12));
  EXPECT_TRUE(is_close(found[1], expected[1], 1e-12));
}

TEST(KeyMaskTest, EveryMethodOfAMapSeesAddKeysAsTheMaskOfPairs) {
  const test::Sizes sizes{2, 2, 70, 90};
  const auto [q, k, v] = draw_call_inputs(53, sizes, at::kFloat);
  const auto keys = draw_keys(53, sizes).to(at::kFloat);
  const AttentionMap map(q, k, Mask::add_keys(keys));
  const AttentionMap other(q, k, Mask::add(as_pairs(keys, sizes).contiguous()));
  const auto expect_same = [](const at::Tensor& a, const at::Tensor& b) {
    EXPECT_TRUE(is_close(a, b, 1e-5));
  };
  expect_same(map.dense(), other.dense());
  expect_same(map.head(1), other.head(1));
  expect_same(map.rows(3, 60), other.rows(3, 60));
  expect_same(map.block(1, {50, 70}, {20, 71}), other.block(1, {50, 70}, {20, 71}));
  expect_same(map.mean(5, 69), other.mean(5, 69));
  expect_same(map.entropy(), other.entropy());
  expect_same(map.received(), other.received());
  expect_same(map.distance(), other.distance());
  expect_same(map.top_k(4).values, other.top_k(4).values);
  expect_same(map.pooled(7, 9), other.pooled(7, 9));
  expect_same(map.log_sum_exp(), other.log_sum_exp());
  expect_same(map.scores(ScoreStage::masked, 2, 9), other.scores(ScoreStage::masked, 2, 9));
  const auto term = leaf(keys), pairs = leaf(as_pairs(keys, sizes).contiguous());
  AttentionMap(q, k, Mask::add_keys(term)).entropy().sum().backward();
  AttentionMap(q, k, Mask::add(pairs)).entropy().sum().backward();
  expect_same(term.grad(), pairs.grad().sum({1, 2}));
}

TEST(KeyMaskTest, APaddedQueryAttendsToNothing) {
  const auto weights =
      uniform_weights(Mask::real_queries(torch::tensor({{1, 1, 0}, {0, 1, 1}})), {2, 2, 3, 2});
  EXPECT_EQ(picture(weights[0][1]), "xx xx ..");
  EXPECT_EQ(picture(weights[1][0]), ".. xx xx");
  const auto all =
      uniform_weights(Mask::real_queries(torch::tensor({true, false})), {2, 1, 2, 2});
  for (int64_t n = 0; n < 2; ++n) EXPECT_EQ(picture(all[n][0]), "xx ..");
  const auto lengths =
      uniform_weights(Mask::query_lengths(torch::tensor({0, 3, 1})), {3, 1, 3, 1});
  EXPECT_EQ(picture(lengths[0][0]), ". . .");
  EXPECT_EQ(picture(lengths[1][0]), "x x x");
  EXPECT_EQ(picture(lengths[2][0]), "x . .");
}

TEST(KeyMaskTest, RealQueriesTakesFlagsAndQueryLengthsIntegersOfEveryDtype) {
  for (const auto dtype : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong,
                           at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    const auto flags = torch::tensor({1, 0, 1}).to(dtype);
    EXPECT_EQ(test::visible(Mask::real_queries(flags), {1, 1, 3, 1}), "x . x") << dtype;
  }
  for (const auto dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
    const auto lengths = torch::tensor({2}).to(dtype);
    EXPECT_EQ(test::visible(Mask::query_lengths(lengths), {1, 1, 3, 1}), "x x .") << dtype;
  }
}

TEST(KeyMaskTest, PaddedQueriesAgreeWithLoopsBesideEveryOtherMask) {
  int64_t seed = 100;
  for (const auto& sizes : {test::Sizes{2, 3, 120, 90}, test::Sizes{2, 2, 2, 600}}) {
    Random random(static_cast<uint64_t>(++seed));
    const auto flags = random.coins({sizes.n, sizes.l}, 0.6);
    const auto pairs = random.coins({sizes.n, sizes.l, sizes.s}, 0.8);
    const auto ids = at::arange(sizes.l).div(20, "floor");
    for (const auto& other :
         {Mask(), Mask::causal(), Mask::keep(pairs), Mask::window(20, 3),
          Mask::documents(ids, at::arange(sizes.s).div(20, "floor")),
          Mask::lengths(torch::tensor({80, 0})), Mask::real_queries(flags[0])}) {
      const auto make = [&](const at::Tensor& t) { return Mask::real_queries(t) & other; };
      expect_oracle_agrees(make, flags, sizes, ++seed);
      const auto by_length = [&](const at::Tensor& t) {
        return Mask::query_lengths(t) & other;
      };
      expect_oracle_agrees(by_length, torch::tensor({sizes.l / 2, sizes.l}), sizes, ++seed);
    }
  }
}

TEST(KeyMaskTest, WhatAPaddedQueryHoldsNeitherShowsNorGetsAGradient) {
  auto [q, k, v] = draw_call_inputs(54, {2, 2, 40, 50}, at::kFloat);
  const auto mask = Mask::query_lengths(torch::tensor({25, 40}));
  const auto clean = scaled_dot_product_attention(q, k, v, mask);
  q[0].narrow(1, 25, 15).fill_(nan);
  const auto leaf_q = leaf(q), leaf_k = leaf(k), leaf_v = leaf(v);
  const auto [output, weights] = scaled_dot_product_attention(leaf_q, leaf_k, leaf_v, mask);
  EXPECT_TRUE(is_same_result(output.detach(), clean.output));
  EXPECT_TRUE(is_same_result(weights.detach(), clean.weights));
  EXPECT_TRUE(all_zero(output[0].narrow(1, 25, 15)));
  output.sum().backward();
  for (const auto& t : {leaf_q, leaf_k, leaf_v}) EXPECT_TRUE(test::is_finite(t.grad()));
  EXPECT_TRUE(all_zero(leaf_q.grad()[0].narrow(1, 25, 15)));
}

TEST(KeyMaskTest, EveryMethodOfAMapLeavesAPaddedQueryEmpty) {
  const auto [q, k, v] = draw_call_inputs(55, {1, 2, 6, 7}, at::kFloat);
  const AttentionMap map(q, k, Mask::query_lengths(torch::tensor({4})));
  EXPECT_TRUE(all_zero(map.dense().narrow(2, 4, 2)));
  EXPECT_TRUE(all_zero(map.entropy().narrow(2, 4, 2)));
  EXPECT_TRUE(all_zero(map.mean().narrow(1, 4, 2)));
  EXPECT_TRUE(is_close(map.received().sum(-1), at::full({1, 2}, 4.0), 1e-5));
  EXPECT_TRUE(map.top_k(3).keys.narrow(2, 4, 2).eq(-1).all().item<bool>());
  EXPECT_TRUE(map.log_sum_exp().narrow(2, 4, 2).eq(-infinity).all().item<bool>());
  EXPECT_TRUE(map.scores(ScoreStage::masked).narrow(2, 4, 2).eq(-infinity).all().item<bool>());
  const AttentionMap alone(q.narrow(2, 0, 4), k, Mask());
  EXPECT_TRUE(is_close(map.rows(0, 4), alone.dense(), 1e-6));
}

TEST(KeyMaskTest, FlagsAndLengthsOfQueriesOfAnotherShapeAreRefused) {
  const auto refused = [](const Mask& mask, std::initializer_list<std::string> words) {
    return refuses([&] { uniform_weights(mask, {2, 3, 4, 5}); }, words);
  };
  EXPECT_TRUE(
      refused(Mask::real_queries(at::ones({5})), {"Mask::real_queries", "L", "4", "5"}));
  EXPECT_TRUE(refused(Mask::real_queries(at::ones({3, 4})), {"Mask::real_queries", "2", "3"}));
  EXPECT_TRUE(
      refused(Mask::query_lengths(torch::tensor({1})), {"Mask::query_lengths", "2", "[1]"}));
  EXPECT_TRUE(refused(Mask::query_lengths(torch::tensor({1, 5})),
                      {"Mask::query_lengths", "lengths from 0 to L = 4", "5"}));
  EXPECT_TRUE(
      refused(Mask::query_lengths(torch::tensor({-1, 2})), {"Mask::query_lengths", "-1"}));
  EXPECT_TRUE(refuses([] { Mask::query_lengths(at::ones({2})); },
                      {"Mask::query_lengths", "integer", "Float"}));
}

TEST(KeyMaskTest, AMaskOfKeysAndQueriesDescribesItself) {
  std::ostringstream text;
  text << (Mask::add_keys(at::zeros({2, 7})) & Mask::real_queries(at::ones({5}, at::kBool)) &
           Mask::query_lengths(torch::tensor({1, 2})));
  EXPECT_EQ(text.str(),
            "add_keys(Float [2, 7]) & real_queries(Bool [5]) & query_lengths(Long [2])");
}

// A mask of these pairs would be 64 MiB of float32, and 16 MiB of flags.
TEST(KeyMaskTest, MasksOfKeysAndQueriesTakeNoMemoryForPairs) {
  if (detail::kernels_are_off()) GTEST_SKIP() << "MHA_PATH=plain: it holds maps";
  test::check_that_memory_is_measured();
  const auto [q, k, v] = draw_call_inputs(56, {1, 1, 4096, 4096}, at::kFloat);
  const auto x = leaf(q), term = leaf(at::zeros({1, 4096}).narrow_copy(1, 0, 4096));
  const auto options = AttentionOptions().weights(Weights::none);
  const test::ThreadCount threads(2);  // each has scratch of its own
  for (const auto& mask : {Mask::add_keys(term), Mask::query_lengths(torch::tensor({3000})),
                           Mask::real_queries(at::ones({4096}))}) {
    const auto cost = test::cost_of([&, k = k, v = v] {
      scaled_dot_product_attention(x, k, v, mask, options).output.sum().backward();
    });
    EXPECT_LT(cost.memory, 8 << 20) << mask;
  }
}

}  // namespace
}  // namespace mha
