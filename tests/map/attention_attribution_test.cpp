// What is attributed to pairs of queries and keys, against loops in double and against the
// gradients of weights that autograd finds: every method, mask and dtype, on each instruction
// set and on the plain path; what lies behind a mask; memory; wrong calls; and the layers'
// relevance.
//
// Tolerance: values and gradients are multiples of a half up to 1, so that float32 holds each
// gradient of a weight exactly, in whatever order it is summed. A product then differs by what
// the weight does (see attention_map_test.cpp) times the gradient, and a sum by the sum of
// that.

#include <gtest/gtest.h>
#include <mha/attention_attribution.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "runtime/attention_path.h"
#include "support/dense_map.h"
#include "support/expect.h"
#include "support/mask_samples.h"
#include "support/oracle.h"
#include "support/peak_memory.h"
#include "support/support.h"
#include "support/thread_count.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

constexpr Attribution every_attribution[] = {Attribution::gradient, Attribution::relevance,
                                             Attribution::positive_relevance};

double weight_tolerance(at::ScalarType dtype) {
  if (dtype == at::kDouble) return 1e-14;
  return detail::kernels_are_off() ? 2e-6 : 3e-7;
}

// Multiples of a half from -1 to 1.
at::Tensor halves(Random& random, at::IntArrayRef shape, at::ScalarType dtype) {
  return (random.normal(shape, at::kDouble) * 2).round().clamp(-2, 2).div(2).to(dtype);
}

// G (N, H, L, S) by loops, 0 where `allowed` (N, H, L, S) is.
at::Tensor gradient_by_loops(const at::Tensor& value, const at::Tensor& grad_output,
                             const at::Tensor& allowed) {
  const auto v = as_double(value), g = as_double(grad_output);
  const int64_t group = g.size(1) / v.size(1), dv = v.size(3);
  auto gradient = at::zeros(allowed.sizes(), at::kDouble);
  const auto at_v = v.accessor<double, 4>(), at_g = g.accessor<double, 4>();
  const auto open = allowed.accessor<double, 4>();
  auto to = gradient.accessor<double, 4>();
  for (int64_t n = 0; n < allowed.size(0); ++n) {
    for (int64_t h = 0; h < allowed.size(1); ++h) {
      for (int64_t i = 0; i < allowed.size(2); ++i) {
        for (int64_t j = 0; j < allowed.size(3); ++j) {
          if (open[n][h][i][j] == 0) continue;
          for (int64_t d = 0; d < dv; ++d)
            to[n][h][i][j] += at_g[n][h][i][d] * at_v[n][h / group][j][d];
        }
      }
    }
  }
  return gradient;
}

struct Expected {
  at::Tensor weights, gradient;  // (N, H, L, S), float64

  at::Tensor of(Attribution shown) const {
    const auto product = weights * gradient;
    return shown == Attribution::gradient    ? gradient
           : shown == Attribution::relevance ? product
                                             : product.clamp_min(0);
  }
};

void expect_top(const TopKeys& top, const at::Tensor& numbers, int64_t k, double one) {
  const auto expected = std::get<0>(numbers.clamp_min(0).topk(k, -1));
  EXPECT_TRUE(is_close(top.values, expected, one)) << "top_k values";
  EXPECT_TRUE(at::equal(top.keys.eq(-1), top.values.eq(0)))
      << "top_k: -1 marks nothing above 0";
  const auto found = numbers.gather(-1, top.keys.clamp_min(0)).masked_fill(top.keys == -1, 0);
  EXPECT_TRUE(is_close(found, expected, one)) << "top_k keys";
}

