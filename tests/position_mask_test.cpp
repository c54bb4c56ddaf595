// Guards the masks that speak of positions and never become an L x S tensor: bands with offsets
// of each sample's own. Every mask is compared with plain loops in float64; the kernels are
// compared with the plain path on every instruction set in fused_attention_test.cpp.
//
// Tolerance: results near 1 in float32, a few roundings of 6e-8; 1e-13 in float64.
#include <mha/mask.h>

#include <limits>

#include "expect.h"
#include "oracle.h"

namespace mha {
namespace {

using test::all_zero;
using test::is_bit_equal;
using test::is_close;
using test::leaf;
using test::picture;
using test::Random;
using test::refuses;
using test::uniform_weights;

struct Inputs {
  at::Tensor query, key, value;
};

Inputs draw_inputs(int64_t seed, const test::Sizes& sizes, at::ScalarType dtype) {
  Random random(static_cast<uint64_t>(seed));
  return {random.normal({sizes.n, sizes.h, sizes.l, 8}, dtype),
          random.normal({sizes.n, sizes.h, sizes.s, 8}, dtype),
          random.normal({sizes.n, sizes.h, sizes.s, 8}, dtype)};
}

// Output and weights against loops, in both widths.
void expect_oracle_agrees(const Mask& mask, const test::Sizes& sizes, int64_t seed) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto [q, k, v] = draw_inputs(seed, sizes, dtype);
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
  const auto [q, k, v] = draw_inputs(1, sizes, at::kFloat);
  const auto offsets = at::full({2}, 140, at::kLong);
  const auto attend = [q = q, k = k, v = v](const Mask& mask) {
    return scaled_dot_product_attention(q, k, v, mask).output;
  };
  EXPECT_TRUE(is_bit_equal(attend(Mask::causal(offsets)), attend(Mask::causal())));
  EXPECT_TRUE(is_bit_equal(attend(Mask::window(30, 5, offsets)), attend(Mask::window(30, 5))));
}

// What a cache of ragged lengths needs: each sample as if it were alone.
TEST(PositionMaskTest, ASampleOfARaggedBatchIsAsAlone) {
  for (const int64_t queries : {int64_t{1}, int64_t{5}, int64_t{70}}) {
    const test::Sizes sizes{3, 2, queries, 600};
    const auto [q, k, v] = draw_inputs(queries, sizes, at::kFloat);
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
  auto [q, k, v] = draw_inputs(6, {2, 1, 2, 3}, at::kFloat);
  const auto clean = scaled_dot_product_attention(q, k, v, mask).output;
  k.select(2, 2).fill_(std::numeric_limits<float>::quiet_NaN());
  v.select(2, 2).fill_(std::numeric_limits<float>::infinity());
  q[1].fill_(std::numeric_limits<float>::quiet_NaN());
  const std::vector<at::Tensor> leaves{leaf(q), leaf(k), leaf(v)};
  const auto output =
      scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], mask).output;
  EXPECT_TRUE(is_bit_equal(output, clean));
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
  EXPECT_TRUE(refuses(
      [] {
        uniform_weights(Mask::causal(torch::tensor({1, 2, 3})), {2, 1, 2, 2});
      },
      {"Mask::causal", "offsets", "N", "2", "3"}));
}

}  // namespace
}  // namespace mha
