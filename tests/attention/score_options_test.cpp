// Guards the soft cap and the attention sinks of the functional form: their formulas, that a
// sink changes nothing for queries without keys, what is refused, and that they combine with
// masks, few queries and half types. Agreement of the kernels with the plain path on every
// instruction set is in fused_attention_test.cpp, second-order gradients in gradient_test.cpp.
//
// Values are measured against the loops of oracle.h. In float64 the difference is a few
// roundings of numbers near 1. In float32 scores of up to 20 round by 1e-6: 3e-6 for weights,
// and ten times that for gradients, which sum over queries or keys; a factor that is forgotten
// shows as 1e-2 or more. Half types err by the rounding of the result, of unit scale, and
// bfloat16 by that of its weights.
#include <mha/attention_map.h>
#include <mha/scaled_dot_product_attention.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "support/expect.h"
#include "support/oracle.h"
#include "support/thread_count.h"

namespace mha {
namespace {

using test::all_zero;
using test::infinity;
using test::is_bit_equal;
using test::is_close;
using test::is_finite;
using test::is_same_result;
using test::leaf;
using test::nan;
using test::refuses;

AttentionOptions without_weights(const AttentionOptions& options) {
  return AttentionOptions(options).weights(Weights::none);
}

struct Call {
  at::Tensor query, key, value, sinks, added;
  AttentionOptions options(double softcap) const {
    return AttentionOptions().scale(1.3).softcap(softcap).sinks(sinks);
  }
};
// L queries over S keys in 4 heads that share 2 of keys and values; leaves of autograd.
Call draw_call(int64_t l, int64_t s, at::ScalarType dtype) {
  const auto draw = [&](at::IntArrayRef shape) {
    return leaf(at::randn(shape, at::kDouble).to(dtype));
  };
  return {draw({2, 4, l, 8}), draw({2, 2, s, 8}), draw({2, 2, s, 5}), draw({4}), draw({l, s})};
}

TEST(ScoreOptionsTest, ASoftCapByHand) {
  const auto query = torch::tensor({2.0}, at::kDouble).view({1, 1, 1});
  const auto key = torch::tensor({3.0, -1.0}, at::kDouble).view({1, 2, 1});
  const auto mask = Mask::add(torch::tensor({{0.0, 1.0}}, at::kDouble));
  const auto weights = mha::scaled_dot_product_attention(
                           query, key, key, mask, AttentionOptions().scale(0.5).softcap(1.5))
                           .weights;
  const double first = 1.5 * std::tanh(3 / 1.5), second = 1.5 * std::tanh(-1 / 1.5) + 1;
  const double share = 1 / (1 + std::exp(second - first));
  EXPECT_TRUE(
      is_close(weights.flatten(), torch::tensor({share, 1 - share}, at::kDouble), 1e-15));
}

TEST(ScoreOptionsTest, ASinkByHand) {
  const auto zeros = at::zeros({1, 2, 1, 4}, at::kDouble),
             value = at::ones({1, 2, 3, 1}, at::kDouble);
  const auto sinks = torch::tensor({std::log(2.0), -infinity}, at::kDouble);
  const auto [output, weights] = mha::scaled_dot_product_attention(
      zeros, zeros.expand({1, 2, 3, 4}), value, {}, AttentionOptions().sinks(sinks));
  // Three keys of weight 1 beside a sink of weight 2, then beside none.
  EXPECT_TRUE(is_close(weights[0][0], at::full({1, 3}, 0.2, at::kDouble), 1e-15));
  EXPECT_TRUE(is_close(weights[0][1], at::full({1, 3}, 1.0 / 3, at::kDouble), 1e-15));
  EXPECT_TRUE(is_close(output.flatten(), torch::tensor({0.6, 1.0}, at::kDouble), 1e-15));
}

TEST(ScoreOptionsTest, ValuesAndGradientsAreThoseOfTheOracle) {
  torch::manual_seed(71);
  auto dead = at::ones({50, 70});
  dead[3].fill_(0);
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    for (const double softcap : {0.0, 0.4, 2.0, 50.0}) {
      for (const bool sinks : {false, true}) {
        for (const bool masked : {false, true}) {
          SCOPED_TRACE(::testing::Message() << dtype << " softcap " << softcap << " sinks "
                                            << sinks << " masked " << masked);
          auto call = draw_call(50, 70, dtype);
          if (!sinks) call.sinks = at::Tensor();
          const auto mask =
              masked ? Mask::causal() & Mask::keep(dead) & Mask::add(call.added) : Mask();
          const auto options = call.options(softcap);
          const auto [output, weights] = mha::scaled_dot_product_attention(
              call.query, call.key, call.value, mask, options);
          const auto dense = test::dense_mask(mask, 2, 4, 50, 70);
          const test::OracleScoring scoring(1.3, softcap, call.sinks);
          const auto expected =
              test::oracle_attention(call.query, call.key, call.value, dense, scoring);
          const double one = dtype == at::kDouble ? 1e-14 : 3e-6;
          EXPECT_TRUE(is_close(output, expected.output, 2 * one));
          EXPECT_TRUE(is_close(weights, expected.weights, one));
          EXPECT_TRUE(
              is_same_result(mha::scaled_dot_product_attention(call.query, call.key, call.value,
                                                               mask, without_weights(options))
                                 .output,
                             output));

          const auto upstream = at::randn(output.sizes(), output.options()) / 10;
          output.backward(upstream);
          const auto gradients = test::oracle_attention_backward(
              call.query, call.key, call.value, dense, scoring, upstream, {});
          EXPECT_TRUE(is_close(call.query.grad(), gradients.query, 10 * one));
          EXPECT_TRUE(is_close(call.key.grad(), gradients.key, 10 * one));
          EXPECT_TRUE(is_close(call.value.grad(), gradients.value, 10 * one));
          if (sinks) {
            EXPECT_TRUE(is_close(call.sinks.grad(), gradients.sinks, 10 * one));
          }
          if (masked) {
            EXPECT_TRUE(is_close(call.added.grad(),
                                 test::sum_to_mask_shape(gradients.added, call.added),
                                 10 * one));
          }
        }
      }
    }
  }
}

// Two queries over 700 keys: there the kernels merge chunks of keys.
TEST(ScoreOptionsTest, AFewQueriesOverManyKeysInEveryType) {
  torch::manual_seed(72);
  const at::NoGradGuard no_grad;
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto call = draw_call(2, 700, dtype);
    const Mask mask = Mask::causal() & Mask::lengths(torch::tensor({0, 600}));
    const auto output =
        mha::scaled_dot_product_attention(call.query, call.key, call.value, mask,
                                          without_weights(call.options(3)))
            .output;
    const auto expected =
        test::oracle_attention(call.query, call.key, call.value,
                               test::dense_mask(mask, 2, 4, 2, 700), {1.3, 3, call.sinks})
            .output;
    EXPECT_EQ(output.scalar_type(), dtype);
    EXPECT_TRUE(is_close(output, expected, 2 * test::unit_roundoff(dtype) + 1e-6)) << dtype;
    EXPECT_TRUE(all_zero(output[0])) << dtype;
  }
}