// Every method against dense numbers (N, H, L, S).
void expect_attribution_says(const AttentionAttribution& attribution, const Expected& expected,
                             double weight, Random& random) {
  const int64_t h = expected.weights.size(1), l = expected.weights.size(2),
                s = expected.weights.size(3);
  const auto size = expected.gradient.abs();
  const double largest = size.numel() > 0 ? size.max().item<double>() : 0;
  for (const auto shown : every_attribution) {
    SCOPED_TRACE(::testing::Message() << shown);
    const auto numbers = expected.of(shown);
    const double one = shown == Attribution::gradient ? 0 : weight * (1 + largest);
    EXPECT_TRUE(is_close(attribution.dense(shown), numbers, one)) << "dense";

    const int64_t head = random.between(0, h - 1);
    const int64_t row = random.between(0, l), last_row = random.between(row, l);
    const int64_t key = random.between(0, s), last_key = random.between(key, s);
    const auto of_head = numbers.select(1, head);
    const auto of_rows = numbers.narrow(2, row, last_row - row);
    EXPECT_TRUE(is_close(attribution.head(shown, head), of_head, one)) << "head " << head;
    EXPECT_TRUE(is_close(attribution.rows(shown, row, last_row), of_rows, one)) << "rows";
    EXPECT_TRUE(is_close(attribution.block(shown, head, {row, last_row}, {key, last_key}),
                         of_head.narrow(1, row, last_row - row).narrow(2, key, last_key - key),
                         one))
        << "block";
    const double rounded = 1e-6 * (1 + largest);
    EXPECT_TRUE(is_close(attribution.mean(shown), numbers.mean(1), one + rounded)) << "mean";
    EXPECT_TRUE(
        is_close(attribution.mean(shown, row, last_row), of_rows.mean(1), one + rounded))
        << "mean of rows";

    // Sums in float32 differ by a rounding of their parts for each key or row.
    const auto sums = attribution.sums(shown);
    const auto tolerance = [&](at::IntArrayRef dims) {
      const double terms = size.numel() > 0 ? size.sum(dims).max().item<double>() : 0;
      const double parts =
          numbers.numel() > 0 ? numbers.abs().sum(dims).max().item<double>() : 0;
      return weight * terms + 1e-7 * 32 * (1 + parts);
    };
    EXPECT_TRUE(is_close(sums.by_query, numbers.sum(3), tolerance({3}))) << "by query";
    EXPECT_TRUE(is_close(sums.by_key, numbers.sum(2), tolerance({2}))) << "by key";
    EXPECT_TRUE(is_close(sums.by_head, numbers.sum({2, 3}), tolerance({2, 3}))) << "by head";
    if (s > 0) {
      const int64_t k = random.between(1, s);
      expect_top(attribution.top_k(shown, k), numbers, k, one);
    }
    if (l > 0 && s > 0) {
      const int64_t rows = random.between(1, l), columns = random.between(1, s);
      EXPECT_TRUE(is_close(attribution.pooled(shown, rows, columns),
                           pooled_of(numbers, rows, columns), tolerance({3})))
          << "pooled to " << rows << " x " << columns;
    }
  }
}

struct Inputs {
  at::Tensor query, key, value, grad_output;
};

Inputs draw_inputs(Random& random, const Sizes& sizes, int64_t kv_heads, int64_t d, int64_t dv,
                   at::ScalarType dtype) {
  return {random.normal({sizes.n, sizes.l, sizes.h, d}, dtype).transpose(1, 2),
          random.normal({sizes.n, kv_heads, sizes.s, d}, dtype),
          halves(random, {sizes.n, kv_heads, sizes.s, dv}, dtype),
          halves(random, {sizes.n, sizes.l, sizes.h, dv}, dtype).transpose(1, 2)};
}

Expected expected_of(const Inputs& in, const Mask& mask, const AttentionOptions& options) {
  const auto &q = in.query, &k = in.key;
  const auto dense = dense_mask(mask, q.size(0), q.size(1), q.size(2), k.size(2));
  const double scale = options.scale().value_or(1 / std::sqrt(static_cast<double>(q.size(3))));
  const auto weights =
      oracle_attention(q, k, in.value, dense, {scale, options.softcap(), options.sinks()})
          .weights;
  return {weights, gradient_by_loops(in.value, in.grad_output, dense.allowed)};
}

