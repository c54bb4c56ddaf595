// Guards dropout on the attention weights: what it does to them, which weights come back, and
// that one seed gives one pattern. Statistics use a fixed seed and allow 5 standard deviations.
#include <mha/multi_head_attention.h>
#include <mha/scaled_dot_product_attention.h>

#include <cmath>

#include "support/expect.h"
#include "support/thread_count.h"

namespace mha {
namespace {

using test::all_zero;
using test::is_bit_equal;
using test::is_close;
using test::is_same_result;
using test::leaf;

constexpr int64_t S = 5;

struct Inputs {
  at::Tensor query, key, value;
};
Inputs draw_inputs(int64_t queries = 4) {
  torch::manual_seed(31);
  return {at::randn({2, 3, queries, 6}), at::randn({2, 3, S, 6}), at::randn({2, 3, S, 7})};
}
AttentionOutput attend(const Inputs& in, const AttentionOptions& options,
                       const Mask& mask = {}) {
  torch::manual_seed(32);
  return mha::scaled_dot_product_attention(in.query, in.key, in.value, mask, options);
}
AttentionOptions dropout(double p) {
  return AttentionOptions().dropout(p);
}

TEST(DropoutTest, ProbabilityZeroIsBitEqualToNoDropout) {
  const auto in = draw_inputs();
  const auto none = attend(in, {}), zero = attend(in, dropout(0.0));
  EXPECT_TRUE(is_same_result(zero.output, none.output));
  EXPECT_TRUE(is_same_result(zero.weights, none.weights));
}

TEST(DropoutTest, ProbabilityOneGivesZerosAndGradientsOfZero) {
  const auto drawn = draw_inputs();
  const Inputs in{leaf(drawn.query), leaf(drawn.key), leaf(drawn.value)};
  const auto result = attend(in, dropout(1.0).weights_after_dropout(true), Mask::causal());
  EXPECT_TRUE(all_zero(result.output));
  EXPECT_TRUE(all_zero(result.weights));
  (result.output.sum() + result.weights.sum()).backward();
  EXPECT_TRUE(all_zero(in.query.grad()));
  EXPECT_TRUE(all_zero(in.key.grad()));
  EXPECT_TRUE(all_zero(in.value.grad()));
}

TEST(DropoutTest, AWeightIsDroppedOrMultipliedByOneOverOneMinusP) {
  const auto in = draw_inputs(400);
  for (const double p : {0.1, 0.5, 0.9}) {
    const auto full = attend(in, {}).weights;
    const auto after = attend(in, dropout(p).weights_after_dropout(true)).weights;
    const auto dropped = after.eq(0);
    EXPECT_TRUE(is_close(after, (full / (1 - p)).masked_fill(dropped, 0), 1e-6 / (1 - p))) << p;
    const double count = static_cast<double>(full.numel());
    EXPECT_NEAR(dropped.sum().item<double>() / count, p, 5 * std::sqrt(p * (1 - p) / count));
  }
}

TEST(DropoutTest, ReturnedWeightsAreThoseBeforeDropoutByDefault) {
  const auto in = draw_inputs();
  EXPECT_TRUE(is_same_result(attend(in, dropout(0.5)).weights, attend(in, {}).weights));
  EXPECT_TRUE(
      is_same_result(attend(in, dropout(0.5).weights(Weights::averaged)).weights,
                     attend(in, AttentionOptions().weights(Weights::averaged)).weights));
}

TEST(DropoutTest, ReturnedWeightsAfterDropoutAreTheOnesInTheOutput) {
  const auto in = draw_inputs();
  const auto after = attend(in, dropout(0.5).weights_after_dropout(true));
  EXPECT_GT(after.weights.eq(0).sum().item<int64_t>(), 0);
  EXPECT_TRUE(is_close(after.output, after.weights.matmul(in.value), 1e-6));
  const auto averaged =
      attend(in, dropout(0.5).weights_after_dropout(true).weights(Weights::averaged));
  EXPECT_TRUE(is_close(averaged.weights, after.weights.mean(1), 1e-6));
}

TEST(DropoutTest, OneSeedGivesOnePatternWhateverIsReturned) {
  const auto in = draw_inputs();
  const auto output = attend(in, dropout(0.5)).output;
  for (const auto kind : {Weights::none, Weights::averaged, Weights::per_head}) {
    for (const bool after : {false, true}) {
      EXPECT_TRUE(is_same_result(
          attend(in, dropout(0.5).weights(kind).weights_after_dropout(after)).output, output))
          << kind;
    }
  }
}

TEST(DropoutTest, OneSeedGivesOnePatternAtAnyNumberOfThreads) {
  const auto in = draw_inputs(300);
  const auto output = attend(in, dropout(0.5)).output;
  for (const int count : {1, 2, 4, 8}) {
    const test::ThreadCount threads(count);
    EXPECT_TRUE(is_same_result(attend(in, dropout(0.5)).output, output)) << count;
  }
}

TEST(DropoutTest, AnotherSeedGivesAnotherPattern) {
  const auto in = draw_inputs();
  const auto first = attend(in, dropout(0.5)).output;  // leaves the generator further on
  const auto second =
      mha::scaled_dot_product_attention(in.query, in.key, in.value, {}, dropout(0.5)).output;
  EXPECT_FALSE(at::equal(first, second));
}

TEST(DropoutTest, BlockedPairsAndDeadRowsStayZero) {
  const auto in = draw_inputs();
  const Mask mask = Mask::causal() & Mask::lengths(torch::tensor({3, 0}));
  const auto result = attend(in, dropout(0.3).weights_after_dropout(true), mask);
  const auto allowed = attend(in, {}, mask).weights.ne(0);
  EXPECT_TRUE(all_zero(result.weights.masked_select(~allowed)));
  EXPECT_TRUE(all_zero(result.output[1]));
}

// The module drops in training mode only.
MultiHeadAttention module_with(double p) {
  torch::manual_seed(33);
  return MultiHeadAttention(MultiHeadAttentionOptions(12, 3).dropout(p));
}

TEST(DropoutTest, AModuleInEvaluationModeIsBitEqualToOneWithoutDropout) {
  auto with = module_with(0.5), without = module_with(0.0);
  with->eval();
  const auto x = at::randn({2, 4, 12});
  EXPECT_TRUE(is_same_result(with(x).output, without(x).output));
  EXPECT_TRUE(is_same_result(with(x).weights, without(x).weights));
}

TEST(DropoutTest, AModuleInTrainingModeDropsAndReturnsTheWeightsThatItsOptionAsksFor) {
  const auto x = at::randn({2, 4, 12});
  auto module = module_with(0.5), without = module_with(0.0);
  torch::manual_seed(34);
  const auto before = module(x);
  EXPECT_FALSE(at::equal(before.output, without(x).output));
  EXPECT_TRUE(is_same_result(before.weights, without(x).weights));
  module->options.weights_after_dropout(true);
  torch::manual_seed(34);
  const auto after = module(x);
  EXPECT_TRUE(is_same_result(after.output, before.output));
  EXPECT_TRUE(
      is_close(after.weights, (2 * before.weights).masked_fill(after.weights.eq(0), 0), 1e-6));
  EXPECT_GT(after.weights.eq(0).sum().item<int64_t>(), 0);
}

TEST(DropoutTest, AModuleThatDropsEverythingReturnsTheBiasOfItsOutputProjection) {
  auto module = module_with(1.0);
  const auto x = leaf(at::randn({2, 4, 12}));
  const auto output = module(x).output;
  EXPECT_TRUE(is_bit_equal(output, module->W_o->bias.expand({2, 4, 12})));
  output.sum().backward();
  EXPECT_TRUE(all_zero(x.grad()));
  EXPECT_TRUE(all_zero(module->W_q->weight.grad()));
  EXPECT_TRUE(all_zero(module->W_v->weight.grad()));
}

}  // namespace
}  // namespace mha
