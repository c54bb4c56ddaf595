// Guards the functional form: its formula, shapes, layouts, dtypes, the weights it returns, and
// the errors of a wrong call. Values are measured against the loops of oracle.h in float64,
// where the difference is a few roundings of numbers near 1; layouts and repeats are bit-equal.
#include <mha/scaled_dot_product_attention.h>

#include <cmath>
#include <limits>

#include "support/expect.h"
#include "support/oracle.h"
#include "support/thread_count.h"

namespace mha {
namespace {

using test::all_zero;
using test::is_bit_equal;
using test::is_close;
using test::is_same_result;
using test::leaf;
using test::nan;
using test::refuses;
using Alignment = Mask::Alignment;

constexpr double rounding = 1e-14;

at::Tensor draw(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble) {
  return at::randn(shape, at::kDouble).to(dtype);
}

struct Inputs {
  at::Tensor query, key, value;
};
// N = 2, H = 4, L = 3, S = 5, D = 6, Dv = 7.
Inputs draw_inputs(int64_t kv_heads = 4, at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(11);
  return {draw({2, 4, 3, 6}, dtype), draw({2, kv_heads, 5, 6}, dtype),
          draw({2, kv_heads, 5, 7}, dtype)};
}
AttentionOutput attend(const Inputs& in, const Mask& mask = {},
                       const AttentionOptions& options = {}) {
  return mha::scaled_dot_product_attention(in.query, in.key, in.value, mask, options);
}

TEST(ScaledDotProductAttentionTest, OneQueryOverTwoKeysByHand) {
  const auto query = torch::tensor({2.0, 0.0}, at::kDouble).view({1, 1, 2});
  const auto key = torch::tensor({1.0, 5.0, -1.0, 7.0}, at::kDouble).view({1, 2, 2});
  const auto value = torch::tensor({10.0, 20.0}, at::kDouble).view({1, 2, 1});
  const auto [output, weights] = mha::scaled_dot_product_attention(query, key, value);
  // Scores 2 and -2 times 1 / sqrt(2); their softmax is a logistic function of the difference.
  const double first = 1 / (1 + std::exp(-4 / std::sqrt(2.0)));
  EXPECT_TRUE(
      is_close(weights.flatten(), torch::tensor({first, 1 - first}, at::kDouble), 1e-15));
  EXPECT_NEAR(output.item<double>(), 10 * first + 20 * (1 - first), rounding);
}

TEST(ScaledDotProductAttentionTest, EqualsTheOracleWithDvOtherThanD) {
  const auto in = draw_inputs();
  const auto [output, weights] = attend(in, Mask::causal());
  const auto expected = test::oracle_attention(in.query, in.key, in.value, Mask::causal());
  EXPECT_TRUE(is_close(output, expected.output, rounding));
  EXPECT_TRUE(is_close(weights, expected.weights, rounding));
}

TEST(ScaledDotProductAttentionTest, TheScaleMultipliesTheScoresAndDefaultsToOneOverRootD) {
  const auto in = draw_inputs();
  EXPECT_TRUE(is_same_result(
      attend(in, {}, AttentionOptions().scale(1 / std::sqrt(6.0))).output, attend(in).output));
  for (const double scale : {0.0, 0.3, 2.0, -1.5}) {
    const auto mask = test::dense_mask({}, 2, 4, 3, 5);
    const auto expected = test::oracle_attention(in.query, in.key, in.value, mask, scale);
    EXPECT_TRUE(is_close(attend(in, {}, AttentionOptions().scale(scale)).weights,
                         expected.weights, rounding))
        << scale;
  }
}

TEST(ScaledDotProductAttentionTest, TheScaleDoesNotReachTheAddedTerm) {
  const auto in = draw_inputs();
  const auto added = draw({3, 5});
  const auto weights = attend(in, Mask::add(added), AttentionOptions().scale(0.0)).weights;
  EXPECT_TRUE(is_close(weights, added.softmax(-1).expand({2, 4, 3, 5}), rounding));
}

TEST(ScaledDotProductAttentionTest, LeadingDimensionsAreNoneOneOrMany) {
  torch::manual_seed(12);
  const auto query = draw({6, 2, 3, 4}), key = draw({6, 2, 5, 4}), value = draw({6, 2, 5, 3});
  const Mask mask = Mask::lengths(torch::tensor({5, 4, 3, 2, 1, 0}));
  for (const auto kind : {Weights::none, Weights::averaged, Weights::per_head}) {
    const auto options = AttentionOptions().weights(kind);
    const auto flat = mha::scaled_dot_product_attention(query, key, value, mask, options);
    const auto nested = mha::scaled_dot_product_attention(
        query.view({2, 1, 3, 2, 3, 4}), key.view({2, 1, 3, 2, 5, 4}),
        value.view({2, 1, 3, 2, 5, 3}), mask, options);
    EXPECT_TRUE(is_same_result(nested.output, flat.output.view({2, 1, 3, 2, 3, 3})));
    if (kind == Weights::none) continue;
    EXPECT_TRUE(is_same_result(nested.weights, flat.weights.unflatten(0, {2, 1, 3})));
  }
  const auto first = mha::scaled_dot_product_attention(query[1], key[1], value[1],
                                                       Mask::lengths(torch::tensor({4})));
  const auto all = mha::scaled_dot_product_attention(query, key, value, mask);
  EXPECT_TRUE(is_close(first.output, all.output[1], rounding));
  EXPECT_TRUE(is_close(first.weights, all.weights[1], rounding));
}

TEST(ScaledDotProductAttentionTest, GroupedHeadsEqualRepeatedKeysAndValues) {
  for (const int64_t kv_heads : {1, 2, 4}) {
    for (const Mask& mask :
         {Mask(), Mask::causal(), Mask::keep(at::rand({2, 4, 3, 5}).gt(0.4))}) {
      const auto in = draw_inputs(kv_heads);
      const Inputs grouped{leaf(in.query), leaf(in.key), leaf(in.value)};
      const Inputs repeated{leaf(in.query), leaf(in.key), leaf(in.value)};
      const auto a = attend(grouped, mask);
      const auto b = mha::scaled_dot_product_attention(
          repeated.query, repeated.key.repeat_interleave(4 / kv_heads, 1),
          repeated.value.repeat_interleave(4 / kv_heads, 1), mask);
      EXPECT_TRUE(is_close(a.output, b.output, rounding));
      EXPECT_TRUE(is_close(a.weights, b.weights, rounding));
      const auto upstream = draw({2, 4, 3, 7}), maps = draw({2, 4, 3, 5});
      ((a.output * upstream).sum() + (a.weights * maps).sum()).backward();
      ((b.output * upstream).sum() + (b.weights * maps).sum()).backward();
      EXPECT_TRUE(is_close(grouped.query.grad(), repeated.query.grad(), rounding * 10));
      EXPECT_TRUE(is_close(grouped.key.grad(), repeated.key.grad(), rounding * 10));
      EXPECT_TRUE(is_close(grouped.value.grad(), repeated.value.grad(), rounding * 10));
    }
  }
}

TEST(ScaledDotProductAttentionTest, WeightsArePerHeadAveragedOrNone) {
  const auto in = draw_inputs();
  const auto per_head = attend(in);
  const auto averaged = attend(in, {}, AttentionOptions().weights(Weights::averaged));
  const auto none = attend(in, {}, AttentionOptions().weights(Weights::none));
  EXPECT_EQ(per_head.weights.sizes(), (std::vector<int64_t>{2, 4, 3, 5}));
  EXPECT_TRUE(is_close(averaged.weights, per_head.weights.mean(1), 1e-15));
  EXPECT_FALSE(none.weights.defined());
  EXPECT_TRUE(is_same_result(averaged.output, per_head.output));
  EXPECT_TRUE(is_same_result(none.output, per_head.output));
}

TEST(ScaledDotProductAttentionTest, EveryRowOfTheWeightsSumsToOne) {
  const auto sums = attend(draw_inputs(), Mask::causal(Alignment::top_left)).weights.sum(-1);
  EXPECT_TRUE(is_close(sums, at::ones_like(sums), 1e-15));
}

TEST(ScaledDotProductAttentionTest, ResultsHaveTheDtypeOfTheQuery) {
  // One rounding of the result: half an ulp, and the inputs are the same rounded numbers. Where
  // the CPU multiplies bfloat16, the weights are rounded too: two halves of the ulp of 2.
  const std::vector<std::pair<at::ScalarType, double>> roundings = {
      {at::kFloat, 1e-6}, {at::kDouble, rounding}, {at::kBFloat16, 0x1p-6}, {at::kHalf, 1e-3}};
  for (const auto& [dtype, tolerance] : roundings) {
    const auto in = draw_inputs(4, dtype);
    for (const auto kind : {Weights::averaged, Weights::per_head}) {
      const auto result = attend(in, Mask::causal(), AttentionOptions().weights(kind));
      EXPECT_EQ(result.output.scalar_type(), dtype);
      EXPECT_EQ(result.weights.scalar_type(), dtype);
    }
    const auto expected = test::oracle_attention(in.query, in.key, in.value, Mask::causal());
    EXPECT_TRUE(is_close(attend(in, Mask::causal()).output, expected.output, tolerance))
        << dtype;
  }
}

TEST(ScaledDotProductAttentionTest, EmptyBatchQueriesOrKeysGiveDefinedResultsAndGradients) {
  struct Case {
    int64_t n, l, s;
  };
  for (const auto& c :
       {Case{0, 3, 5}, Case{2, 0, 5}, Case{2, 3, 0}, Case{0, 0, 0}, Case{2, 0, 0}}) {
    for (const Mask& mask :
         {Mask(), Mask::causal(), Mask::keep(at::ones({c.l, c.s})),
          Mask::lengths(at::zeros({c.n}, at::kInt)), Mask::add(at::zeros({c.n, c.l, c.s}))}) {
      for (const auto kind : {Weights::none, Weights::averaged, Weights::per_head}) {
        const Inputs in{leaf(draw({c.n, 4, c.l, 6})), leaf(draw({c.n, 2, c.s, 6})),
                        leaf(draw({c.n, 2, c.s, 7}))};
        const auto result = attend(in, mask, AttentionOptions().weights(kind));
        EXPECT_TRUE(is_bit_equal(result.output, at::zeros({c.n, 4, c.l, 7}, at::kDouble)));
        auto loss = result.output.sum();
        if (result.weights.defined()) {
          EXPECT_EQ(result.weights.size(-1), c.s);
          loss = loss + result.weights.sum();
        }
        loss.backward();
        EXPECT_TRUE(all_zero(in.query.grad())) << c.n << c.l << c.s;
        EXPECT_TRUE(all_zero(in.key.grad())) << c.n << c.l << c.s;
        EXPECT_TRUE(all_zero(in.value.grad())) << c.n << c.l << c.s;
      }
    }
  }
}

TEST(ScaledDotProductAttentionTest, AnyStridesGiveTheResultOfContiguousCopies) {
  torch::manual_seed(13);
  const auto packed = draw({2, 5, 3, 4, 6});  // N, T, qkv, H, D
  const auto transposed = draw({6, 5, 4, 2}).permute({3, 2, 1, 0});
  const auto sliced =
      draw({2, 8, 10, 12}).slice(1, 0, 8, 2).slice(2, 0, 10, 2).slice(3, 1, 12, 2);
  const auto expanded = draw({1, 1, 5, 6}).expand({2, 4, 5, 6});
  const std::vector<at::Tensor> strided = {packed.select(2, 0).transpose(1, 2),
                                           packed.select(2, 2).transpose(1, 2), transposed,
                                           sliced, expanded};
  for (const auto& query : strided) {
    for (const auto& key : strided) {
      for (const Mask& mask : {Mask(), Mask::causal()}) {
        const auto a = mha::scaled_dot_product_attention(query, key, key, mask);
        const auto b = mha::scaled_dot_product_attention(query.contiguous(), key.contiguous(),
                                                         key.contiguous(), mask);
        EXPECT_TRUE(is_same_result(a.output, b.output));
        EXPECT_TRUE(is_same_result(a.weights, b.weights));
      }
    }
  }
}

TEST(ScaledDotProductAttentionTest, InputsAreNeverModified) {
  const auto [query, key, value] = draw_inputs();
  key[0][0][4].fill_(std::numeric_limits<double>::quiet_NaN());  // blocked, and yet kept
  const std::vector<at::Tensor> inputs{query, key, value};
  std::vector<at::Tensor> copies;
  std::vector<int64_t> versions;
  for (const auto& t : inputs) {
    copies.push_back(t.clone());
    versions.push_back(t._version());
  }
  attend({query, key, value}, Mask::lengths(torch::tensor({4, 5})),
         AttentionOptions().dropout(0.5));
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_TRUE(is_bit_equal(inputs[i], copies[i]));
    EXPECT_EQ(inputs[i]._version(), versions[i]);
  }
}

TEST(ScaledDotProductAttentionTest, ARepeatedCallIsBitEqualAlsoAtAnotherNumberOfThreads) {
  torch::manual_seed(14);
  const auto x = draw({2, 4, 65, 16}, at::kFloat);
  const auto once = mha::scaled_dot_product_attention(x, x, x, Mask::causal());
  for (const int count : {1, 2, 4, 8}) {
    const test::ThreadCount threads(count);
    const auto again = mha::scaled_dot_product_attention(x, x, x, Mask::causal());
    EXPECT_TRUE(is_same_result(again.output, once.output)) << count;
    EXPECT_TRUE(is_same_result(again.weights, once.weights)) << count;
  }
}

TEST(ScaledDotProductAttentionTest, ASampleIsBitEqualWhateverElseIsInTheBatch) {
  torch::manual_seed(15);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto q = draw({7, 3, 9, 8}, dtype), k = draw({7, 3, 17, 8}, dtype);
    const auto all = mha::scaled_dot_product_attention(q, k, k, Mask::causal());
    for (int64_t n = 0; n < 7; ++n) {
      const auto one = mha::scaled_dot_product_attention(q.narrow(0, n, 1), k.narrow(0, n, 1),
                                                         k.narrow(0, n, 1), Mask::causal());
      EXPECT_TRUE(is_same_result(one.output, all.output.narrow(0, n, 1))) << n;
      EXPECT_TRUE(is_same_result(one.weights, all.weights.narrow(0, n, 1))) << n;
    }
  }
}

