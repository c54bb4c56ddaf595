// Guards the masks that speak of positions and never become an L x S tensor: bands with offsets
// of each sample's own, documents, and terms by distance. Every mask is compared with plain
// loops in float64; the kernels are compared with the plain path on every instruction set in
// fused_attention_test.cpp.
//
// Tolerance: results near 1 in float32, a few roundings of 6e-8; 1e-13 in float64.
#include <mha/mask.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "support/expect.h"
#include "support/oracle.h"
#include "support/values.h"

namespace mha {
namespace {

using test::all_zero;
using test::draw_call_inputs;
using test::is_close;
using test::is_same_result;
using test::leaf;
using test::picture;
using test::Random;
using test::refuses;
using test::uniform_weights;
using test::visible;

// Output and weights against loops, in both widths.
void expect_oracle_agrees(const Mask& mask, const test::Sizes& sizes, int64_t seed) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto [q, k, v] = draw_call_inputs(seed, sizes, dtype);
    const auto expected = test::oracle_attention(q, k, v, mask);
    const double tolerance = dtype == at::kDouble ? 1e-13 : 3e-6;
    const auto mapped = scaled_dot_product_attention(q, k, v, mask);
    EXPECT_TRUE(is_close(mapped.output, expected.output, tolerance)) << mask << ' ' << dtype;
    EXPECT_TRUE(is_close(mapped.weights, expected.weights, tolerance)) << mask << ' ' << dtype;
    const auto alone =
        scaled_dot_product_attention(q, k, v, mask, AttentionOptions().weights(Weights::none));
    EXPECT_TRUE(is_close(alone.output, expected.output, tolerance)) << mask << ' ' << dtype;
  }
}

TEST(PositionMaskTest, AnOffsetPlacesTheFirstQueryOfItsSample) {
  const auto offsets = torch::tensor({0, 2, -1, 7});
  const auto causal = uniform_weights(Mask::causal(offsets), {4, 1, 2, 4});
  EXPECT_EQ(picture(causal[0][0]), "x... xx..");
  EXPECT_EQ(picture(causal[1][0]), "xxx. xxxx");
  EXPECT_EQ(picture(causal[2][0]), ".... x...");
  EXPECT_EQ(picture(causal[3][0]), "xxxx xxxx");
  const auto window = uniform_weights(Mask::window(1, 0, offsets), {4, 1, 2, 4});
  EXPECT_EQ(picture(window[0][0]), "x... xx..");
  EXPECT_EQ(picture(window[1][0]), ".xx. ..xx");
  EXPECT_EQ(picture(window[2][0]), ".... x...");
  EXPECT_EQ(picture(window[3][0]), ".... ....");
}

TEST(PositionMaskTest, AnOffsetOfAnyIntegerDtypeAndSizeIsTaken) {
  constexpr int64_t most = std::numeric_limits<int64_t>::max();
  const auto extreme = uniform_weights(Mask::causal(torch::tensor({-most - 1, most})) &
                                           Mask::window(most, most, torch::tensor({0, 0})),
                                       {2, 1, 2, 3});
  EXPECT_EQ(picture(extreme[0][0]), "... ...");
  EXPECT_EQ(picture(extreme[1][0]), "xxx xxx");
  for (const auto dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
    const auto one = uniform_weights(Mask::causal(at::ones({1}, dtype)), {1, 1, 2, 4});
    EXPECT_EQ(picture(one[0][0]), "xx.. xxx.") << dtype;
  }
}

TEST(PositionMaskTest, OffsetsThatAlignTheLastQueryAreTheAlignmentItself) {
  const test::Sizes sizes{2, 2, 60, 200};
  const auto [q, k, v] = draw_call_inputs(1, sizes, at::kFloat);
  const auto offsets = at::full({2}, 140, at::kLong);
  const auto attend = [q = q, k = k, v = v](const Mask& mask) {
    return scaled_dot_product_attention(q, k, v, mask).output;
  };
  EXPECT_TRUE(is_same_result(attend(Mask::causal(offsets)), attend(Mask::causal())));
  EXPECT_TRUE(
      is_same_result(attend(Mask::window(30, 5, offsets)), attend(Mask::window(30, 5))));
}

