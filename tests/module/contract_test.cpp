// Guards the small cases that public reports found wrong in other libraries. Each has one right
// result that can be worked out by hand; tolerances are a few roundings of a number near 1.
#include <mha/multi_head_attention.h>
#include <mha/scaled_dot_product_attention.h>

#include "support/expect.h"
#include "support/oracle.h"

namespace mha {
namespace {

using test::all_zero;
using test::is_bit_equal;
using test::is_close;
using test::is_finite;
using test::is_same_result;
using test::leaf;
using test::nan;
using test::refuses;
using test::visible;

MultiHeadAttention small_module() {
  torch::manual_seed(71);
  return MultiHeadAttention(4, 2);
}

TEST(KnownCaseTest, ABoolUpperTriangleThatBlocksIsCausal) {
  auto module = small_module();
  const auto blocked = at::ones({3, 3}, at::kBool).triu(1);
  const auto weights =
      module->forward(at::randn({1, 3, 4}), {}, {}, Mask::block(blocked)).weights;
  for (int64_t h = 0; h < 2; ++h) {
    const at::Tensor map = weights[0][h];
    EXPECT_TRUE(is_bit_equal(map[0], torch::tensor({1.f, 0.f, 0.f})));
    EXPECT_EQ(map[1][2].item<float>(), 0.f);
    EXPECT_GT(map[1][0].item<float>(), 0.f);
    EXPECT_GT(map[1][1].item<float>(), 0.f);
    EXPECT_NEAR(map[1][0].item<float>() + map[1][1].item<float>(), 1.f, 1e-6f);
  }
}

TEST(KnownCaseTest, ChangingOneSampleLeavesTheOtherUnchanged) {
  auto module = small_module();
  const auto x = at::randn({2, 3, 4});
  auto changed = x.clone();
  changed[1] += 1;
  const auto a = module(x), b = module(changed);
  EXPECT_TRUE(is_same_result(b.output[0], a.output[0]));
  EXPECT_TRUE(is_same_result(b.weights[0], a.weights[0]));
  EXPECT_FALSE(at::equal(b.output[1], a.output[1]));
}

TEST(KnownCaseTest, DistinctLeavesOfEqualValuesGetThreeSeparateGradients) {
  auto module = small_module();
  const auto x = at::randn({2, 3, 4});
  const auto query = leaf(x), key = leaf(x), value = leaf(x);
  const auto upstream = at::randn({2, 3, 4});
  (module(query, key, value).output * upstream).sum().backward();
  const auto expected =
      test::oracle_module_backward(module, x, x, x, Mask(), upstream, at::Tensor());
  EXPECT_TRUE(is_close(query.grad(), expected.query, 2e-6));
  EXPECT_TRUE(is_close(key.grad(), expected.key, 2e-6));
  EXPECT_TRUE(is_close(value.grad(), expected.value, 2e-6));
}

TEST(KnownCaseTest, APaddedQueryWhoseWindowHoldsOnlyPaddingIsDead) {
  auto module = small_module();
  const auto x = leaf(at::randn({2, 4, 4}));
  const Mask mask = Mask::window(1, 0) & Mask::lengths(torch::tensor({4, 2}));
  const auto [output, weights] = module->forward(x, x, x, mask);
  EXPECT_TRUE(all_zero(weights[1].select(1, 3)));
  EXPECT_TRUE(is_bit_equal(output[1][3], module->W_o->bias));
  output.sum().backward();
  EXPECT_TRUE(is_finite(x.grad()));
  for (const auto& parameter : module->named_parameters()) {
    EXPECT_TRUE(is_finite(parameter->grad())) << parameter.key();
  }
}

TEST(KnownCaseTest, ASampleOfLengthZeroLeavesTheOtherAsAlone) {
  auto module = small_module();
  const auto x = at::randn({2, 3, 4});
  const auto both = module->forward(x, {}, {}, Mask::lengths(torch::tensor({3, 0})));
  const auto alone = module(x.narrow(0, 0, 1));
  EXPECT_TRUE(is_close(both.output[0], alone.output[0], 1e-6));
  EXPECT_TRUE(is_close(both.weights[0], alone.weights[0], 1e-6));
  EXPECT_TRUE(all_zero(both.weights[1]));
  EXPECT_TRUE(is_bit_equal(both.output[1], module->W_o->bias.expand({3, 4})));
}

TEST(KnownCaseTest, TwoQueriesOverSixKeysAreCausalFromTheChosenCorner) {
  EXPECT_EQ(visible(Mask::causal(), {1, 1, 2, 6}), "xxxxx. xxxxxx");
  EXPECT_EQ(visible(Mask::causal(Mask::Alignment::top_left), {1, 1, 2, 6}), "x..... xx....");
}

TEST(KnownCaseTest, FiveQueriesOverTwoKeysStartWithThreeEmptyRows) {
  EXPECT_EQ(visible(Mask::causal(), {1, 1, 5, 2}), ".. .. .. x. xx");
}

TEST(KnownCaseTest, TheFirstOfThreeMaskDimensionsIsTheBatchWhereBatchAndHeadsAreEqual) {
  auto mask = at::ones({2, 3, 3});
  mask[1].select(1, 0).fill_(0);
  const auto weights = test::uniform_weights(Mask::keep(mask), {2, 2, 3, 3});
  for (int64_t h = 0; h < 2; ++h) {
    EXPECT_EQ(test::picture(weights[0][h]), "xxx xxx xxx");
    EXPECT_EQ(test::picture(weights[1][h]), ".xx .xx .xx");
  }
}

TEST(KnownCaseTest, AnAddedFloatMaskIsAddedToTheScores) {
  torch::manual_seed(72);
  const auto query = at::randn({1, 1, 1, 4}, at::kDouble),
             key = at::randn({1, 1, 2, 4}, at::kDouble);
  const auto added = torch::tensor({{1.0, 2.0}}, at::kDouble);
  const auto scores = query.matmul(key.transpose(-2, -1)) / 2.0;
  EXPECT_TRUE(
      is_close(mha::scaled_dot_product_attention(query, key, key, Mask::add(added)).weights,
               (scores + added).softmax(-1), 1e-15));
}

TEST(KnownCaseTest, OptionsWithoutAMeaningAreRefusedByTheConstructorWithTheirValue) {
  using Options = MultiHeadAttentionOptions;
  const auto refused = [](const Options& wrong, std::initializer_list<std::string> words) {
    return refuses([&] { MultiHeadAttention module(wrong); }, words);
  };
  EXPECT_TRUE(refused(Options(8, 0), {"num_heads", "0"}));
  EXPECT_TRUE(refused(Options(-8, 2), {"d_model", "-8"}));
  EXPECT_TRUE(refused(Options(8, 2).dropout(-1), {"dropout", "-1"}));
  EXPECT_TRUE(refused(Options(8, 2).dropout(1.5), {"dropout", "1.5"}));
  EXPECT_TRUE(refused(Options(8, 2).dropout(nan), {"dropout", "nan"}));
}

TEST(KnownCaseTest, ThreeSamplesOfQueryWithFourOfKeyAndValueAreRefused) {
  auto module = small_module();
  const auto query = at::randn({3, 5, 4}), key = at::randn({4, 5, 4});
  EXPECT_TRUE(refuses([&] { module(query, key, key); }, {"query", "key", "3", "4"}));
}

TEST(KnownCaseTest, HalfScoresBeyondTheRangeOfHalfStayFinite) {
  // q . k = 64 * 64 * 64 = 262144, four times the largest half, and 32768 when scaled by 1 / 8.
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    const auto query = at::full({1, 1, 1, 64}, 64, dtype);
    const auto key = at::stack({at::full({64}, 64, dtype), at::full({64}, -64, dtype),
                                at::full({64}, 64, dtype)})
                         .view({1, 1, 3, 64});
    const auto [output, weights] = mha::scaled_dot_product_attention(query, key, key);
    EXPECT_TRUE(is_bit_equal(weights.flatten(), torch::tensor({0.5, 0.0, 0.5}).to(dtype)));
    EXPECT_TRUE(is_bit_equal(output, query));
  }
}

TEST(KnownCaseTest, ALongWindowWithoutWeightsEqualsTheOneWithWeights) {
  torch::manual_seed(73);
  const auto x = at::randn({1, 2, 600, 8});
  for (const Mask& mask : {Mask::window(10, 0), Mask::window(0, 10)}) {
    const auto with = mha::scaled_dot_product_attention(x, x, x, mask);
    const auto without = mha::scaled_dot_product_attention(
        x, x, x, mask, AttentionOptions().weights(Weights::none));
    EXPECT_TRUE(is_finite(without.output));
    EXPECT_TRUE(is_close(without.output, with.output, 1e-6));
  }
}

TEST(KnownCaseTest, AModuleClonedAfterFreezingAParameterStaysFrozen) {
  auto module = small_module();
  module->W_v->weight.set_requires_grad(false);
  const auto state = at::detail::getDefaultCPUGenerator().get_state();
  const auto copy = std::dynamic_pointer_cast<MultiHeadAttentionImpl>(module->clone());
  EXPECT_TRUE(is_bit_equal(at::detail::getDefaultCPUGenerator().get_state(), state));
  for (const auto& parameter : copy->named_parameters()) {
    EXPECT_EQ(parameter->requires_grad(), parameter.key() != "W_v.weight") << parameter.key();
  }
  const auto x = at::randn({2, 3, 4});
  EXPECT_TRUE(is_same_result(copy->forward(x).output, module(x).output));
}

TEST(KnownCaseTest, ALossOnOneCellOfTheWeightsReachesTheProjectionsOfQueryAndKey) {
  auto module = small_module();
  module(at::randn({2, 3, 4})).weights[1][0][2][1].backward();
  const auto nonzero = [](const torch::nn::Linear& linear) {
    return linear->weight.grad().defined() &&
           linear->weight.grad().abs().sum().item<float>() > 0;
  };
  EXPECT_TRUE(nonzero(module->W_q));
  EXPECT_TRUE(nonzero(module->W_k));
  // The first head's two rows only.
  EXPECT_TRUE(all_zero(module->W_q->weight.grad().slice(0, 2)));
}

}  // namespace
}  // namespace mha
