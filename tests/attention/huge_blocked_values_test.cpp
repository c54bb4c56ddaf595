// Guards that a large finite number behind a mask has no effect either, though sums with it
// leave float32's range: in keys and values that are blocked, for all queries or for some, in
// queries that see nothing and in their output's gradient; on results, gradients of first and
// second order, and what a map says. Comparisons are bit-equal to the call with zeros there.
#include <mha/attention_map.h>
#include <mha/scaled_dot_product_attention.h>

#include <string>
#include <vector>

#include "support/expect.h"

namespace mha {
namespace {

using test::is_close;
using test::is_same_but_for_blas;
using test::is_same_result;
using test::leaf;

constexpr int64_t N = 2, H = 4, Hk = 2, D = 8;
constexpr double huge[] = {1e38, 3e38, -3e38};

TEST(HugeBlockedValuesTest, AFiniteValueBehindAMaskLeavesTheQuerysGradientAt042) {
  const auto query = leaf(at::ones({1, 1, 1, 4})), key = leaf(at::ones({1, 1, 3, 4}));
  const auto value = leaf(at::ones({1, 1, 3, 4})), added = leaf(at::zeros({1, 3}));
  {
    const at::NoGradGuard no_grad;
    key.select(2, 2).fill_(2);
    value.select(2, 2).fill_(3);
    value.select(2, 1).fill_(1e38);
  }
  const auto mask = Mask::keep_keys(torch::tensor({1, 0, 1})) & Mask::add(added);
  mha::scaled_dot_product_attention(query, key, value, mask).output.sum().backward();
  // Weights softmax(2, 4); their gradients 4 and 12; the scores' -x and x with
  // x = p (1 - p) (12 - 4) = 0.83994867; and scale 1/2.
  EXPECT_TRUE(is_close(query.grad(), at::full({1, 1, 1, 4}, 0.41997434), 1e-6));
  const auto of_keys = torch::tensor({-0.41997434, 0.0, 0.41997434}).view({1, 1, 3, 1});
  EXPECT_TRUE(is_close(key.grad(), of_keys.expand({1, 1, 3, 4}), 1e-6));
  EXPECT_TRUE(
      is_close(added.grad(), torch::tensor({-0.83994867, 0.0, 0.83994867}).view({1, 3}), 2e-6));
}

// Components of both signs, so that products with them sum to NaN as well as to infinity.
at::Tensor in_both_signs(double number, at::ScalarType dtype) {
  auto row = at::full({D}, number, dtype);
  row.slice(0, 0, D, 3).neg_();
  return row;
}

struct HugeCase {
  std::string name;
  int64_t queries, keys;
  Mask mask;
  at::Tensor allowed;  // (N, H, L, S)
};

at::Tensor uniform_allowed(const Mask& mask, int64_t queries, int64_t keys) {
  return test::uniform_weights(mask, {N, H, queries, keys}).ne(0);
}

std::vector<HugeCase> huge_cases() {
  torch::manual_seed(31);
  std::vector<HugeCase> cases;
  for (const auto& [l, s] :
       {std::pair<int64_t, int64_t>{5, 9}, {50, 60}, {2, 700}, {20, 300}}) {
    auto dead_rows = at::rand({l, s}).gt(0.4);
    dead_rows[0].fill_(false);
    dead_rows[l - 1].fill_(false);
    for (const auto& [name, mask] :
         {std::pair<const char*, Mask>{
              "key padding", Mask::keep_keys(at::rand({N, s}).gt(0.3)) &
                                 Mask::lengths(torch::tensor(std::vector<int64_t>{s, s / 2}))},
          {"an empty sample", Mask::lengths(torch::tensor(std::vector<int64_t>{0, s}))},
          {"causal", Mask::causal(Mask::Alignment::top_left)},
          {"window", Mask::window(1, 0)},
          {"pairs with dead rows", Mask::keep(dead_rows)},
          {"pairs by head", Mask::block(at::rand({N, H, l, s}).gt(0.5))},
          {"documents", Mask::documents(at::arange(l).div(3, "floor"),
                                        at::arange(s).div(4, "floor") + 1)}}) {
      cases.push_back(
          {std::string(name) + " L=" + std::to_string(l) + " S=" + std::to_string(s), l, s,
           mask, uniform_allowed(mask, l, s)});
    }
  }
  return cases;
}

struct HugeInputs {
  at::Tensor query, key, value, grad_output;
};

struct Scored {
  const char* name;
  AttentionOptions options;
  bool adds;
};

std::vector<Scored> scorings() {
  return {{"plain scores", AttentionOptions(), false},
          {"added terms", AttentionOptions(), true},
          {"soft cap and sinks", AttentionOptions().softcap(2).sinks(at::ones({H})), true},
          {"dropout", AttentionOptions().dropout(0.3), false}};
}

// Output, weights if wanted, and the gradients of everything that has one.
std::vector<at::Tensor> results_of(const HugeCase& c, const HugeInputs& in,
                                   const Scored& scored, Weights weights) {
  torch::manual_seed(33);
  const auto added = leaf(at::randn({c.queries, c.keys}));
  const auto table = leaf(at::randn({H, c.queries + c.keys - 1}));
  std::vector<at::Tensor> leaves{leaf(in.query), leaf(in.key), leaf(in.value)};
  Mask mask = c.mask;
  if (scored.adds) {
    mask = mask & Mask::add(added) & Mask::relative(table);
    leaves.insert(leaves.end(), {added, table});
  }
  auto options = AttentionOptions(scored.options).weights(weights);
  if (options.sinks().defined()) {
    options.sinks(leaf(options.sinks()));
    leaves.push_back(options.sinks());
  }
  const auto [output, map] =
      mha::scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], mask, options);
  auto results = torch::autograd::grad({output}, leaves, {in.grad_output});
  results.push_back(output.detach());
  if (map.defined()) results.push_back(map.detach());
  const at::NoGradGuard no_grad;
  const auto without =
      mha::scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], mask, options);
  results.push_back(without.output);
  return results;
}