// What a cache of ragged lengths needs: each sample as if it were alone.
TEST(PositionMaskTest, ASampleOfARaggedBatchIsAsAlone) {
  for (const int64_t queries : {int64_t{1}, int64_t{5}, int64_t{70}}) {
    const test::Sizes sizes{3, 2, queries, 600};
    const auto [q, k, v] = draw_call_inputs(queries, sizes, at::kFloat);
    const auto lengths = torch::tensor({int64_t{600}, queries, int64_t{300}});
    const auto together =
        scaled_dot_product_attention(q, k, v, Mask::causal(lengths - queries)).output;
    for (int64_t n = 0; n < 3; ++n) {
      const auto length = lengths[n].item<int64_t>();
      const auto alone = scaled_dot_product_attention(
          q.narrow(0, n, 1), k.narrow(0, n, 1).narrow(2, 0, length),
          v.narrow(0, n, 1).narrow(2, 0, length), Mask::causal());
      EXPECT_TRUE(is_close(together.narrow(0, n, 1), alone.output, 1e-6))
          << queries << " queries, sample " << n;
    }
  }
}

TEST(PositionMaskTest, OffsetsAgreeWithLoops) {
  const auto offsets = torch::tensor({90, -3, 400});
  for (const auto& sizes : {test::Sizes{3, 2, 50, 130}, test::Sizes{3, 2, 2, 700}}) {
    expect_oracle_agrees(Mask::causal(offsets), sizes, 2);
    expect_oracle_agrees(Mask::window(20, 10, offsets), sizes, 3);
    expect_oracle_agrees(Mask::causal(offsets) & Mask::window(-1, 3), sizes, 4);
    expect_oracle_agrees(Mask::window(-1, 0, offsets) & Mask::window(15, -1, offsets - 4),
                         sizes, 5);
  }
}

TEST(PositionMaskTest, WhatAnOffsetBlocksNeitherShowsNorGetsAGradient) {
  const auto mask = Mask::causal(torch::tensor({0, -2}));
  auto [q, k, v] = draw_call_inputs(6, {2, 1, 2, 3}, at::kFloat);
  const auto clean = scaled_dot_product_attention(q, k, v, mask).output;
  k.select(2, 2).fill_(std::numeric_limits<float>::quiet_NaN());
  v.select(2, 2).fill_(std::numeric_limits<float>::infinity());
  q[1].fill_(std::numeric_limits<float>::quiet_NaN());
  const std::vector<at::Tensor> leaves{leaf(q), leaf(k), leaf(v)};
  const auto output =
      scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], mask).output;
  EXPECT_TRUE(is_same_result(output, clean));
  EXPECT_TRUE(all_zero(output[1]));
  output.sum().backward();
  for (const auto& t : leaves) EXPECT_TRUE(test::is_finite(t.grad()));
  EXPECT_TRUE(all_zero(leaves[0].grad()[1]));
  EXPECT_TRUE(all_zero(leaves[1].grad().select(2, 2)));
}

TEST(PositionMaskTest, OffsetsOfAnotherShapeOrDtypeAreRefused) {
  EXPECT_TRUE(refuses([] { Mask::causal(at::zeros({2})); },
                      {"Mask::causal", "offsets", "integer", "Float"}));
  EXPECT_TRUE(refuses([] { Mask::window(1, 1, at::zeros({2}, at::kBool)); },
                      {"Mask::window", "offsets", "integer", "Bool"}));
  EXPECT_TRUE(refuses([] { Mask::causal(at::Tensor()); }, {"Mask::causal", "undefined"}));
  EXPECT_TRUE(refuses([] { Mask::window(-2, 0, torch::tensor({0})); }, {"Mask::window", "-2"}));
  EXPECT_TRUE(
      refuses([] { uniform_weights(Mask::causal(torch::tensor({1, 2, 3})), {2, 1, 2, 2}); },
              {"Mask::causal", "offsets", "N", "2", "3"}));
}

TEST(PositionMaskTest, AQuerySeesTheKeysOfItsDocument) {
  EXPECT_EQ(visible(Mask::documents(torch::tensor({3, 3, -1, 3})), {1, 1, 4, 4}),
            "xx.x xx.x ..x. xx.x");
  const auto each = uniform_weights(
      Mask::documents(torch::tensor({5, 5, 6, 6, 5, 5}).view({2, 3})), {2, 1, 3, 3});
  EXPECT_EQ(picture(each[0][0]), "xx. xx. ..x");
  EXPECT_EQ(picture(each[1][0]), "x.. .xx .xx");
  EXPECT_EQ(
      visible(Mask::documents(torch::tensor({1, 9}), torch::tensor({0, 1, 1})), {1, 1, 2, 3}),
      ".xx ...");
  EXPECT_EQ(visible(Mask::documents_from_lengths(torch::tensor({0, 2, 2, 3})), {1, 1, 3, 3}),
            "xx. xx. ..x");
}