TEST(ScoreOptionsTest, SinksMayBeOfAnotherFloatingTypeThanQueries) {
  torch::manual_seed(73);
  const auto call = draw_call(5, 9, at::kBFloat16);
  const auto given = leaf(call.sinks.to(at::kDouble));
  const auto output = mha::scaled_dot_product_attention(call.query, call.key, call.value, {},
                                                        AttentionOptions().sinks(given))
                          .output;
  EXPECT_TRUE(is_same_result(
      output, mha::scaled_dot_product_attention(call.query, call.key, call.value, {},
                                                AttentionOptions().sinks(call.sinks))
                  .output));
  output.sum().backward();
  EXPECT_EQ(given.grad().scalar_type(), at::kDouble);
  EXPECT_GT(given.grad().abs().max().item<double>(), 0);
}

TEST(ScoreOptionsTest, ASinkFarAboveOrBelowTheScoresTakesEverythingOrNothing) {
  torch::manual_seed(74);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto call = draw_call(20, 300, dtype);
    const auto attend = [&](const at::Tensor& sinks) {
      return mha::scaled_dot_product_attention(call.query, call.key, call.value, Mask::causal(),
                                               AttentionOptions().sinks(sinks));
    };
    const auto none = attend({}), below = attend(at::full({4}, -infinity));
    EXPECT_TRUE(is_close(below.weights, none.weights, 4 * test::unit_roundoff(dtype)));
    for (const double sink : {1e4, 3e38, infinity}) {
      const auto above = attend(leaf(at::full({4}, sink)));
      EXPECT_TRUE(is_close(above.weights, at::zeros_like(above.weights), 1e-37)) << sink;
      EXPECT_TRUE(is_finite(torch::autograd::grad({above.output.sum()}, {call.query})[0]));
    }
  }
}