AttentionAttribution attribution_of(const Inputs& in, const Mask& mask,
                                    const AttentionOptions& options = {}) {
  return {AttentionMap(in.query, in.key, mask, options), in.value, in.grad_output};
}

TEST(AttentionAttributionTest, SaysWhatTheLoopsSayUnderEveryMask) {
  const Sizes sizes{2, 2, 19, 70};
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    Random random(1);
    for (const auto& sample : mask_samples(sizes)) {
      SCOPED_TRACE(::testing::Message() << sample.name << ", " << dtype);
      const auto in = draw_inputs(random, sizes, 1, 8, 5, dtype);
      expect_attribution_says(attribution_of(in, sample.mask), expected_of(in, sample.mask, {}),
                              weight_tolerance(dtype), random);
    }
  }
}

// Several tiles and blocks of keys, shared key/value heads, score options.
TEST(AttentionAttributionTest, SaysWhatTheLoopsSayAcrossBlocks) {
  for (uint64_t seed = 0; seed < 16; ++seed) {
    Random random(seed);
    const int64_t kv_heads = random.between(1, 3), heads = kv_heads * random.between(1, 3);
    const int64_t longest = random.chance(0.3) ? 300 : 60, n = random.between(1, 2);
    const Sizes sizes{n, heads, random.between(1, longest), random.between(1, longest)};
    const int64_t d = random.between(1, 40),
                  dv = random.chance(0.3) ? 64 : random.between(1, 20);
    const auto dtype = seed % 4 == 3 ? at::kDouble : at::kFloat;
    const auto in = draw_inputs(random, sizes, kv_heads, d, dv, dtype);
    Mask mask;
    if (random.chance(0.4)) mask = mask & Mask::causal();
    if (random.chance(0.3)) mask = mask & Mask::window(random.between(0, 40), 5);
    if (random.chance(0.3)) mask = mask & Mask::keep(random.coins({sizes.l, sizes.s}, 0.6));
    if (random.chance(0.3)) mask = mask & Mask::keep_keys(random.coins({n, sizes.s}, 0.7));
    AttentionOptions options;
    if (random.chance(0.4)) options.softcap(1.5);
    if (random.chance(0.4)) options.sinks(random.normal({heads}, dtype));
    SCOPED_TRACE(::testing::Message()
                 << "seed " << seed << ": N=" << n << " H=" << heads << " Hk=" << kv_heads
                 << " L=" << sizes.l << " S=" << sizes.s << " D=" << d << " Dv=" << dv
                 << " mask " << mask << " " << dtype);
    expect_attribution_says(attribution_of(in, mask, options), expected_of(in, mask, options),
                            weight_tolerance(dtype), random);
  }
}

// 2^21 pairs at a time are 2,000 of these rows: two heads in parts each.
TEST(AttentionAttributionTest, ThePlainPathFormsSomeRowsAtATime) {
  Random random(2);
  const Sizes sizes{1, 2, 2200, 1000};
  const auto in = draw_inputs(random, sizes, 1, 4, 3, at::kDouble);
  const auto attribution = attribution_of(in, Mask::causal());
  const auto gradient =
      at::matmul(in.grad_output, in.value.transpose(-2, -1))
          .masked_fill(at::ones({2200, 1000}, at::kBool).triu(1000 - 2200 + 1), 0);
  const auto product = AttentionMap(in.query, in.key, Mask::causal()).dense() * gradient;
  const auto sums = attribution.sums(Attribution::positive_relevance);
  EXPECT_TRUE(is_close(sums.by_key, product.clamp_min(0).sum(2), 1e-11));
  EXPECT_TRUE(is_close(sums.by_query, product.clamp_min(0).sum(3), 1e-11));
  EXPECT_TRUE(is_close(attribution.mean(Attribution::relevance), product.mean(1), 1e-12));
  EXPECT_TRUE(is_close(attribution.pooled(Attribution::gradient, 7, 9),
                       pooled_of(gradient, 7, 9), 1e-11));
}