TEST(PositionMaskTest, DocumentsAgreeWithLoops) {
  for (const auto& sizes : {test::Sizes{2, 2, 150, 150}, test::Sizes{2, 1, 3, 700}}) {
    const auto queries = at::arange(sizes.l) / 40, keys = at::arange(sizes.s) / 40;
    const auto of_queries = queries.to(at::kLong), of_keys = keys.to(at::kLong);
    const auto mixed = at::arange(sizes.n * sizes.s).view({sizes.n, sizes.s}) % 3;
    expect_oracle_agrees(Mask::documents(of_queries, of_keys), sizes, 7);
    expect_oracle_agrees(Mask::documents(of_queries, of_keys) & Mask::causal(), sizes, 8);
    expect_oracle_agrees(Mask::documents(of_queries, mixed), sizes, 9);
    expect_oracle_agrees(Mask::documents(of_queries, of_keys) &
                             Mask::documents(of_queries % 2, mixed.narrow(0, 0, 1)[0]),
                         sizes, 10);
  }
  expect_oracle_agrees(
      Mask::documents_from_lengths(torch::tensor({0, 1, 50, 50, 99, 130})) & Mask::causal(),
      {1, 2, 130, 130}, 11);
}

// Packed sequences give what each gives alone.
TEST(PositionMaskTest, APackedDocumentIsAsAlone) {
  const auto [q, k, v] = draw_call_inputs(12, {1, 2, 300, 300}, at::kFloat);
  const auto ends = torch::tensor({0, 7, 107, 300});
  const auto packed = scaled_dot_product_attention(
      q, k, v, Mask::documents_from_lengths(ends) & Mask::causal());
  for (int64_t d = 0; d < 3; ++d) {
    const auto begin = ends[d].item<int64_t>(), count = ends[d + 1].item<int64_t>() - begin;
    const auto alone =
        scaled_dot_product_attention(q.narrow(2, begin, count), k.narrow(2, begin, count),
                                     v.narrow(2, begin, count), Mask::causal());
    EXPECT_TRUE(is_close(packed.output.narrow(2, begin, count), alone.output, 2e-6)) << d;
  }
}

TEST(PositionMaskTest, WhatLiesInAnotherDocumentNeitherShowsNorGetsAGradient) {
  const auto mask = Mask::documents(torch::tensor({0, 0, 1}), torch::tensor({0, 0, 2}));
  auto [q, k, v] = draw_call_inputs(13, {1, 1, 3, 3}, at::kFloat);
  const auto clean = scaled_dot_product_attention(q, k, v, mask).output;
  k.select(2, 2).fill_(std::numeric_limits<float>::quiet_NaN());
  v.select(2, 2).fill_(std::numeric_limits<float>::infinity());
  q.select(2, 2).fill_(std::numeric_limits<float>::quiet_NaN());
  const std::vector<at::Tensor> leaves{leaf(q), leaf(k), leaf(v)};
  const auto output =
      scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], mask).output;
  EXPECT_TRUE(is_same_result(output, clean));
  EXPECT_TRUE(all_zero(output.select(2, 2)));
  output.sum().backward();
  for (const auto& t : leaves) {
    EXPECT_TRUE(test::is_finite(t.grad()));
    EXPECT_TRUE(all_zero(t.grad().select(2, 2)));
  }
}

TEST(PositionMaskTest, ATableIsReadByTheDistanceFromQueryToKey) {
  const auto table = torch::tensor({-2.0, -1.0, 0.0, 1.0}, at::kDouble).view({1, 4});
  const auto weights = uniform_weights(Mask::relative(table), {1, 1, 2, 3})[0][0];
  const auto scores =
      torch::tensor({-1.0, 0.0, 1.0, -2.0, -1.0, 0.0}, at::kDouble).view({2, 3});
  EXPECT_TRUE(is_close(weights, scores.softmax(-1), 1e-15));
}

TEST(PositionMaskTest, TermsByDistanceAgreeWithLoops) {
  Random random(14);
  const auto offsets = torch::tensor({4, -2});
  for (const auto& sizes : {test::Sizes{2, 3, 60, 130}, test::Sizes{2, 3, 2, 600}}) {
    const auto table = random.normal({3, sizes.l + sizes.s - 1}, at::kDouble);
    const auto slopes = alibi_slopes(3);
    expect_oracle_agrees(Mask::relative(table), sizes, 15);
    expect_oracle_agrees(Mask::relative(table[0].unsqueeze(0)) & Mask::window(30, 30), sizes,
                         16);
    expect_oracle_agrees(Mask::relative(table) & Mask::add(random.normal({sizes.l, sizes.s})),
                         sizes, 17);
    expect_oracle_agrees(Mask::alibi(slopes) & Mask::causal(), sizes, 18);
    expect_oracle_agrees(Mask::alibi(slopes, Mask::Alignment::top_left), sizes, 19);
    expect_oracle_agrees(Mask::alibi(slopes, offsets) & Mask::causal(offsets), sizes, 20);
  }
}

