// Guards the path by at::scaled_dot_product_attention: that it gives what the composition of
// ATen calls gives, gradients included, whatever lies behind a mask.
#include "attention/torch_attention.h"

#include <cmath>
#include <limits>

#include "attention/torch_attention_case.h"
#include "mask/dense_mask.h"

namespace mha::detail {
namespace {

void compare(const Heads& heads, const ResolvedMask& mask, const AttentionCall& call,
             const at::Tensor& grad, double within = tolerance) {
  const auto form = torch_form(heads.query, heads.key, heads.value, mask, call);
  ASSERT_FALSE(form.refusal) << form.refusal;
  const auto by_torch = outcome(heads, grad, [&](auto& q, auto& k, auto& v) {
    return torch_attention(q, k, v, mask, call, form).output;
  });
  const auto composed = outcome(heads, grad, [&](auto& q, auto& k, auto& v) {
    return plain_attention(q, k, v, mask, call).output;
  });
  expect_same(by_torch, composed, within);
}

TEST_F(TorchAttentionTest, ResultsAndGradientsAreThoseOfTheComposition) {
  int64_t served = 0;
  for (int64_t seed = 0; seed < 120; ++seed) {
    SCOPED_TRACE(seed);
    auto s = draw_setting(seed);
    s.call.weights = Weights::none;
    s.call.dropout = s.call.scoring.softcap = 0;
    s.call.scoring.sinks = at::Tensor();
    const Heads heads = [&] {
      torch::manual_seed(seed);
      const auto number = torch::TensorOptions(torch::kDouble);
      const int64_t keys = s.keys + s.extra;
      // One transposed, as a module's heads are.
      return Heads{
          torch::randn({s.batch, s.queries, s.heads, s.head_dim}, number).transpose(1, 2),
          torch::randn({s.batch, s.kv_heads, keys, s.head_dim}, number),
          torch::randn({s.batch, s.kv_heads, keys, s.value_dim}, number)};
    }();
    const auto mask = resolved_mask(s);
    if (torch_form(heads.query, heads.key, heads.value, mask, s.call).refusal) continue;
    ++served;
    compare(heads, mask, s.call,
            torch::randn({s.batch, s.heads, s.queries, s.value_dim}, torch::kDouble));
  }
  EXPECT_GT(served, 60);
}

TEST_F(TorchAttentionTest, EveryCutOfACausalMaskMeansTheSame) {
  for (const auto alignment : {Mask::Alignment::top_left, Mask::Alignment::bottom_right}) {
    for (const Sizes s : {Sizes{7, 7}, Sizes{1, 5}, Sizes{5, 7}, Sizes{2, 9}, Sizes{9, 4},
                          Sizes{5, 1}, Sizes{6, 6, 4, 4, 8, 3}, Sizes{6, 6, 4, 1, 3, 8}}) {
      SCOPED_TRACE(c10::str(s.queries, " queries, ", s.keys, " keys"));
      const auto heads = draw_heads(s);
      compare(heads, resolved(Mask::causal(alignment), s), call_for(8),
              torch::randn({2, s.heads, s.queries, s.value_dim}, torch::kDouble));
    }
  }
}

// LibTorch's kernels take rows of numbers side by side; any others are copied.
TEST_F(TorchAttentionTest, AnyStridesAreTaken) {
  const Sizes s{6, 6, 4, 4};
  auto heads = draw_heads(s);
  heads.query = heads.query.transpose(2, 3).contiguous().transpose(2, 3);
  heads.key = heads.key.narrow(2, 0, 1).expand({2, 4, 6, 8});
  heads.value = torch::randn({2, 4, 13}, torch::kDouble).unfold(2, 8, 1);
  ASSERT_EQ(heads.value.size(2), 6);
  compare(heads, resolved(Mask::causal(), s), call_for(8),
          torch::randn({}, torch::kDouble).expand({2, 4, 6, 8}));
}

// NaN and infinity, behind a mask and in front of it, in the inputs and in the gradient.
TEST_F(TorchAttentionTest, WhatIsNotFiniteGoesWhereTheCompositionLetsIt) {
  const Sizes s{6, 8};
  const auto masks = {Mask::causal(), Mask::lengths(torch::tensor({3, 8})),
                      Mask::block(torch::eye(6, 8, torch::kBool)), Mask::window(1, 1), Mask()};
  const double values[] = {NAN, INFINITY, 1e300};
  int64_t which = 0;
  for (const auto& mask : masks) {
    for (const double value : values) {
      for (const int64_t place : {0, 3, 7}) {
        SCOPED_TRACE(c10::str("mask ", which / 9, ", ", value, " at ", place));
        ++which;
        auto heads = draw_heads(s);
        auto grad = torch::randn({2, 4, 6, 8}, torch::kDouble);
        heads.key.select(2, place).fill_(value);
        heads.value.select(2, place).fill_(value);
        if (value == 1e300) heads.query.mul_(1e10);  // whose scores overflow
        if (place == 3) grad.select(2, 2).fill_(NAN);
        // Gradients by keys are multiples of queries of 1e10, of which a rounding of 10 is
        // 1e-5.
        compare(heads, resolved(mask, s), call_for(8), grad, value == 1e300 ? 1e-4 : tolerance);
      }
    }
  }
}

// One place of an input that is not finite.
Heads with_one_unknown(Heads heads, int64_t kind) {
  if (kind == 0) heads.key.select(2, 2).select(2, 1).fill_(NAN);
  if (kind == 1) heads.value.select(2, 2).select(2, 5).fill_(NAN);
  if (kind == 2) {
    heads.value.select(2, 1).select(2, 5).fill_(INFINITY);
    heads.value.select(2, 3).select(2, 5).fill_(-INFINITY);
  }
  if (kind == 3) heads.query.select(2, 4).select(2, 0).fill_(NAN);
  return heads;
}

// What other devices do where a look at the numbers would wait for them.
TEST_F(TorchAttentionTest, NaNReachesTheRowsThatSeeItWithoutALookAtAnyNumber) {
  const auto call = call_for(8);
  const auto block = torch::eye(6, 6, torch::kBool);
  block.select(0, 5).fill_(true);
  for (const Sizes s : {Sizes{7, 7}, Sizes{5, 7}, Sizes{9, 4}, Sizes{6, 6}}) {
    for (const auto& mask :
         {Mask::causal(Mask::Alignment::top_left), Mask::causal(), Mask::window(1, 1),
          Mask::block(block), Mask::keep_keys(torch::arange(s.keys).ne(2))}) {
      if (s.queries != 6 && mask.terms()[0].kind == Mask::Term::Kind::block) continue;
      for (int64_t kind = 0; kind < 4; ++kind) {
        SCOPED_TRACE(
            c10::str(s.queries, " queries, ", s.keys, " keys, kind ", kind, ", ", mask));
        const auto [query, key, value] = with_one_unknown(draw_heads(s), kind);
        const auto sorted = resolved(mask, s);
        const auto form = torch_form(query, key, value, sorted, call);
        ASSERT_FALSE(form.refusal) << form.refusal;
        const double scale = call.scoring.scale;
        const auto actual = form.pairs == Pairs::causal
                                ? causal_without_reading(query, key, value, scale, form)
                                : masked_without_reading(query, key, value, sorted, scale);
        EXPECT_TRUE(is_close(actual, plain_attention(query, key, value, sorted, call).output,
                             tolerance));
      }
    }
  }
}

// A row of the mask that blocks everything has output 0, whatever its query is.
TEST_F(TorchAttentionTest, RowsWithoutKeysAreZeroAndSoAreTheirGradients) {
  const Sizes s{4, 4};
  auto heads = draw_heads(s);
  const auto keep = torch::ones({4, 4}, torch::kBool);
  keep.select(0, 2).fill_(false);
  const auto mask = resolved(Mask::keep(keep), s);
  compare(heads, mask, call_for(8), torch::randn({2, 4, 4, 8}, torch::kDouble));
  const auto query = leaf(heads.query);
  const auto form = torch_form(query, heads.key, heads.value, mask, call_for(8));
  const auto output =
      torch_attention(query, heads.key, heads.value, mask, call_for(8), form).output;
  EXPECT_EQ(output.select(2, 2).abs().sum().item<double>(), 0);
  output.sum().backward();
  EXPECT_EQ(query.grad().select(2, 2).abs().sum().item<double>(), 0);
}

// Whose product with a gradient leaves the range: LibTorch's kernels multiply it all the same.
TEST_F(TorchAttentionTest, AHugeBlockedValueReachesNoGradient) {
  const Sizes s{6, 8};
  const auto dead = torch::ones({6, 8}, torch::kBool);
  dead.select(0, 3).fill_(false);
  dead.narrow(1, 6, 2).fill_(false);
  const auto unknown = torch::zeros({6, 8});
  unknown.select(0, 3).fill_(NAN);
  const auto keep = Mask::keep(dead);
  for (const auto& mask : {Mask::causal(), Mask::lengths(torch::tensor({6, 5})), keep,
                           keep & Mask::add(unknown)}) {
    SCOPED_TRACE(c10::str(mask));
    auto heads = draw_heads(s);
    heads.value.narrow(2, 6, 2).fill_(1.7e308);
    compare(heads, resolved(mask, s), call_for(8), torch::ones({2, 4, 6, 8}, torch::kDouble));
  }
}

// The logarithm of a sum of 8 is nothing beside 1e20, nor beside the lowest number.
TEST_F(TorchAttentionTest, AMaximumThatSwallowsTheSumOfItsRowHasTheRightGradient) {
  const Sizes s{6, 8};
  const auto grad = torch::randn({2, 4, 6, 8}, torch::kDouble);
  const auto lowest = torch::zeros({6, 8}, torch::kDouble);
  lowest.select(0, 3).fill_(std::numeric_limits<double>::lowest());
  lowest.select(0, 4).narrow(0, 0, 3).fill_(std::numeric_limits<float>::lowest());
  for (const auto& term : {lowest, lowest.clamp_min(std::numeric_limits<float>::lowest())}) {
    compare(draw_heads(s), resolved(Mask::add(term), s), call_for(8), grad);
  }
  auto heads = draw_heads(s);
  heads.key = heads.key.narrow(2, 0, 1).expand({2, 2, 8, 8}).contiguous();
  heads.query.mul_(1e20);
  compare(heads, resolved({}, s), call_for(8), grad);
}

TEST_F(TorchAttentionTest, ASumOfScoreAndTermIsHeldWithinTheRange) {
  const Sizes s{1, 2, 1, 1, 2, 2};
  Heads heads = draw_heads(s);
  heads.query.fill_(1e154);
  heads.key.select(2, 0).fill_(-1e154);
  heads.key.select(2, 1).fill_(0);
  const auto lowest =
      torch::full({1, 2}, std::numeric_limits<double>::lowest(), torch::kDouble);
  compare(heads, resolved(Mask::add(lowest), s), call_for(2),
          torch::ones({2, 1, 1, 2}, torch::kDouble));
}

TEST_F(TorchAttentionTest, PaddingOfNaNGivesTheBitsOfPaddingOfZeros) {
  const Sizes s{6, 8};
  const auto mask = resolved(Mask::lengths(torch::tensor({3, 8})), s);
  const auto attend = [&](double padding) {
    auto heads = draw_heads(s);
    for (auto* tensor : {&heads.key, &heads.value}) {
      tensor->select(0, 0).narrow(1, 3, 5).fill_(padding);
    }
    const auto form = torch_form(heads.query, heads.key, heads.value, mask, call_for(8));
    return torch_attention(heads.query, heads.key, heads.value, mask, call_for(8), form).output;
  };
  EXPECT_TRUE(test::is_bit_equal(attend(NAN), attend(0)));
}

// What a loss that is kept for a log holds on to.
TEST_F(TorchAttentionTest, ABackwardLetsGoOfWhatTheCallKept) {
  const Sizes s{6, 6};
  const auto heads = draw_heads(s);
  const auto q = leaf(heads.query);
  const auto keep = torch::ones({6, 6}, torch::kBool);
  const auto mask = resolved(Mask::keep(keep), s);
  const auto form = torch_form(q, heads.key, heads.value, mask, call_for(8));
  const auto before = heads.key.storage().use_count();
  const auto loss =
      torch_attention(q, heads.key, heads.value, mask, call_for(8), form).output.sum();
  EXPECT_GT(heads.key.storage().use_count(), before);
  loss.backward();
  EXPECT_EQ(heads.key.storage().use_count(), before);
}

TEST_F(TorchAttentionTest, GradientsOfGradientsAreRight) {
  const Sizes s{5, 5};
  const auto heads = draw_heads(s);
  const auto mask = resolved(Mask::causal(), s);
  const auto form = torch_form(heads.query, heads.key, heads.value, mask, call_for(8));
  expect_same(second_order(heads,
                           [&](auto& q, auto& k, auto& v) {
                             return torch_attention(q, k, v, mask, call_for(8), form).output;
                           }),
              second_order(heads, [&](auto& q, auto& k, auto& v) {
                return plain_attention(q, k, v, mask, call_for(8)).output;
              }));
}

TEST_F(TorchAttentionTest, AGraphIsWalkedAsOftenAsItIsRetained) {
  const Sizes s{5, 5};
  const auto heads = draw_heads(s);
  const auto mask = resolved(Mask::causal(), s);
  const auto q = leaf(heads.query);
  const auto form = torch_form(q, heads.key, heads.value, mask, call_for(8));
  const auto output =
      torch_attention(q, heads.key, heads.value, mask, call_for(8), form).output;
  const auto sum = output.sin().sum();
  const auto first = torch::autograd::grad({sum}, {q}, {}, /*retain_graph=*/true);
  const auto second = torch::autograd::grad({sum}, {q});
  EXPECT_TRUE(test::is_bit_equal(second[0], first[0]));
  EXPECT_THROW(torch::autograd::grad({sum}, {q}), c10::Error);
}

TEST_F(TorchAttentionTest, ChangesInPlaceBeforeABackwardAreNoticed) {
  const Sizes s{9, 9, 2, 2};
  const auto heads = draw_heads(s);
  const auto q = leaf(heads.query);
  const auto keep = torch::ones({9, 9}, torch::kBool);
  const auto mask = resolved(Mask::keep(keep), s);
  const auto form = torch_form(q, heads.key, heads.value, mask, call_for(8));
  for (const auto& changed : {heads.key, keep}) {
    const auto output =
        torch_attention(q, heads.key, heads.value, mask, call_for(8), form).output;
    changed.fill_(1);
    EXPECT_THROW(output.sum().backward(), c10::Error);
  }
}

}  // namespace
}  // namespace mha::detail