// The gradient and the product are what autograd finds for weights that a caller multiplies
// with the values himself.
TEST(AttentionAttributionTest, IsTheGradientThatAutogradFindsForReturnedWeights) {
  Random random(3);
  const auto q = leaf(random.normal({2, 4, 9, 8}, at::kDouble));
  const auto k = leaf(random.normal({2, 4, 11, 8}, at::kDouble));
  const auto v = leaf(random.normal({2, 4, 11, 6}, at::kDouble));
  const auto mask = Mask::causal() & Mask::lengths(torch::tensor({11, 7}));
  auto [output, weights] = scaled_dot_product_attention(q, k, v, mask);
  weights.retain_grad();
  const auto heads = at::matmul(weights, v);
  heads.retain_grad();
  EXPECT_TRUE(is_close(heads, output, 1e-14));
  heads.tanh().pow(2).sum().backward();
  const auto open = weights.detach() > 0;
  const AttentionAttribution attribution(AttentionMap(q, k, mask), v, heads.grad());
  EXPECT_TRUE(is_close(attribution.dense(Attribution::gradient),
                       weights.grad().masked_fill(open.logical_not(), 0), 1e-14));
  EXPECT_TRUE(is_close(attribution.dense(Attribution::relevance),
                       weights.grad() * weights.detach(), 1e-14));
  EXPECT_FALSE(attribution.dense(Attribution::relevance).requires_grad());
}

// What the header says of the sums: they follow from the output and from the gradient of the
// values, without a map.
TEST(AttentionAttributionTest, SumsOfRelevanceFollowFromOutputAndGradientOfTheValues) {
  Random random(4);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto in = draw_inputs(random, {2, 3, 50, 90}, 3, 16, 8, dtype);
    const auto v = leaf(in.value);
    const auto [output, map] =
        trace_scaled_dot_product_attention(in.query, in.key, v, Mask::causal());
    output.backward(in.grad_output);
    const auto sums = AttentionAttribution(map, v, in.grad_output).sums(Attribution::relevance);
    const double tolerance = dtype == at::kDouble ? 1e-13 : 1e-5;
    const auto by_query = (output.detach() * in.grad_output).sum(-1);
    EXPECT_TRUE(is_close(sums.by_query, by_query, tolerance));
    EXPECT_TRUE(is_close(sums.by_key, (v.grad() * v.detach()).sum(-1), tolerance));
    EXPECT_TRUE(is_close(sums.by_head, by_query.sum(-1), 10 * tolerance));
  }
}

TEST(AttentionAttributionTest, HalfTypesAreWidened) {
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    Random random(5);
    const auto in = draw_inputs(random, {2, 4, 40, 50}, 2, 16, 8, dtype);
    const auto attribution = attribution_of(in, Mask::causal());
    EXPECT_EQ(attribution.mean(Attribution::relevance).scalar_type(), at::kFloat);
    EXPECT_EQ(attribution.grad_output().scalar_type(), dtype);
    expect_attribution_says(attribution, expected_of(in, Mask::causal(), {}),
                            weight_tolerance(at::kFloat), random);
  }
}

TEST(AttentionAttributionTest, ValuesBeyondTheKernelsTakeThePlainPath) {
  Random random(6);
  const auto in = draw_inputs(random, {1, 2, 5, 7}, 1, 8, 300, at::kFloat);
  expect_attribution_says(attribution_of(in, Mask::causal()),
                          expected_of(in, Mask::causal(), {}), 2e-6, random);
}