HugeInputs draw_huge_inputs(const HugeCase& c, at::ScalarType dtype) {
  torch::manual_seed(32);
  const auto draw = [&](int64_t heads, int64_t tokens) {
    return at::randn({N, heads, tokens, D}).to(dtype);
  };
  return {draw(H, c.queries), draw(Hk, c.keys), draw(Hk, c.keys), draw(H, c.queries)};
}

at::Tensor with_rows(const at::Tensor& tensor, const at::Tensor& where, const at::Tensor& row) {
  return at::where(where.unsqueeze(-1), row, tensor);
}

// `inputs` with `row` wherever a mask keeps it from everything.
HugeInputs with_blocked(const HugeCase& c, HugeInputs inputs, const at::Tensor& row) {
  const auto unseen =
      c.allowed.any(2).view({N, Hk, H / Hk, c.keys}).any(2).logical_not();  // (N, Hk, S)
  const auto dead = c.allowed.any(3).logical_not();                         // (N, H, L)
  inputs.key = with_rows(inputs.key, unseen, row);
  inputs.value = with_rows(inputs.value, unseen, row);
  inputs.query = with_rows(inputs.query, dead, row);
  inputs.grad_output = with_rows(inputs.grad_output, dead, row);
  return inputs;
}

void expect_equal_results(const std::vector<at::Tensor>& actual,
                          const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(is_same_result(actual[i], expected[i])) << "result " << i;
  }
}

// The same of what LibTorch's products have a part in on every path.
void expect_equal_but_for_blas(const std::vector<at::Tensor>& actual,
                               const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(is_same_but_for_blas(actual[i], expected[i])) << "result " << i;
  }
}

TEST(HugeBlockedValuesTest, WhatAMaskKeepsFromEverythingHasNoEffectInAnyDtype) {
  for (const auto& c : huge_cases()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const auto inputs = draw_huge_inputs(c, dtype);
      for (const auto& scored : scorings()) {
        for (const auto weights : {Weights::none, Weights::per_head}) {
          if (weights == Weights::per_head && dtype != at::kFloat) continue;
          const auto zeros = with_blocked(c, inputs, at::zeros({D}, dtype));
          const auto expected = results_of(c, zeros, scored, weights);
          const double number = huge[(c.queries + c.keys) % 3];
          SCOPED_TRACE(c.name + ", " + scored.name + ", " + c10::toString(dtype));
          const auto actual = results_of(
              c, with_blocked(c, inputs, in_both_signs(number, dtype)), scored, weights);
          expect_equal_results(actual, expected);
        }
      }
    }
  }
}

TEST(HugeBlockedValuesTest, TheLargestFloat16BehindAMaskHasNoEffect) {
  const auto c = huge_cases().front();
  const auto inputs = draw_huge_inputs(c, at::kHalf);
  for (const auto& scored : scorings()) {
    const auto expected = results_of(c, with_blocked(c, inputs, at::zeros({D}, at::kHalf)),
                                     scored, Weights::none);
    const auto actual = results_of(c, with_blocked(c, inputs, in_both_signs(65504, at::kHalf)),
                                   scored, Weights::none);
    SCOPED_TRACE(scored.name);
    expect_equal_results(actual, expected);
  }
}