TEST(ScoreOptionsTest, AQueryWithoutKeysStaysZeroAndGivesItsSinkNoGradient) {
  torch::manual_seed(75);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto call = draw_call(6, 9, dtype);
    auto keep = at::ones({6, 9});
    keep[2].fill_(0);
    const auto upstream = at::randn({2, 4, 6, 5}, at::kDouble).to(dtype);
    auto poisoned = upstream.clone();
    poisoned.select(2, 2).fill_(std::numeric_limits<double>::quiet_NaN());
    const auto gradient = [&](const at::Tensor& from) {
      const auto [output, weights] = mha::scaled_dot_product_attention(
          call.query, call.key, call.value, Mask::keep(keep), call.options(2));
      EXPECT_TRUE(all_zero(weights.select(2, 2)));
      EXPECT_TRUE(all_zero(output.select(2, 2)));
      return torch::autograd::grad({output}, {call.sinks, call.query}, {from});
    };
    const auto expected = gradient(upstream), actual = gradient(poisoned);
    EXPECT_TRUE(is_same_result(actual[0], expected[0]));
    EXPECT_TRUE(is_same_result(actual[1], expected[1]));
    EXPECT_GT(expected[0].abs().max().item<double>(), 0);
  }
}

TEST(ScoreOptionsTest, WhatIsBlockedHasNoEffectEvenAsNaN) {
  torch::manual_seed(76);
  for (const double poison : {infinity, std::numeric_limits<double>::quiet_NaN()}) {
    const auto call = draw_call(6, 9, at::kFloat);
    const auto results = [&](double in_place) {
      const auto key = leaf(call.key.detach()), value = leaf(call.value.detach());
      key.detach().select(2, 8).fill_(in_place);
      value.detach().select(2, 8).fill_(in_place);
      const auto output =
          mha::scaled_dot_product_attention(
              call.query, key, value, Mask::lengths(torch::tensor({8, 0})), call.options(2))
              .output;
      auto all =
          torch::autograd::grad({output.square().sum()}, {call.query, key, value, call.sinks});
      all.push_back(output);
      return all;
    };
    const auto expected = results(0), actual = results(poison);
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_TRUE(is_same_result(actual[i], expected[i])) << i;
    }
  }
}

// NaN where `unknown` is set, and nowhere else; there the numbers of `otherwise`.
::testing::AssertionResult is_nan_where(const at::Tensor& actual, const at::Tensor& unknown,
                                        const at::Tensor& otherwise) {
  const auto equal = is_bit_equal(actual.isnan(), unknown.expand_as(actual));
  const double tolerance = std::max(1e-6, test::blas_tolerance(otherwise));
  return equal ? is_close(actual.nan_to_num(0), otherwise.masked_fill(unknown, 0), tolerance)
               : equal;
}