TEST(AttentionAttributionTest, LeadingDimensionsAreThoseOfTheCall) {
  const auto q = torch::randn({2, 3, 4, 5, 8}), k = torch::randn({2, 3, 2, 7, 8});
  const auto v = torch::randn({2, 3, 2, 7, 6}), g = torch::randn({2, 3, 4, 5, 6});
  const AttentionAttribution whole(AttentionMap(q, k), v, g);
  const AttentionAttribution one(AttentionMap(q[1][2], k[1][2]), v[1][2], g[1][2]);
  const auto shown = Attribution::relevance;
  EXPECT_EQ(whole.head(shown, 1).sizes(), (std::vector<int64_t>{2, 3, 5, 7}));
  EXPECT_EQ(whole.sums(shown).by_head.sizes(), (std::vector<int64_t>{2, 3, 4}));
  EXPECT_EQ(one.sums(shown).by_key.sizes(), (std::vector<int64_t>{4, 7}));
  EXPECT_EQ(one.top_k(shown, 2).keys.sizes(), (std::vector<int64_t>{4, 5, 2}));
  EXPECT_TRUE(is_close(whole.dense(shown)[1][2], one.dense(shown), 1e-6));
  EXPECT_TRUE(at::equal(whole.value(), v) && at::equal(whole.grad_output(), g));
  EXPECT_TRUE(at::equal(whole.map().query(), q));
  EXPECT_EQ(whole.nbytes(), whole.map().nbytes() + 4 * (v.numel() + g.numel()));
}

TEST(AttentionAttributionTest, EmptySizesGiveEmptyOrZeroResults) {
  for (const auto& [n, l, s, dv] :
       {std::tuple{0, 3, 4, 5}, {2, 0, 4, 5}, {2, 3, 0, 5}, {2, 3, 4, 0}, {0, 0, 0, 0}}) {
    SCOPED_TRACE(::testing::Message() << "N=" << n << " L=" << l << " S=" << s << " Dv=" << dv);
    const AttentionAttribution attribution(
        AttentionMap(torch::randn({n, 2, l, 8}), torch::randn({n, 2, s, 8})),
        torch::randn({n, 2, s, dv}), torch::randn({n, 2, l, dv}));
    Random random(0);
    const auto zeros = at::zeros({n, 2, l, s}, at::kDouble);
    expect_attribution_says(attribution, {zeros, zeros}, 0, random);
  }
}

// -- What lies behind a mask, and NaN in sight.

std::vector<at::Tensor> all_results(const AttentionAttribution& attribution) {
  std::vector<at::Tensor> results;
  for (const auto shown : every_attribution) {
    const auto sums = attribution.sums(shown);
    const auto top = attribution.top_k(shown, 3);
    for (const auto& result :
         {attribution.dense(shown), attribution.head(shown, 1), attribution.rows(shown, 1, 3),
          attribution.block(shown, 0, {0, 4}, {1, 5}), attribution.mean(shown), sums.by_head,
          sums.by_query, sums.by_key, top.values, top.keys, attribution.pooled(shown, 2, 3)}) {
      results.push_back(result);
    }
  }
  return results;
}

TEST(AttentionAttributionTest, WhatLiesBehindAMaskIsNeverSeen) {
  Random random(7);
  const auto dead = torch::zeros({6}, at::kBool).index_fill(0, torch::tensor({2}), true);
  const auto bad = random.coins({2, 6}, 0.4);
  // Padded keys, and a query that sees nothing.
  const auto mask = Mask::block_keys(bad) & Mask::block(dead.unsqueeze(1).expand({6, 6}));
  const auto keys = bad.view({2, 1, 6, 1}), row = dead.view({1, 1, 6, 1});
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto in = draw_inputs(random, {2, 2, 6, 6}, 2, 8, 5, dtype);
    const auto hide = [&](double hidden) {
      return Inputs{in.query.masked_fill(row, hidden), in.key.masked_fill(keys, hidden),
                    in.value.masked_fill(keys, hidden),
                    in.grad_output.masked_fill(row, hidden)};
    };
    const auto without = all_results(attribution_of(hide(0), mask));
    for (const double hidden : {std::nan(""), infinity}) {
      const auto with = all_results(attribution_of(hide(hidden), mask));
      for (size_t i = 0; i < with.size(); ++i) {
        EXPECT_TRUE(is_same_result(with[i], without[i]))
            << "result " << i << ", " << hidden << ", " << dtype;
        EXPECT_TRUE(is_finite(with[i]));
      }
    }
    EXPECT_TRUE(all_zero(attribution_of(in, mask).rows(Attribution::gradient, 2, 3)));
  }
}

