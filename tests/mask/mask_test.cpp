// Guards what each named constructor of Mask means, for every accepted dtype and shape, and
// that
// `&` combines any of them. Most tests attend with scores of 0, so that a map shows the mask
// itself: 'x' where a key may be attended to. Tolerances are a few roundings of a number
// near 1.
#include <mha/mask.h>

#include <limits>

#include "support/expect.h"
#include "support/values.h"

namespace mha {
namespace {

using test::bools;
using test::infinity;
using test::is_bit_equal;
using test::is_close;
using test::leaf;
using test::nan;
using test::picture;
using test::Sizes;
using test::uniform_weights;
using test::visible;
using Alignment = Mask::Alignment;

at::Tensor doubles(std::vector<double> values) {
  return torch::tensor(values, at::kDouble);
}

TEST(MaskTest, ADefaultMaskAllowsEverything) {
  EXPECT_TRUE(Mask().allows_everything());
  EXPECT_FALSE(Mask::causal().allows_everything());
  EXPECT_EQ(visible(Mask(), {1, 1, 2, 3}), "xxx xxx");
}

TEST(MaskTest, KeepBlocksExactlyTheZerosOfAnyDtype) {
  for (const auto dtype :
       {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf,
        at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat}) {
    const auto mask = doubles({0, 1, 2, 1, 0, 0}).view({2, 3}).to(dtype);
    EXPECT_EQ(visible(Mask::keep(mask), {1, 1, 2, 3}), ".xx x..") << dtype;
  }
}

TEST(MaskTest, KeepAllowsTinyAndInfiniteElements) {
  const auto mask = doubles({1, 1e-300, infinity, 0.0, -0.0}).view({1, 5});
  EXPECT_EQ(visible(Mask::keep(mask), {1, 1, 1, 5}), "xxx..");
}

TEST(MaskTest, BlockBlocksExactlyTheTrueElements) {
  const auto mask = bools({0, 1, 1, 1, 0, 0}).view({2, 3});
  EXPECT_EQ(visible(Mask::block(mask), {1, 1, 2, 3}), "x.. .xx");
}

TEST(MaskTest, AddBlocksAtMinusInfinityAndNowhereElse) {
  const auto mask = doubles({0, -infinity, -5, 3}).view({1, 4});
  EXPECT_EQ(visible(Mask::add(mask), {1, 1, 1, 4}), "x.xx");
}

TEST(MaskTest, KeepKeysMarksPaddingByZeroInAnyDtype) {
  for (const auto dtype : {at::kBool, at::kByte, at::kLong, at::kHalf, at::kFloat}) {
    const auto mask = doubles({1, 1, 0, 0, 2, 0}).view({2, 3}).to(dtype);
    const auto weights = uniform_weights(Mask::keep_keys(mask), {2, 1, 2, 3});
    EXPECT_EQ(picture(weights[0][0]), "xx. xx.") << dtype;
    EXPECT_EQ(picture(weights[1][0]), ".x. .x.") << dtype;
  }
}

TEST(MaskTest, BlockKeysMarksPaddingByTrue) {
  const auto weights =
      uniform_weights(Mask::block_keys(bools({0, 0, 1, 1, 0, 1}).view({2, 3})), {2, 2, 1, 3});
  EXPECT_EQ(picture(weights[0][1]), "xx.");
  EXPECT_EQ(picture(weights[1][1]), ".x.");
}

TEST(MaskTest, AOneDimensionalKeyMaskHoldsForEverySample) {
  const auto keep = uniform_weights(Mask::keep_keys(bools({1, 0, 1})), {2, 1, 1, 3});
  const auto block = uniform_weights(Mask::block_keys(bools({0, 1, 0})), {2, 1, 1, 3});
  for (int64_t n = 0; n < 2; ++n) {
    EXPECT_EQ(picture(keep[n][0]), "x.x");
    EXPECT_EQ(picture(block[n][0]), "x.x");
  }
}

TEST(MaskTest, LengthsCountTheRealKeysInEveryIntegerDtype) {
  for (const auto dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
    const auto lengths = torch::tensor({3, 0, 1}).to(dtype);
    const auto weights = uniform_weights(Mask::lengths(lengths), {3, 2, 1, 3});
    EXPECT_EQ(picture(weights[0][1]), "xxx") << dtype;
    EXPECT_EQ(picture(weights[1][1]), "...") << dtype;
    EXPECT_EQ(picture(weights[2][1]), "x..") << dtype;
  }
}

TEST(MaskTest, CausalIsTheSameInBothAlignmentsWhereQueriesAndKeysAreEqualInNumber) {
  EXPECT_EQ(visible(Mask::causal(Alignment::bottom_right), {1, 1, 3, 3}), "x.. xx. xxx");
  EXPECT_EQ(visible(Mask::causal(Alignment::top_left), {1, 1, 3, 3}), "x.. xx. xxx");
}

TEST(MaskTest, CausalTopLeftLetsLateQueriesSeeAllKeys) {
  EXPECT_EQ(visible(Mask::causal(Alignment::top_left), {1, 1, 4, 2}), "x. xx xx xx");
}

TEST(MaskTest, AWindowReachesLeftAndRightOfTheAlignedQuery) {
  EXPECT_EQ(visible(Mask::window(1, 0), {1, 1, 3, 5}), ".xx.. ..xx. ...xx");
  EXPECT_EQ(visible(Mask::window(1, 0, Alignment::top_left), {1, 1, 3, 5}),
            "x.... xx... .xx..");
  EXPECT_EQ(visible(Mask::window(0, 2), {1, 1, 4, 4}), "xxx. .xxx ..xx ...x");
  EXPECT_EQ(visible(Mask::window(0, 0), {1, 1, 3, 3}), "x.. .x. ..x");
  EXPECT_EQ(visible(Mask::window(0, 0), {1, 1, 3, 2}), ".. x. .x");
}

TEST(MaskTest, AWindowSideOfMinusOneIsOpen) {
  EXPECT_EQ(visible(Mask::window(-1, 0), {1, 1, 2, 3}), visible(Mask::causal(), {1, 1, 2, 3}));
  EXPECT_EQ(visible(Mask::window(1, -1), {1, 1, 3, 3}), "xxx xxx .xx");
  EXPECT_EQ(visible(Mask::window(-1, -1), {1, 1, 2, 3}), "xxx xxx");
}

TEST(MaskTest, AWindowWiderThanAnySequenceIsOpen) {
  const auto most = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(visible(Mask::window(most, 0), {1, 1, 3, 3}), "x.. xx. xxx");
  EXPECT_EQ(visible(Mask::window(most, most), {1, 1, 2, 3}), "xxx xxx");
}

// N = 2, H = 3, L = 4, S = 5: every accepted shape of a tensor, each with its (N, H, L, S)
// view.
const Sizes sizes{2, 3, 4, 5};
struct ShapedMask {
  at::Tensor tensor, expanded;
};
std::vector<ShapedMask> every_shape(const std::function<at::Tensor(at::IntArrayRef)>& draw) {
  const auto [n, h, l, s] = sizes;
  std::vector<ShapedMask> masks;
  const auto add = [&](at::Tensor tensor, const at::Tensor& view) {
    masks.push_back({std::move(tensor), view.expand({n, h, l, s})});
  };
  const auto pairs = draw({l, s}), samples = draw({n, l, s}), maps = draw({n * h, l, s});
  add(pairs, pairs);
  add(samples, samples.view({n, 1, l, s}));
  add(maps, maps.view({n, h, l, s}));
  for (const int64_t batch : {n, int64_t{1}}) {
    for (const int64_t heads : {h, int64_t{1}}) {
      const auto four = draw({batch, heads, l, s});
      add(four, four);
    }
  }
  return masks;
}
at::Tensor random_bools(at::IntArrayRef shape) {
  return at::rand(shape).gt(0.4);
}

TEST(MaskTest, KeepTakesEveryTensorShape) {
  torch::manual_seed(1);
  for (const auto& [mask, view] : every_shape(random_bools)) {
    const auto seen = uniform_weights(Mask::keep(mask), sizes).ne(0);
    EXPECT_TRUE(is_bit_equal(seen, view)) << mask.sizes();
  }
}

TEST(MaskTest, BlockTakesEveryTensorShape) {
  torch::manual_seed(2);
  for (const auto& [mask, view] : every_shape(random_bools)) {
    const auto seen = uniform_weights(Mask::block(mask), sizes).ne(0);
    EXPECT_TRUE(is_bit_equal(seen, view.logical_not())) << mask.sizes();
  }
}

TEST(MaskTest, AddTakesEveryTensorShape) {
  torch::manual_seed(3);
  const auto draw = [](at::IntArrayRef shape) { return at::randn(shape, at::kDouble); };
  for (const auto& [mask, view] : every_shape(draw)) {
    EXPECT_TRUE(is_close(uniform_weights(Mask::add(mask), sizes), view.softmax(-1), 1e-15))
        << mask.sizes();
  }
}

TEST(MaskTest, AThreeDimensionalMaskOverOneSampleMayBePerHead) {
  const auto mask = bools({1, 0, 0, 1, 1, 1}).view({3, 1, 2});  // N * H = 3
  const auto weights = uniform_weights(Mask::keep(mask), {1, 3, 1, 2});
  EXPECT_EQ(picture(weights[0][0]), "x.");
  EXPECT_EQ(picture(weights[0][1]), ".x");
  EXPECT_EQ(picture(weights[0][2]), "xx");
}

TEST(MaskTest, AMaskOfAnyStridesIsReadByIndex) {
  const auto mask = bools({1, 0, 0, 1, 1, 0}).view({3, 2});
  EXPECT_EQ(visible(Mask::keep(mask.t()), {1, 1, 2, 3}), "x.x .x.");
  EXPECT_EQ(visible(Mask::keep(bools({1, 0}).expand({3, 2})), {1, 1, 3, 2}), "x. x. x.");
  const auto maps = bools({1, 0, 0, 1}).view({2, 1, 2}).transpose(0, 2).transpose(0, 2);
  EXPECT_EQ(visible(Mask::keep(maps), {2, 1, 1, 2}), "x.");
}

// One mask of each constructor over N = 2, H = 2, L = 3, S = 4, with what it allows and adds as
// tensors that broadcast to (N, H, L, S). What each allows is tested by itself above.
const Sizes pair_sizes{2, 2, 3, 4};
struct Part {
  const char* name;
  Mask mask;
  at::Tensor allowed, added;
};
std::vector<Part> every_constructor() {
  torch::manual_seed(4);
  const auto keep = at::rand({3, 4}).gt(0.3), block = at::rand({2, 2, 3, 4}).gt(0.7);
  const auto added =
      at::randn({2, 3, 4}, at::kDouble).masked_fill(at::rand({2, 3, 4}).gt(0.8), -infinity);
  const auto keys = bools({1, 1, 1, 0, 1, 0, 1, 1}).view({2, 4});
  const auto zero = at::zeros({1}, at::kDouble);
  const auto causal = at::ones({3, 4}, at::kBool).tril(1);
  const auto window = at::ones({3, 4}, at::kBool).tril(2).triu(-1);
  const auto lengths = torch::tensor({4, 3});
  const auto real = at::arange(4).lt(lengths.unsqueeze(1)).view({2, 1, 1, 4});
  const auto queries = torch::tensor({7, 7, -2, 7, -2, -2}).view({2, 3});
  const auto documents = torch::tensor({7, 7, -2, 7});
  const auto table = at::randn({2, 6}, at::kDouble);
  return {
      {"keep", Mask::keep(keep), keep, zero},
      {"block", Mask::block(block), block.logical_not(), zero},
      {"add", Mask::add(added), added.ne(-infinity).unsqueeze(1),
       added.masked_fill(added.eq(-infinity), 0).unsqueeze(1)},
      {"keep_keys", Mask::keep_keys(keys), keys.view({2, 1, 1, 4}), zero},
      {"block_keys", Mask::block_keys(bools({0, 0, 1, 0})), bools({1, 1, 0, 1}), zero},
      {"lengths", Mask::lengths(lengths), real, zero},
      {"causal", Mask::causal(), causal, zero},
      {"window", Mask::window(1, 2, Alignment::top_left), window, zero},
      {"documents", Mask::documents(queries, documents),
       queries.unsqueeze(2).eq(documents).unsqueeze(1), zero},
      {"relative", Mask::relative(table), at::ones({1}, at::kBool),
       table.unfold(1, 4, 1).flip(1).unsqueeze(0)},
  };
}

TEST(MaskTest, AnyNumberOfMasksOfAnyKindCombine) {
  const auto parts = every_constructor();
  const auto scores = at::randn({2, 2, 3, 4}, at::kDouble);
  const auto identity = at::eye(4, at::kDouble).expand({2, 2, 4, 4});  // scores @ I = scores
  for (unsigned subset = 0; subset < 1u << parts.size(); ++subset) {
    Mask mask;
    auto allowed = at::ones({2, 2, 3, 4}, at::kBool);
    auto added = at::zeros({2, 2, 3, 4}, at::kDouble);
    std::string names;
    for (size_t part = 0; part < parts.size(); ++part) {
      if ((subset >> part & 1u) == 0) continue;
      mask = mask & parts[part].mask;
      allowed = allowed & parts[part].allowed;
      added = added + parts[part].added;
      names += std::string(parts[part].name) + ' ';
    }
    const auto weights = mha::scaled_dot_product_attention(scores, identity, identity, mask,
                                                           AttentionOptions().scale(1.0))
                             .weights;
    const auto expected = (scores + added).masked_fill(~allowed, -infinity).softmax(-1);
    EXPECT_TRUE(is_close(weights, expected.nan_to_num(0.0), 1e-15)) << names;
    EXPECT_TRUE(is_bit_equal(weights.ne(0), allowed)) << names;
  }
}

TEST(MaskTest, CombiningIsCommutative) {
  const auto parts = every_constructor();
  for (const auto& a : parts) {
    for (const auto& b : parts) {
      EXPECT_TRUE(is_bit_equal(uniform_weights(a.mask & b.mask, pair_sizes),
                               uniform_weights(b.mask & a.mask, pair_sizes)))
          << a.name << " & " << b.name;
    }
  }
}

TEST(MaskTest, TwoMasksOfOneKindBothHold) {
  const auto first = bools({1, 1, 0}), second = bools({0, 1, 1});
  const Sizes one{1, 1, 1, 3};
  const auto row = [](const at::Tensor& t) { return t.unsqueeze(0); };
  EXPECT_EQ(visible(Mask::keep(row(first)) & Mask::keep(row(second)), one), ".x.");
  EXPECT_EQ(visible(Mask::block(row(first)) & Mask::block(row(second)), one), "...");
  EXPECT_EQ(visible(Mask::keep_keys(first) & Mask::keep_keys(second), one), ".x.");
  EXPECT_EQ(visible(Mask::block_keys(first) & Mask::block_keys(second), one), "...");
  EXPECT_EQ(visible(Mask::lengths(torch::tensor({2})) & Mask::lengths(torch::tensor({1})), one),
            "x..");
  EXPECT_EQ(visible(Mask::causal() & Mask::causal(Alignment::top_left), one), "x..");
  EXPECT_EQ(visible(Mask::window(1, 0) & Mask::window(0, 1), {1, 1, 3, 3}), "x.. .x. ..x");
}

TEST(MaskTest, AddedTermsSum) {
  const auto a = doubles({1, 2, 0}).view({1, 3}), b = doubles({0.5, -2, 1}).view({1, 3});
  EXPECT_TRUE(is_close(uniform_weights(Mask::add(a) & Mask::add(b), {1, 1, 1, 3}),
                       uniform_weights(Mask::add(a + b), {1, 1, 1, 3}), 1e-15));
}

TEST(MaskTest, CombiningLeavesBothMasksAsTheyWere) {
  const Mask causal = Mask::causal(), keys = Mask::keep_keys(bools({1, 0}));
  const Mask both = causal & keys;
  EXPECT_EQ(both.terms().size(), 2u);
  EXPECT_EQ(visible(causal, {1, 1, 2, 2}), "x. xx");
  EXPECT_EQ(visible(keys, {1, 1, 2, 2}), "x. x.");
}

TEST(MaskTest, AMaskTensorIsNeverModified) {
  for (const auto& part : every_constructor()) {
    for (const auto& term : part.mask.terms()) {
      if (!term.tensor.defined()) continue;
      const auto before = term.tensor.clone();
      const auto version = term.tensor._version();
      uniform_weights(part.mask & Mask::causal(), pair_sizes);
      EXPECT_TRUE(is_bit_equal(term.tensor, before)) << part.name;
      EXPECT_EQ(term.tensor._version(), version) << part.name;
    }
  }
}

TEST(MaskTest, TwoLowestAddedValuesDoNotBecomeABlock) {
  const double lowest = std::numeric_limits<double>::lowest();
  const auto everywhere = Mask::add(doubles({lowest, lowest}).view({1, 2}));
  EXPECT_TRUE(is_close(uniform_weights(everywhere & everywhere, {1, 1, 1, 2}).flatten(),
                       doubles({0.5, 0.5}), 1e-15));
  const auto first = Mask::add(doubles({lowest, 0}).view({1, 2}));
  EXPECT_TRUE(
      is_close(uniform_weights(first & first, {1, 1, 1, 2}).flatten(), doubles({0, 1}), 0));
}

TEST(MaskTest, AnAddedTermMayBeTooLargeForTheDtypeOfTheScores) {
  struct Case {
    at::ScalarType mask, scores;
    double value;
  };
  for (const auto& c :
       {Case{at::kFloat, at::kHalf, -1e9}, Case{at::kFloat, at::kBFloat16, -3e38},
        Case{at::kDouble, at::kFloat, -1e300}}) {
    const auto query = at::zeros({1, 1, 1, 1}, c.scores),
               key = at::zeros({1, 1, 2, 1}, c.scores);
    const auto attend = [&](std::vector<double> added) {
      const auto mask = Mask::add(doubles(added).view({1, 2}).to(c.mask));
      return mha::scaled_dot_product_attention(query, key, key, mask).weights.flatten();
    };
    EXPECT_TRUE(is_close(attend({c.value, c.value}), doubles({0.5, 0.5}).to(c.scores), 0))
        << c.scores;
    EXPECT_TRUE(is_close(attend({c.value, 0}), doubles({0, 1}).to(c.scores), 0)) << c.scores;
  }
}

TEST(MaskTest, AnAddedTermOfAnyFloatingDtypeFollowsTheScoresAndKeepsItsOwnGradient) {
  torch::manual_seed(5);
  const auto floating = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  for (const auto mask_dtype : floating) {
    for (const auto dtype : floating) {
      const auto query = at::zeros({1, 1, 1, 1}, dtype), key = at::zeros({1, 1, 3, 1}, dtype);
      const auto added = leaf(doubles({0.5, -1, 2}).view({1, 3}).to(mask_dtype));
      const auto weights =
          mha::scaled_dot_product_attention(query, key, key, Mask::add(added)).weights;
      EXPECT_EQ(weights.scalar_type(), dtype);
      const auto expected = doubles({0.5, -1, 2}).softmax(-1);
      const double rounding = dtype == at::kBFloat16 ? 4e-3 : dtype == at::kHalf ? 5e-4 : 2e-7;
      EXPECT_TRUE(is_close(weights.flatten().to(at::kDouble), expected, rounding));
      weights.flatten()[2].backward();
      EXPECT_EQ(added.grad().scalar_type(), mask_dtype);
      // d w2 / d a2 = w2 (1 - w2); bfloat16 resolves it to 2^-9.
      EXPECT_NEAR(added.grad()[0][2].item<double>(),
                  (expected[2] * (1 - expected[2])).item<double>(), 1e-3);
    }
  }
}

TEST(MaskTest, AMaskDescribesItself) {
  const auto text = [](const Mask& mask) {
    std::ostringstream stream;
    stream << mask;
    return stream.str();
  };
  EXPECT_EQ(text(Mask::causal() & Mask::keep_keys(at::ones({2, 7}, at::kLong))),
            "causal(bottom_right) & keep_keys(Long [2, 7])");
  const auto window = text(Mask::window(3, -1, Alignment::top_left));
  for (const char* word : {"window", "3", "-1", "top_left"}) {
    EXPECT_TRUE(test::has_word(window, word)) << window;
  }
}

}  // namespace
}  // namespace mha