// As NaN in a key of this head would.
TEST(ScoreOptionsTest, ASinkOfNaNReachesTheQueriesOfItsHeadThatSeeAKey) {
  torch::manual_seed(79);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const auto& [l, s] : {std::pair<int64_t, int64_t>{40, 70}, {2, 700}}) {
      SCOPED_TRACE(::testing::Message() << dtype << " " << l);
      const auto call = draw_call(l, s, dtype);
      auto keep = at::rand({l, s}).gt(0.3);
      keep[1].fill_(false);
      const auto is_head = (at::arange(4) == 1).view({1, 4, 1, 1});
      const auto sees = at::arange(l).ne(1).view({1, 1, l, 1}).logical_and(is_head);
      const auto with = [&](double sink) {
        auto sinks = call.sinks.detach().clone();
        sinks[1] = sink;
        return call.options(2).sinks(sinks);
      };
      const auto attend = [&](double sink, Weights weights) {
        torch::NoGradGuard no_grad;
        return mha::scaled_dot_product_attention(call.query, call.key, call.value,
                                                 Mask::keep(keep), with(sink).weights(weights));
      };
      const auto pairs = keep.logical_and(is_head);
      for (const auto weights : {Weights::none, Weights::averaged, Weights::per_head}) {
        const auto found = attend(nan, weights), known = attend(0, weights);
        EXPECT_TRUE(is_nan_where(found.output, sees, known.output)) << weights;
        if (weights == Weights::none) continue;
        EXPECT_TRUE(is_nan_where(found.weights, weights == Weights::averaged ? keep : pairs,
                                 known.weights))
            << weights;
      }
      const auto trace = [&](double sink) {
        const auto traced = trace_scaled_dot_product_attention(call.query, call.key, call.value,
                                                               Mask::keep(keep), with(sink));
        return TracedAttention{traced.output.detach(), traced.map.detach()};
      };
      const auto found = trace(nan), known = trace(0);
      EXPECT_TRUE(is_nan_where(found.output, sees, known.output));
      EXPECT_TRUE(is_nan_where(found.map.dense(), pairs, known.map.dense()));
      EXPECT_TRUE(is_nan_where(found.map.entropy(), sees.squeeze(3), known.map.entropy()));
      // The sum has the sink in it, even where there is no key.
      EXPECT_TRUE(
          is_nan_where(found.map.log_sum_exp(), is_head.squeeze(3), known.map.log_sum_exp()));
    }
  }
}

TEST(ScoreOptionsTest, ASinkOfNaNReachesTheGradientsOfWhatItsHeadSees) {
  torch::manual_seed(80);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto call = draw_call(20, 30, dtype);
    auto keep = at::ones({20, 30}, at::kBool);
    keep[1].fill_(false);
    keep.select(1, 7).fill_(false);
    const auto gradients = [&](double sink, const at::Tensor& kept) {
      auto sinks = call.sinks.detach().clone();
      sinks[1] = sink;
      sinks.requires_grad_();
      const auto output =
          mha::scaled_dot_product_attention(call.query, call.key, call.value, Mask::keep(kept),
                                            call.options(2).sinks(sinks))
              .output;
      return torch::autograd::grad({output.square().sum()},
                                   {call.query, call.key, call.value, sinks});
    };
    const auto found = gradients(std::numeric_limits<double>::quiet_NaN(), keep);
    const auto others = gradients(0, keep);
    const auto rows = at::arange(20).ne(1).view({1, 1, 20, 1});
    const auto keys = at::arange(30).ne(7).view({1, 1, 30, 1});
    const auto is_head = (at::arange(4) == 1).view({1, 4, 1, 1});
    const auto is_kv_head = (at::arange(2) == 0).view({1, 2, 1, 1});
    EXPECT_TRUE(is_nan_where(found[0], rows.logical_and(is_head), others[0]));
    EXPECT_TRUE(is_nan_where(found[1], keys.logical_and(is_kv_head), others[1]));
    EXPECT_TRUE(is_nan_where(found[2], keys.logical_and(is_kv_head), others[2]));
    EXPECT_TRUE(is_nan_where(found[3], is_head.flatten(), others[3]));
    const auto nothing = gradients(std::numeric_limits<double>::quiet_NaN(), keep.eq(2));
    for (const auto& gradient : nothing) EXPECT_TRUE(all_zero(gradient));
  }
}