// A value that some queries may not see, beyond a tile, and a gradient that is NaN.
TEST(AttentionAttributionTest, NanReachesTheOpenPairsOfItsQueryOrKey) {
  Random random(8);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto in = draw_inputs(random, {1, 2, 60, 60}, 2, 8, 5, dtype);
    in.value.select(2, 20).select(-1, 1).fill_(std::nan(""));
    in.grad_output.select(2, 10).fill_(std::nan(""));
    const auto attribution = attribution_of(in, Mask::causal());
    const auto index = at::arange(60);
    const auto open = index.unsqueeze(1) >= index;
    const auto unknown = open.logical_and(index.eq(20).logical_or(index.unsqueeze(1).eq(10)));
    for (const auto shown : every_attribution) {
      SCOPED_TRACE(::testing::Message() << shown << ", " << dtype);
      EXPECT_TRUE(at::equal(attribution.dense(shown).isnan()[0][1], unknown));
      const auto sums = attribution.sums(shown);
      EXPECT_TRUE(at::equal(sums.by_query.isnan()[0][0], unknown.any(1)));
      EXPECT_TRUE(at::equal(sums.by_key.isnan()[0][0], unknown.any(0)));
      const auto top = attribution.top_k(shown, 2);
      EXPECT_TRUE(at::equal(top.values.isnan().all(-1)[0][0], unknown.any(1)));
      EXPECT_TRUE(all_zero(top.keys.masked_select(top.values.isnan()) + 1));
    }
  }
}

// -- Errors.

TEST(AttentionAttributionTest, ATensorThatDoesNotFitTheCallIsNamed) {
  const AttentionMap map(torch::randn({2, 4, 5, 8}), torch::randn({2, 2, 7, 8}));
  const auto v = torch::randn({2, 2, 7, 6}), g = torch::randn({2, 4, 5, 6});
  const auto make = [&](const at::Tensor& value, const at::Tensor& grad) {
    return [=] { AttentionAttribution(map, value, grad); };
  };
  EXPECT_TRUE(refuses(make({}, g), {"AttentionAttribution", "value", "undefined"}));
  EXPECT_TRUE(refuses(make(v, {}), {"grad_output", "undefined"}));
  EXPECT_TRUE(refuses(make(torch::randn({2, 2, 8, 6}), g), {"value", "7", "8"}));
  EXPECT_TRUE(refuses(make(torch::randn({2, 4, 7, 6}), g), {"value", "Hk"}));
  EXPECT_TRUE(refuses(make(torch::randn({2, 7, 6}), g), {"value"}));
  EXPECT_TRUE(refuses(make(v, torch::randn({2, 4, 5, 7})), {"grad_output", "6", "7"}));
  EXPECT_TRUE(refuses(make(v, torch::randn({2, 5, 4, 6})), {"grad_output"}));
  EXPECT_TRUE(refuses(make(v.to(at::kDouble), g), {"value", "dtype", "keys", "Double"}));
  EXPECT_TRUE(refuses(make(v, g.to(at::kHalf)), {"grad_output", "dtype", "queries"}));
  EXPECT_TRUE(refuses(make(v.to(at::kLong), g), {"value", "floating"}));
  EXPECT_TRUE(refuses(make(v.to(at::kMeta), g), {"value", "device", "meta"}));
}