// 700 queries are several chunks of tiles whose sums are formed side by side.
TEST(PositionMaskTest, AGradientFlowsIntoATableAndIntoSlopes) {
  for (const auto& sizes : {test::Sizes{2, 2, 5, 9}, test::Sizes{2, 2, 700, 40}}) {
    Random random(21);
    const auto [q, k, v] = draw_call_inputs(22, sizes, at::kFloat);
    const auto grad = random.normal(q.sizes());
    const auto table = random.normal({2, sizes.l + sizes.s - 1});
    const auto shared = random.normal({1, sizes.l + sizes.s - 1});
    const auto slopes = at::rand({2}) * 0.1;
    const auto gradients = [&, q = q, k = k, v = v](at::ScalarType dtype) {
      const std::vector<at::Tensor> leaves{leaf(table.to(dtype)), leaf(shared.to(dtype)),
                                           leaf(slopes.to(dtype))};
      const auto mask = Mask::relative(leaves[0]) & Mask::relative(leaves[1]) &
                        Mask::alibi(leaves[2]) & Mask::causal();
      const auto output =
          scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), mask).output;
      return torch::autograd::grad({output}, leaves, {grad.to(dtype)});
    };
    // The dense mask's gradient, by loops, summed over the diagonals.
    const auto mask =
        Mask::relative(table) & Mask::relative(shared) & Mask::alibi(slopes) & Mask::causal();
    const auto dense = test::oracle_attention_backward(
                           q, k, v, test::dense_mask(mask, sizes.n, sizes.h, sizes.l, sizes.s),
                           1 / std::sqrt(8.0), grad, {})
                           .added.sum(0);
    auto by_distance = at::zeros({2, sizes.l + sizes.s - 1}, at::kDouble);
    auto by_slope = at::zeros({2}, at::kDouble);
    for (int64_t i = 0; i < sizes.l; ++i) {
      by_distance.narrow(1, sizes.l - 1 - i, sizes.s) += dense.select(1, i);
      const auto distance = (at::arange(sizes.s) - i - (sizes.s - sizes.l)).abs();
      by_slope -= (dense.select(1, i) * distance).sum(1);
    }
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      const auto found = gradients(dtype);
      const double tolerance = dtype == at::kDouble ? 1e-12 : 2e-5;
      EXPECT_TRUE(is_close(found[0].to(at::kDouble), by_distance, tolerance)) << dtype;
      EXPECT_TRUE(is_close(found[1].to(at::kDouble), by_distance.sum(0, true), tolerance))
          << dtype;
      EXPECT_TRUE(is_close(found[2].to(at::kDouble), by_slope,
                           tolerance * static_cast<double>(sizes.l + sizes.s)))
          << dtype;
      EXPECT_EQ(found[0].scalar_type(), dtype);
    }
  }
}

// Without, the table may be formed in float32.
TEST(PositionMaskTest, SlopesWithAndWithoutAGradientGiveEqualBits) {
  const test::Sizes sizes{2, 3, 40, 70};
  const auto [q, k, v] = draw_call_inputs(24, sizes, at::kFloat);
  for (const auto& slopes : {alibi_slopes(3), torch::tensor({0.1F, -0.3F, 3e38F}),
                             torch::tensor({1.0F, NAN, 0.5F})}) {
    for (const int64_t far : {int64_t{30}, (int64_t{1} << 24) + 1}) {
      const auto attend = [&, q = q, k = k, v = v](const at::Tensor& given) {
        const auto mask =
            Mask::alibi(given, torch::tensor({int64_t{0}, far})) & Mask::window(-1, 20);
        return scaled_dot_product_attention(q, k, v, mask).output;
      };
      EXPECT_TRUE(is_same_result(attend(slopes), attend(leaf(slopes)).detach()))
          << slopes << far;
      EXPECT_TRUE(is_same_result(attend(slopes), attend(slopes.to(at::kDouble)))) << far;
    }
  }
}

TEST(PositionMaskTest, SlopesAreThePublishedOnes) {
  EXPECT_TRUE(is_close(
      alibi_slopes(8),
      torch::tensor({0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625}), 0));
  EXPECT_TRUE(is_close(alibi_slopes(3), torch::tensor({0.0625, 0.00390625, 0.25}), 0));
  EXPECT_TRUE(is_close(alibi_slopes(1), torch::tensor({0.00390625}), 0));
  EXPECT_TRUE(refuses([] { alibi_slopes(0); }, {"alibi_slopes", "num_heads", "0"}));
}