TEST(ScaledDotProductAttentionTest, GradientModeDoesNotChangeTheResult) {
  const auto in = draw_inputs();
  const auto recorded = attend({leaf(in.query), leaf(in.key), leaf(in.value)}, Mask::causal());
  {
    torch::NoGradGuard no_grad;
    EXPECT_TRUE(is_same_result(attend(in, Mask::causal()).output, recorded.output));
  }
  torch::InferenceMode inference;
  const auto result = attend(in, Mask::causal());
  EXPECT_TRUE(is_same_result(result.output, recorded.output.detach()));
  EXPECT_TRUE(is_same_result(result.weights, recorded.weights.detach()));
}

::testing::AssertionResult refused(const at::Tensor& query, const at::Tensor& key,
                                   const at::Tensor& value,
                                   std::initializer_list<std::string> words) {
  return refuses([&] { mha::scaled_dot_product_attention(query, key, value); }, words);
}

TEST(ScaledDotProductAttentionTest, InputsOfWrongSizesAreRefused) {
  const auto [q, k, v] = draw_inputs();
  const auto of = [](at::IntArrayRef shape) { return at::zeros(shape, at::kDouble); };
  EXPECT_TRUE(refused(of({3, 6}), k, v, {"query", "(..., H, L, D)", "[3, 6]"}));
  EXPECT_TRUE(refused(q, of({4, 5, 6}), v, {"key", "4", "[4, 5, 6]"}));
  EXPECT_TRUE(refused(q, k, of({4, 5, 7}), {"value", "4", "[4, 5, 7]"}));
  EXPECT_TRUE(refused(q, of({3, 4, 5, 6}), v, {"key", "[2, 4, 3, 6]", "[3, 4, 5, 6]"}));
  EXPECT_TRUE(refused(q, of({1, 4, 5, 6}), v, {"key", "[2, 4, 3, 6]", "[1, 4, 5, 6]"}));
  EXPECT_TRUE(refused(q, k, of({1, 4, 5, 7}), {"value", "[2, 4, 3, 6]", "[1, 4, 5, 7]"}));
  EXPECT_TRUE(refused(q, of({2, 4, 5, 8}), v, {"key", "6", "8"}));
  EXPECT_TRUE(refused(q, k, of({2, 4, 9, 7}), {"value", "5", "9"}));
  EXPECT_TRUE(refused(q, k, of({2, 2, 5, 7}), {"value", "4", "2"}));
  EXPECT_TRUE(refused(q, of({2, 3, 5, 6}), of({2, 3, 5, 7}), {"key", "4", "3"}));
  EXPECT_TRUE(refused(q, of({2, 8, 5, 6}), of({2, 8, 5, 7}), {"key", "4", "8"}));
  EXPECT_TRUE(refused(q, of({2, 0, 5, 6}), of({2, 0, 5, 7}), {"key", "4", "0"}));
  EXPECT_TRUE(refused(of({2, 4, 3, 0}), of({2, 4, 5, 0}), v, {"query", "D", "[2, 4, 3, 0]"}));
}