TEST(ScoreOptionsTest, NoKeysAndNoQueriesGiveZeros) {
  for (const auto& [l, s] : {std::pair<int64_t, int64_t>{3, 0}, {0, 5}, {0, 0}}) {
    const auto call = draw_call(l, s, at::kFloat);
    const auto [output, weights] = mha::scaled_dot_product_attention(
        call.query, call.key, call.value, {}, call.options(2));
    EXPECT_TRUE(all_zero(output));
    EXPECT_EQ(weights.sizes(), (std::vector<int64_t>{2, 4, l, s}));
    output.sum().backward();
    EXPECT_TRUE(all_zero(call.sinks.grad())) << l << s;
  }
}

TEST(ScoreOptionsTest, ASoftCapOffOrFarAwayChangesNothing) {
  torch::manual_seed(77);
  const auto call = draw_call(40, 40, at::kFloat);
  const auto attend = [&](double softcap) {
    return mha::scaled_dot_product_attention(call.query, call.key, call.value, {},
                                             AttentionOptions().softcap(softcap))
        .weights;
  };
  const auto off = attend(0);
  for (const double far : {1e6, 1e20, 1e30}) {
    EXPECT_TRUE(is_close(attend(far), off, 1e-6)) << far;
  }
  // Hardly any score differs from another.
  EXPECT_TRUE(is_close(attend(1e-30), at::full_like(off, 1.0 / 40), 1e-7));
}

TEST(ScoreOptionsTest, OneThreadOrManyGiveTheSameGradientOfSinks) {
  torch::manual_seed(78);
  const auto call = draw_call(130, 200, at::kFloat);
  at::Tensor first;
  for (const int count : {1, 2, 4, 8}) {
    const test::ThreadCount threads(count);
    const auto output = mha::scaled_dot_product_attention(call.query, call.key, call.value,
                                                          Mask::causal(), call.options(2))
                            .output;
    const auto gradient = torch::autograd::grad({output.square().sum()}, {call.sinks})[0];
    if (!first.defined()) first = gradient;
    EXPECT_TRUE(is_same_result(gradient, first)) << count;
  }
}

TEST(ScoreOptionsTest, WhatHasNoMeaningIsRefused) {
  const auto call = draw_call(3, 5, at::kFloat);
  const auto refused = [&](const AttentionOptions& options,
                           std::initializer_list<std::string> words) {
    return refuses(
        [&] {
          mha::scaled_dot_product_attention(call.query, call.key, call.value, {}, options);
        },
        words);
  };
  const auto softcap = [](double x) { return AttentionOptions().softcap(x); };
  EXPECT_TRUE(refused(softcap(-1.5), {"softcap", "1e-30", "-1.5"}));
  EXPECT_TRUE(refused(softcap(infinity), {"softcap", "1e30", "inf"}));
  EXPECT_TRUE(refused(softcap(std::nan("")), {"softcap", "1e30", "nan"}));
  EXPECT_TRUE(refused(softcap(1e-40), {"softcap", "1e-30", "1e-40"}));
  const auto sinks = [](const at::Tensor& t) { return AttentionOptions().sinks(t); };
  EXPECT_TRUE(refused(sinks(at::zeros({3})), {"sinks", "[4]", "[3]"}));
  EXPECT_TRUE(refused(sinks(at::zeros({4, 1})), {"sinks", "[4]", "[4, 1]"}));
  EXPECT_TRUE(refused(sinks(at::zeros({4}, at::kLong)), {"sinks", "floating", "Long"}));
  EXPECT_TRUE(refused(sinks(at::zeros({4}, at::kMeta)), {"sinks", "cpu", "meta"}));
}

}  // namespace
}  // namespace mha
