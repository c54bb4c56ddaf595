// Guards that a score or a sum of added terms that leaves the range of float32 (float64) is
// held at its largest number: never a block, never NaN, and the same on every path, kernel and
// dtype; and that an infinite value is seen, however small its weight. The expected weights
// follow from the definition: scores that differ by more than some hundred have weights 0 and
// 1, equal ones share. Products are of powers of two, so that no order of sums changes them.
#include <mha/attention_map.h>
#include <mha/scaled_dot_product_attention.h>

#include <cmath>
#include <vector>

#include "support/expect.h"

namespace mha {
namespace {

using test::all_zero;
using test::infinity;
using test::is_close;
using test::is_finite;
using test::leaf;

constexpr int64_t N = 2, H = 2, D = 32;

// A number of a dtype whose square it can't hold, a power of two.
double big(at::ScalarType dtype) {
  return dtype == at::kDouble ? 0x1p600 : 0x1p100;
}

// (1, D): the first components, then zeros.
at::Tensor vector_of(std::vector<double> first) {
  first.resize(D, 0);
  return torch::tensor(first, at::kDouble).unsqueeze(0);
}

// One query and some keys with the weights that follow, all in float64.
struct Scene {
  at::Tensor query, keys, weights;  // (1, D), (S, D), (S)
};

struct Tensors {
  at::Tensor query, key, value, weights;  // (N, H, ., .)
};

// The query `queries` times over, the keys `times` over, which share their weight.
Tensors repeated(const Scene& scene, int64_t queries, int64_t times, at::ScalarType dtype) {
  torch::manual_seed(51);
  const auto keys = scene.keys.repeat({times, 1}).to(dtype);
  const auto weights = (scene.weights / static_cast<double>(times)).repeat({times});
  const int64_t s = keys.size(0);
  return {scene.query.to(dtype).expand({N, H, queries, D}).contiguous(),
          keys.expand({N, H, s, D}).contiguous(), at::randn({N, H, s, D}).to(dtype),
          weights.expand({N, H, queries, s})};
}

// Few keys, chunks of many for few queries, and tiles; results within the roundings of a mean.
void expect_weights(const Scene& scene, at::ScalarType dtype, const AttentionOptions& options,
                    const Mask& mask = {}) {
  const double tolerance = dtype == at::kBFloat16 ? 2e-2 : 1e-5;
  for (const auto& [queries, times] :
       {std::pair<int64_t, int64_t>{1, 1}, {5, 1}, {1, 400}, {50, 40}}) {
    const auto t = repeated(scene, queries, times, dtype);
    const auto output = at::matmul(t.weights, t.value.to(at::kDouble));
    for (const auto kind : {Weights::none, Weights::averaged, Weights::per_head}) {
      for (const bool records : {false, true}) {
        SCOPED_TRACE(::testing::Message() << dtype << " L=" << queries << " x" << times
                                          << " weights " << kind << " records " << records);
        const auto query = records ? leaf(t.query) : t.query;
        const auto result = mha::scaled_dot_product_attention(
            query, t.key, t.value, mask, AttentionOptions(options).weights(kind));
        EXPECT_TRUE(is_close(result.output, output, tolerance));
        if (kind == Weights::none) continue;
        const auto expected = kind == Weights::averaged ? t.weights.mean(1) : t.weights;
        EXPECT_TRUE(is_close(result.weights, expected, tolerance));
      }
    }
    const AttentionMap map(t.query, t.key, mask, options);
    EXPECT_TRUE(is_close(map.dense(), t.weights, tolerance));
    EXPECT_TRUE(is_finite(map.entropy()));
    EXPECT_TRUE(is_finite(map.log_sum_exp()));
    EXPECT_TRUE(is_close(map.received(), t.weights.sum(2), 20 * tolerance));
  }
}

const std::vector<at::ScalarType> dtypes{at::kFloat, at::kDouble, at::kBFloat16};

TEST(ScoreRangeTest, AKeyThatIsOpenAloneHasWeightOneThoughItsScoreIsBelowTheRange) {
  for (const auto dtype : dtypes) {
    const double x = big(dtype);
    const Scene scene{vector_of({x, x}), vector_of({-x, -x}), torch::ones({1}, at::kDouble)};
    expect_weights(scene, dtype, AttentionOptions());
    expect_weights(scene, dtype, AttentionOptions().scale(3));
  }
}

TEST(ScoreRangeTest, ScoresBeyondTheRangeAreEqualAndNoneIsNan) {
  for (const auto dtype : dtypes) {
    const double x = big(dtype);
    const auto query = vector_of({x, 1});
    const auto both = torch::tensor({0.5, 0.5, 0.0}, at::kDouble);
    expect_weights(
        {query, at::cat({vector_of({x}), vector_of({2 * x}), vector_of({0, 3})}), both}, dtype,
        AttentionOptions());
    expect_weights(
        {query, at::cat({vector_of({x}), vector_of({2 * x}), vector_of({-x, 3})}), both}, dtype,
        AttentionOptions());
    expect_weights(
        {query, at::cat({vector_of({0, 1}), vector_of({0, 1}), vector_of({-2 * x, 3})}), both},
        dtype, AttentionOptions());
  }
}

TEST(ScoreRangeTest, ASumThatLeavesTheRangeOnItsWayIsWhatItComesTo) {
  for (const auto dtype : dtypes) {
    const double x = big(dtype);
    // x^2 - x^2 = 0, beside a score of 0 and one of -200.
    expect_weights({vector_of({x, x, 1}),
                    at::cat({vector_of({x, -x}), vector_of({0}), vector_of({0, 0, -200})}),
                    torch::tensor({0.5, 0.5, 0.0}, at::kDouble)},
                   dtype, AttentionOptions().scale(1));
  }
  // -2^128 + 2^127, whose first product is infinite alone, beside -2^127.
  expect_weights({vector_of({0x1p64, 0x1p64}),
                  at::cat({vector_of({-0x1p64, 0x1p63}), vector_of({-0x1p63, 0})}),
                  torch::tensor({0.5, 0.5}, at::kDouble)},
                 at::kFloat, AttentionOptions().scale(1));
  // The query times the scale alone would overflow.
  expect_weights({vector_of({0x1p126}), at::cat({vector_of({0x1p-130}), vector_of({0x1p-130})}),
                  torch::tensor({0.5, 0.5}, at::kDouble)},
                 at::kFloat, AttentionOptions().scale(16));
}

TEST(ScoreRangeTest, NumbersThatFloat32HoldsAreToldApart) {
  // 3e38 and 2.9e38 are in range, and so are their negatives.
  const auto query = vector_of({1e19});
  for (const double sign : {1.0, -1.0}) {
    const double first = sign > 0 ? 1 : 0;
    expect_weights({query, at::cat({vector_of({sign * 3e19}), vector_of({sign * 2.9e19})}),
                    torch::tensor({first, 1 - first}, at::kDouble)},
                   at::kFloat, AttentionOptions().scale(1));
  }
}

TEST(ScoreRangeTest, ASoftCapIsReachedByScoresBeyondTheRange) {
  const double high = 1 / (1 + std::exp(-4.0));
  for (const auto dtype : dtypes) {
    const double x = big(dtype);
    expect_weights({vector_of({x, x}), at::cat({vector_of({x, x}), vector_of({-x, -x})}),
                    torch::tensor({high, 1 - high}, at::kDouble)},
                   dtype, AttentionOptions().softcap(2));
    expect_weights({vector_of({x, x}), at::cat({vector_of({x, -x}), vector_of({0})}),
                    torch::tensor({0.5, 0.5}, at::kDouble)},
                   dtype, AttentionOptions().softcap(2));
  }
}

// Weights (2, 2, 1, S) of keys whose scores are all 0, of few and of many keys.
void expect_of_terms(const std::vector<std::vector<double>>& terms,
                     const std::vector<double>& expected,
                     const std::vector<double>& table = {}) {
  const auto s = static_cast<int64_t>(expected.size());
  for (const int64_t zeros : {0, 400}) {  // keys with terms as low as can be
    Mask mask;
    for (const auto& each : terms) {
      const auto all = at::full({1, s + zeros}, -3e38);
      all.narrow(1, 0, s).copy_(torch::tensor(each));
      mask = mask & Mask::add(all);
    }
    if (!table.empty()) {
      const auto all = at::zeros({1, s + zeros});
      all.narrow(1, 0, s).copy_(torch::tensor(table));
      mask = mask & Mask::relative(all);
    }
    const auto query = at::zeros({2, 2, 1, 8}), key = at::zeros({2, 2, s + zeros, 8});
    const auto value = at::randn({2, 2, s + zeros, 8});
    auto weights = at::zeros({2, 2, 1, s + zeros}, at::kDouble);
    weights.narrow(3, 0, s).copy_(torch::tensor(expected, at::kDouble));
    for (const auto kind : {Weights::none, Weights::per_head}) {
      const auto result = mha::scaled_dot_product_attention(query, key, value, mask,
                                                            AttentionOptions().weights(kind));
      EXPECT_TRUE(is_close(result.output, at::matmul(weights, value.to(at::kDouble)), 1e-6));
      if (kind == Weights::per_head) {
        EXPECT_TRUE(is_close(result.weights, weights, 1e-6));
      }
    }
    EXPECT_TRUE(is_close(AttentionMap(query, key, mask).dense(), weights, 1e-6));
  }
}

TEST(ScoreRangeTest, SumsOfAddedTermsAreHeld) {
  expect_of_terms({{3e38, 0}, {3e38, 0}}, {1, 0});
  expect_of_terms({{3e38, 3e38}, {3e38, 3e38}}, {0.5, 0.5});
  expect_of_terms({{3e38, 3e38}, {3e38, 0}}, {1, 0});
  expect_of_terms({{3e38, 2e38}, {3e38, 2e38}}, {0.5, 0.5});
  expect_of_terms({{-1e38, -2e38}, {-1e38, -1e38}}, {1, 0});
  expect_of_terms({{3e38, 3e38}, {-3e38, -3e38}}, {0.5, 0.5});
  expect_of_terms({{3e38, 3e38}}, {1, 0}, {3e38, 0});
  expect_of_terms({{3e38, -1}}, {0.5, 0.5}, {-3e38, 1});
  expect_of_terms({{3e38, -infinity}, {3e38, 3e38}}, {1, 0});
}

// First those of pairs, those of keys and those by distance, each by itself.
TEST(ScoreRangeTest, SumsAreHeldKindByKind) {
  const auto query = at::zeros({1, 1, 2, 8}), key = at::zeros({1, 1, 2, 8});
  const auto mask = Mask::add(torch::tensor({3e38f, 1e38f, 3e38f, 1e38f}).view({2, 2})) &
                    Mask::add_keys(torch::tensor({3e38f, 0.0f})) &
                    Mask::add_keys(torch::tensor({-3e38f, 0.0f}));
  const auto weights = mha::scaled_dot_product_attention(query, key, key, mask).weights;
  EXPECT_TRUE(is_close(weights[0][0], torch::tensor({1.0, 0.0, 1.0, 0.0}).view({2, 2}), 0));
}

TEST(ScoreRangeTest, TermsBelowTheRangeAreNoBlocks) {
  const auto lowest = at::full({1, 3}, -3e38);
  const auto query = at::zeros({1, 1, 1, 8}), key = at::zeros({1, 1, 3, 8});
  const auto mask = Mask::add(lowest) & Mask::add(lowest);
  const auto alone = mask & Mask::keep_keys(torch::tensor({0, 1, 0}));
  const auto weights = [&](const Mask& m) {
    return mha::scaled_dot_product_attention(query, key, key, m).weights.view({3});
  };
  EXPECT_TRUE(is_close(weights(mask), at::full({3}, 1.0 / 3), 1e-6));
  EXPECT_TRUE(is_close(weights(alone), torch::tensor({0.0, 1.0, 0.0}), 1e-6));
}

TEST(ScoreRangeTest, NoGradientFlowsThroughAScoreThatIsHeld) {
  for (const int64_t keys : {2, 300}) {
    const auto query = leaf(at::full({1, 1, 2, 8}, 0x1p100));
    const auto key = leaf(at::full({1, 1, keys, 8}, 0x1p100));
    const auto value = leaf(at::randn({1, 1, keys, 8})), added = leaf(at::zeros({2, keys}));
    const auto output =
        mha::scaled_dot_product_attention(query, key, value, Mask::add(added)).output;
    output.sum().backward();
    EXPECT_TRUE(all_zero(query.grad()));
    EXPECT_TRUE(all_zero(key.grad()));
    EXPECT_TRUE(all_zero(added.grad()));
    EXPECT_TRUE(
        is_close(value.grad(), at::full_like(value, 2.0 / static_cast<double>(keys)), 1e-6));
  }
}

TEST(ScoreRangeTest, GradientsThroughASumThatLeftTheRangeOnItsWayAreRight) {
  // The first two products cancel and the others are 0, so that each score is 0 in any order of
  // the sum, unless it is held on its way. Float64 has room for all of it.
  const auto draw = [](at::ScalarType dtype) {
    torch::manual_seed(52);
    auto query = at::zeros({1, 2, 3, 8}), key = at::randn({1, 2, 5, 8});
    query.select(3, 0).fill_(0x1p100), query.select(3, 1).fill_(0x1p100);
    key.select(3, 0).fill_(0x1p100), key.select(3, 1).fill_(-0x1p100);
    return std::vector<at::Tensor>{leaf(query.to(dtype)), leaf(key.to(dtype)),
                                   leaf(at::randn({1, 2, 5, 8}).to(dtype))};
  };
  const auto run = [](const std::vector<at::Tensor>& in) {
    const auto output =
        mha::scaled_dot_product_attention(in[0], in[1], in[2], Mask::causal()).output;
    auto results = torch::autograd::grad({output.sum()}, in);
    results.push_back(output);
    return results;
  };
  auto actual = run(draw(at::kFloat)), expected = run(draw(at::kDouble));
  // Of the query's first two components only that they are finite: they are differences of
  // numbers of 2^100.
  EXPECT_TRUE(is_finite(actual[0]));
  for (auto* results : {&actual, &expected}) (*results)[0] = (*results)[0].narrow(3, 2, 6);
  for (const size_t i : {0, 2, 3}) {
    EXPECT_TRUE(is_close(actual[i].to(at::kDouble), expected[i], 1e-5)) << i;
  }
  EXPECT_TRUE(all_zero(actual[1].narrow(3, 2, 6)));
}

// Of two keys, the second with a weight of e^-200, which no float32 holds.
TEST(ScoreRangeTest, AnInfiniteValueIsSeenThoughItsWeightUnderflows) {
  for (const int64_t queries : {1, 30}) {
    for (const int64_t keys : {2, 400}) {
      for (const auto& mask : {Mask(), Mask::lengths(torch::tensor({keys}))}) {
        const auto query = at::ones({1, 2, queries, 1});
        const auto key = at::zeros({1, 2, keys, 1}), value = at::ones({1, 2, keys, 3});
        key.select(2, keys - 1).fill_(-200);
        const auto last = value.select(2, keys - 1);  // (1, 2, 3)
        last.select(2, 0).fill_(infinity);
        last.select(2, 1).fill_(-infinity);
        last.select(2, 2).fill_(5);
        for (const auto kind : {Weights::none, Weights::per_head}) {
          for (const double dropout : {0.0, 0.5}) {
            torch::manual_seed(53);
            const auto output = mha::scaled_dot_product_attention(
                                    query, key, value, mask,
                                    AttentionOptions().scale(1).weights(kind).dropout(dropout))
                                    .output;
            EXPECT_TRUE(output.select(3, 0).isposinf().all().item<bool>());
            EXPECT_TRUE(output.select(3, 1).isneginf().all().item<bool>());
            if (dropout == 0) {
              EXPECT_TRUE(is_close(output.select(3, 2), at::ones({1, 2, queries}), 1e-5));
            }
          }
        }
      }
    }
  }
}

TEST(ScoreRangeTest, InfiniteValuesOfBothSignsGiveNanToTheRowsThatSeeBoth) {
  const auto query = at::zeros({1, 1, 3, 4}), key = at::zeros({1, 1, 3, 4});
  const auto value = at::ones({1, 1, 3, 4});
  value.select(2, 1).fill_(infinity);
  value.select(2, 2).fill_(-infinity);
  const auto output = mha::scaled_dot_product_attention(query, key, value, Mask::causal())
                          .output.select(3, 0)
                          .view({3});
  EXPECT_EQ(output[0].item<double>(), 1);
  EXPECT_EQ(output[1].item<double>(), infinity);
  EXPECT_TRUE(std::isnan(output[2].item<double>()));
}

TEST(ScoreRangeTest, TheMeanOfLargeValuesIsFinite) {
  for (const int64_t queries : {1, 30}) {
    for (const int64_t keys : {3, 400}) {
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        const auto query = at::zeros({1, 2, queries, 16}, dtype);
        const auto key = at::zeros({1, 2, keys, 16}, dtype);
        const auto value = at::full({1, 2, keys, 32}, 3e38, dtype);
        for (const auto& mask : {Mask(), Mask::lengths(torch::tensor({keys}))}) {
          const auto output =
              mha::scaled_dot_product_attention(query, key, value, mask,
                                                AttentionOptions().weights(Weights::none))
                  .output;
          EXPECT_TRUE(is_close(output.to(at::kDouble) / 3e38, at::ones_like(output), 1e-2));
        }
      }
    }
  }
}

// A value that is infinite in one component keeps the others.
TEST(ScoreRangeTest, OneInfiniteComponentLeavesTheOthersAsTheyAre) {
  torch::manual_seed(54);
  const auto query = at::randn({1, 2, 6, 4}), key = at::randn({1, 2, 6, 4});
  const auto value = at::randn({1, 2, 6, 4}), changed = value.clone();
  changed.select(2, 2).select(2, 1).fill_(infinity);
  for (const auto& mask : {Mask(), Mask::causal()}) {
    const auto expected = mha::scaled_dot_product_attention(query, key, value, mask).output;
    const auto actual = mha::scaled_dot_product_attention(query, key, changed, mask).output;
    for (const int64_t d : {0, 2, 3}) {
      EXPECT_TRUE(is_close(actual.select(3, d), expected.select(3, d), 1e-6));
    }
  }
}

}  // namespace
}  // namespace mha