TEST(ScaledDotProductAttentionTest, InputsOfWrongDtypesOrDevicesAreRefused) {
  const auto [q, k, v] = draw_inputs();
  EXPECT_TRUE(refused({}, k, v, {"query", "undefined"}));
  EXPECT_TRUE(refused(q, {}, v, {"key", "undefined"}));
  EXPECT_TRUE(refused(q, k, {}, {"value", "undefined"}));
  EXPECT_TRUE(refused(q.to(at::kLong), k, v, {"query", "floating", "Long"}));
  EXPECT_TRUE(refused(q.to(at::kComplexDouble), k, v, {"query", "floating", "ComplexDouble"}));
  EXPECT_TRUE(refused(q, k.to(at::kFloat), v, {"key", "Double", "Float"}));
  EXPECT_TRUE(refused(q, k, v.to(at::kHalf), {"value", "Double", "Half"}));
  EXPECT_TRUE(refused(q, k.to(at::kMeta), v, {"key", "cpu", "meta"}));
}

TEST(ScaledDotProductAttentionTest, OptionsWithoutAMeaningAreRefused) {
  const auto in = draw_inputs();
  const auto refused_options = [&](const AttentionOptions& options,
                                   std::initializer_list<std::string> words) {
    return refuses([&] { attend(in, {}, options); }, words);
  };
  EXPECT_TRUE(refused_options(AttentionOptions().dropout(-0.5), {"dropout", "[0, 1]", "-0.5"}));
  EXPECT_TRUE(refused_options(AttentionOptions().dropout(1.5), {"dropout", "[0, 1]", "1.5"}));
  EXPECT_TRUE(refused_options(AttentionOptions().dropout(nan), {"dropout", "[0, 1]", "nan"}));
  EXPECT_TRUE(refused_options(AttentionOptions().scale(nan), {"scale", "finite", "nan"}));
  EXPECT_TRUE(
      refused_options(AttentionOptions().scale(-1.0 / 0.0), {"scale", "finite", "-inf"}));
}

}  // namespace
}  // namespace mha