// A key that some queries see and others do not: what those that do not see it get.
TEST(HugeBlockedValuesTest, ARowIsNotReachedByWhatOnlyOthersSee) {
  for (const auto& c : huge_cases()) {
    const auto inputs = draw_huge_inputs(c, at::kFloat);
    for (const int64_t j : {int64_t{0}, c.keys / 2, c.keys - 1}) {
      const auto sees = c.allowed.select(3, j);  // (N, H, L)
      for (const auto& scored : scorings()) {
        SCOPED_TRACE(c.name + ", " + scored.name + ", key " + std::to_string(j));
        HugeInputs zeros = inputs, large = inputs;
        for (const bool at_key : {true, false}) {
          auto& zeroed = at_key ? zeros.key : zeros.value;
          auto& target = at_key ? large.key : large.value;
          zeroed = zeroed.clone(), target = target.clone();
          zeroed.select(2, j).fill_(0);
          target.select(2, j).copy_(in_both_signs(3e38, at::kFloat));
        }
        // Nothing flows back from the rows that see it.
        for (auto* in : {&zeros, &large}) {
          in->grad_output = inputs.grad_output.masked_fill(sees.unsqueeze(-1), 0);
        }
        const auto expected = results_of(c, zeros, scored, Weights::none);
        const auto actual = results_of(c, large, scored, Weights::none);
        const auto others = [&](const at::Tensor& t) {
          return t.masked_fill(sees.unsqueeze(-1), 0);
        };
        EXPECT_TRUE(is_same_result(others(actual[0]), others(expected[0]))) << "query gradient";
        const size_t output = actual.size() - 2;
        EXPECT_TRUE(is_same_result(others(actual[output]), others(expected[output])));
        EXPECT_TRUE(is_same_result(others(actual.back()), others(expected.back())));
      }
    }
  }
}

TEST(HugeBlockedValuesTest, GradientsOfGradientsAreNotReached) {
  const auto second_order = [](const HugeCase& c, const HugeInputs& in) {
    std::vector<at::Tensor> leaves{leaf(in.query), leaf(in.key), leaf(in.value)};
    const auto options = AttentionOptions().softcap(2).weights(Weights::none);
    const auto output =
        mha::scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], c.mask, options)
            .output;
    auto first = torch::autograd::grad({output}, leaves, {in.grad_output}, true, true);
    const auto sum =
        first[0].square().sum() + first[1].square().sum() + first[2].square().sum();
    const auto second = torch::autograd::grad({sum}, leaves);
    first.insert(first.end(), second.begin(), second.end());
    return first;
  };
  for (const auto& c : huge_cases()) {
    if (c.keys > 60) continue;
    SCOPED_TRACE(c.name);
    const auto inputs = draw_huge_inputs(c, at::kFloat);
    const auto zeros = with_blocked(c, inputs, at::zeros({D}));
    const auto expected = second_order(c, zeros);
    for (const double number : huge) {
      expect_equal_but_for_blas(
          second_order(c, with_blocked(c, inputs, in_both_signs(number, at::kFloat))),
          expected);
    }
  }
}

TEST(HugeBlockedValuesTest, WhatAMapSaysAndItsGradientAreNotReached) {
  const auto said = [](const HugeCase& c, const HugeInputs& in) {
    const auto query = leaf(in.query), key = leaf(in.key);
    const auto options = AttentionOptions().softcap(2);
    const AttentionMap map(query, key, c.mask & Mask::alibi(at::ones({H})), options);
    const auto summary = map.summary();
    std::vector<at::Tensor> results{summary.entropy, summary.received, summary.distance,
                                    map.dense(),     map.mean(),       map.top_k(2).values,
                                    map.pooled(2, 3)};
    const auto sum = summary.entropy.sum() + map.dense().square().sum();
    for (const auto& grad : torch::autograd::grad({sum}, {query, key})) results.push_back(grad);
    for (auto& result : results) result = result.detach();
    const auto sums = map.log_sum_exp().detach();
    results.push_back(sums);
    return results;
  };
  for (const auto& c : huge_cases()) {
    if (c.keys > 300) continue;
    SCOPED_TRACE(c.name);
    const auto inputs = draw_huge_inputs(c, at::kFloat);
    const auto expected = said(c, with_blocked(c, inputs, at::zeros({D})));
    for (const double number : huge) {
      expect_equal_but_for_blas(
          said(c, with_blocked(c, inputs, in_both_signs(number, at::kFloat))), expected);
    }
  }
}

}  // namespace
}  // namespace mha