TEST(AttentionAttributionTest, AnIndexOutsideItsRangeIsNamed) {
  const auto q = torch::randn({1, 2, 5, 8}), k = torch::randn({1, 2, 7, 8});
  const AttentionAttribution a(AttentionMap(q, k), k, q);
  const auto shown = Attribution::gradient;
  EXPECT_TRUE(refuses([&] { a.head(shown, 2); }, {"AttentionAttribution", "head", "1", "2"}));
  EXPECT_TRUE(refuses([&] { a.rows(shown, 2, 6); }, {"rows", "5", "2", "6"}));
  EXPECT_TRUE(refuses([&] { a.block(shown, 0, {0, 1}, {0, 8}); }, {"keys", "7", "8"}));
  EXPECT_TRUE(refuses([&] { a.mean(shown, -1, 2); }, {"mean", "5"}));
  EXPECT_TRUE(refuses([&] { a.top_k(shown, 8); }, {"top_k", "1", "7", "8"}));
  EXPECT_TRUE(refuses([&] { a.pooled(shown, 6, 1); }, {"pooled", "rows", "5", "6"}));
  EXPECT_TRUE(refuses([&] { a.pooled(shown, 1, 0); }, {"pooled", "columns", "7", "0"}));
  EXPECT_TRUE(refuses([&] { a.dense(static_cast<Attribution>(9)); }, {"shown", "9"}));
}

TEST(AttentionAttributionTest, WhatWasMovedFromOrModifiedIsAnError) {
  const auto q = torch::randn({1, 2, 5, 8}), v = torch::randn({1, 2, 5, 6}),
             g = torch::randn({1, 2, 5, 6});
  AttentionAttribution from(AttentionMap(q, q), v, g);
  const AttentionAttribution to = std::move(from);
  EXPECT_TRUE(refuses([&] { from.dense(Attribution::gradient); }, {"moved"}));
  to.dense(Attribution::gradient);
  v.add_(1);
  EXPECT_TRUE(refuses([&] { to.dense(Attribution::gradient); }, {"value", "modified"}));
  const AttentionAttribution again(AttentionMap(q, q), v, g);
  g.add_(1);
  EXPECT_TRUE(
      refuses([&] { again.sums(Attribution::relevance); }, {"grad_output", "modified"}));
  const AttentionAttribution stale(AttentionMap(q, q), v, g);
  q.add_(1);
  EXPECT_TRUE(refuses([&] { stale.sums(Attribution::relevance); }, {"query", "modified"}));
}

// -- Threads and memory.

TEST(AttentionAttributionTest, ResultsAreBitEqualForAnyNumberOfThreads) {
  if (detail::kernels_are_off()) GTEST_SKIP() << "ATen's products may differ";
  Random random(9);
  const auto q = random.normal({1, 2, 700, 16}), k = random.normal({1, 1, 600, 16});
  const auto v = random.normal({1, 1, 600, 12}), g = random.normal({1, 2, 700, 12});
  const AttentionAttribution attribution(AttentionMap(q, k, Mask::window(300, 20)), v, g);
  std::vector<at::Tensor> expected;
  for (const int threads : {1, 2, 4, 8}) {
    const ThreadCount count(threads);
    const auto actual = all_results(attribution);
    if (expected.empty()) expected = actual;
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_TRUE(is_bit_equal(actual[i], expected[i])) << "result " << i << ", " << threads;
    }
  }
}