TEST(PositionMaskTest, EmptySizesGiveEmptyOrZeroResults) {
  for (const auto& sizes :
       {test::Sizes{2, 1, 0, 3}, test::Sizes{2, 1, 3, 0}, test::Sizes{2, 1, 0, 0}}) {
    const auto table = at::zeros({1, std::max<int64_t>(sizes.l + sizes.s - 1, 0)});
    const auto ids = [](int64_t places) { return at::zeros({places}, at::kLong); };
    const auto mask = Mask::relative(table) & Mask::documents(ids(sizes.l), ids(sizes.s)) &
                      Mask::alibi(at::ones({1})) & Mask::causal(torch::tensor({0, 1}));
    const auto [q, k, v] = draw_call_inputs(23, sizes, at::kFloat);
    const auto output = scaled_dot_product_attention(q, k, v, mask).output;
    EXPECT_TRUE(is_close(output, at::zeros({2, 1, sizes.l, 8}), 0));
    const AttentionMap map(q, k, mask);
    EXPECT_EQ(map.dense().sizes(), at::IntArrayRef({2, 1, sizes.l, sizes.s}));
    EXPECT_EQ(map.rows(sizes.l, sizes.l).size(2), 0);
  }
}

TEST(PositionMaskTest, DocumentsTablesAndSlopesOfAnotherShapeOrDtypeAreRefused) {
  const auto longs = [](at::IntArrayRef sizes) { return at::zeros(sizes, at::kLong); };
  EXPECT_TRUE(refuses([] { Mask::documents(at::zeros({2})); }, {"Mask::documents", "integer"}));
  EXPECT_TRUE(refuses([&] { Mask::documents(longs({2}), at::zeros({2})); },
                      {"Mask::documents", "key_ids", "Float"}));
  EXPECT_TRUE(refuses([] { Mask::documents_from_lengths({}); }, {"documents_from_lengths"}));
  EXPECT_TRUE(refuses([] { Mask::relative(at::zeros({1, 3}, at::kLong)); },
                      {"Mask::relative", "floating", "Long"}));
  EXPECT_TRUE(refuses([] { Mask::relative(at::full({1, 3}, -INFINITY)); },
                      {"Mask::relative", "finite", "inf"}));
  EXPECT_TRUE(refuses([] { Mask::alibi(at::zeros({1}, at::kLong)); }, {"Mask::alibi", "Long"}));
  const auto call_refuses = [](const Mask& mask, std::initializer_list<std::string> words) {
    return refuses([&] { uniform_weights(mask, {2, 3, 4, 5}); }, words);
  };
  EXPECT_TRUE(call_refuses(Mask::documents(longs({5})), {"Mask::documents", "L", "4", "5"}));
  EXPECT_TRUE(call_refuses(Mask::documents(longs({2, 4}), longs({3, 5})),
                           {"Mask::documents", "key_ids", "5", "2", "3"}));
  EXPECT_TRUE(call_refuses(Mask::relative(at::zeros({3, 9})), {"Mask::relative", "8", "9"}));
  EXPECT_TRUE(call_refuses(Mask::relative(at::zeros({2, 8})), {"Mask::relative", "3", "2"}));
  EXPECT_TRUE(call_refuses(Mask::alibi(at::zeros({4})), {"Mask::alibi", "slopes", "3", "4"}));
  EXPECT_TRUE(
      call_refuses(Mask::alibi(at::zeros({3}), longs({3})), {"Mask::alibi", "offsets"}));
  for (const auto& wrong : {torch::tensor({0, 3}), torch::tensor({1, 4}),
                            torch::tensor({0, 3, 2, 4}), torch::tensor({{0, 4}})}) {
    EXPECT_TRUE(
        refuses([&] { uniform_weights(Mask::documents_from_lengths(wrong), {1, 1, 4, 4}); },
                {"Mask::documents_from_lengths"}));
  }
}

TEST(PositionMaskTest, AMaskOfPositionsDescribesItself) {
  std::ostringstream text;
  const auto slopes = at::ones({3}), offsets = torch::tensor({1, 2});
  text << (Mask::causal(offsets) & Mask::alibi(slopes) & Mask::alibi(slopes, offsets) &
           Mask::documents(offsets, offsets));
  EXPECT_EQ(text.str(),
            "causal(Long [2]) & alibi(Float [3], bottom_right) & alibi(Float [3], Long [2]) & "
            "documents(Long [2], Long [2])");
}

}  // namespace
}  // namespace mha