TEST(AttentionAttributionTest, OneObjectServesSeveralThreads) {
  Random random(10);
  const auto q = random.normal({1, 2, 100, 16}), v = random.normal({1, 2, 100, 8});
  const AttentionAttribution attribution(AttentionMap(q, q, Mask::causal()), v, v);
  const auto expected = AttentionAttribution(AttentionMap(q, q, Mask::causal()), v, v)
                            .dense(Attribution::relevance);
  std::vector<at::Tensor> found(4);
  std::vector<std::thread> threads;
  for (auto& result : found) {
    threads.emplace_back([&] { result = attribution.dense(Attribution::relevance); });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& result : found) EXPECT_TRUE(is_same_result(result, expected));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// The weights would take 512 MiB, and as many again the gradient and the product. The plain
// path forms 2^21 pairs at a time, and a dozen copies of them.
TEST(AttentionAttributionTest, LongInputsTakeNoMemoryForAMap) {
  const bool plain = detail::kernels_are_off();
  const int64_t t = 4096, h = 8, d = 16;
  const auto q = torch::randn({1, h, t, d}), k = torch::randn({1, h, t, d});
  const auto v = torch::randn({1, h, t, d}), g = torch::randn({1, h, t, d});
  const ThreadCount threads(2);  // each has scratch of its own
  const AttentionAttribution attribution(AttentionMap(q, k, Mask::causal()), v, g);
  attribution.rows(Attribution::relevance, 0, 1);  // row statistics, what is loaded at first
  PeakMemory::reset();
  const double before = PeakMemory::mib();
  if (before == 0) GTEST_SKIP() << "no VmHWM in /proc/self/status";
  const auto sums = attribution.sums(Attribution::positive_relevance);
  const auto pooled = attribution.pooled(Attribution::relevance, 64, 64);
  // The plain path sorts, which is slow.
  const auto shorter = [&](const at::Tensor& x) { return x.narrow(2, t - 256, 256); };
  const auto some =
      plain ? AttentionAttribution(AttentionMap(shorter(q), k, Mask::causal()), v, shorter(g))
            : attribution;
  const auto top = some.top_k(Attribution::relevance, 8);
  EXPECT_LT(PeakMemory::mib() - before, plain ? 12 * 8 + 32 : 32);
  const auto last = attribution.rows(Attribution::relevance, t - 1, t).squeeze(2);
  EXPECT_TRUE(is_close(top.values.select(2, -1), std::get<0>(last.topk(8)), 1e-5));
  EXPECT_TRUE(is_close(sums.by_query.select(2, -1), last.clamp_min(0).sum(-1), 1e-4));
  EXPECT_TRUE(is_finite(pooled));
}
#endif

// -- Layers.

TEST(AttentionRelevanceTest, AddsEachLayersPositiveRelevanceOfWhatCameBefore) {
  Random random(11);
  std::vector<AttentionAttribution> layers;
  auto expected = at::eye(6, at::kDouble).expand({2, 6, 6});
  for (int layer = 0; layer < 3; ++layer) {
    const auto in = draw_inputs(random, {2, 3, 6, 6}, 3, 8, 4, at::kFloat);
    layers.push_back(attribution_of(in, Mask::causal()));
    const auto mean =
        expected_of(in, Mask::causal(), {}).of(Attribution::positive_relevance).mean(1);
    expected = expected + at::matmul(mean, expected);
  }
  EXPECT_TRUE(is_close(attention_relevance(layers), expected, 2e-5));
  // Nothing but the token itself before the first layer that has a gradient.
  const auto q = random.normal({6, 8}).unsqueeze(0);
  const AttentionAttribution none(AttentionMap(q, q), q, at::zeros_like(q));
  EXPECT_TRUE(at::equal(attention_relevance({none}), at::eye(6)));
}

TEST(AttentionRelevanceTest, RefusesLayersThatDoNotFit) {
  const auto layer = [](int64_t n, int64_t l, int64_t s) {
    const auto q = torch::randn({n, 2, l, 8}), k = torch::randn({n, 2, s, 8});
    return AttentionAttribution(AttentionMap(q, k), k, q);
  };
  EXPECT_TRUE(refuses([] { attention_relevance({}); }, {"layers", "none"}));
  EXPECT_TRUE(refuses([&] { attention_relevance({layer(1, 5, 6)}); }, {"5", "6", "0"}));
  EXPECT_TRUE(
      refuses([&] { attention_relevance({layer(1, 5, 5), layer(1, 6, 6)}); }, {"5", "6", "1"}));
  EXPECT_TRUE(
      refuses([&] { attention_relevance({layer(1, 5, 5), layer(2, 5, 5)}); }, {"1", "2"}));
}

}  // namespace
}  // namespace mha::test
