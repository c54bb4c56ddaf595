// Attention maps against the dense weights that the same call returns: every method, every
// mask, every instruction set and the plain path.
//
// Tolerance: weights differ by 2e-7 (float32) or 1e-14 (float64), since a block's maximum may
// have been another when the call's own were formed. A sum over m weights then differs by m
// times that; an entropy by 2e-7 * (1 + ln S), of which 2 are allowed for its own rounding.

#include <gtest/gtest.h>
#include <mha/attention_map.h>
#include <mha/multi_head_attention.h>

#include <cmath>
#include <string>
#include <vector>

#include "runtime/attention_path.h"
#include "support/dense_map.h"
#include "support/expect.h"
#include "support/random_configuration.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

// The kernels form a map as they formed the output. On the plain path LibTorch's BLAS may sum
// the products in another order: scores of up to 8 in partial sums over at most 64 dimensions
// differ by some 8 * sqrt(64) roundings, and a weight by a quarter of twice that.
double weight_tolerance(at::ScalarType dtype) {
  if (dtype == at::kDouble) return 1e-14;
  return detail::kernels_are_off() ? 2e-6 : 2e-7;
}

void expect_top_keys(const TopKeys& top, const at::Tensor& weights, int64_t k, double one) {
  const auto expected = std::get<0>(weights.topk(k, -1));
  EXPECT_TRUE(is_close(top.values, expected, one)) << "top_k values";
  EXPECT_TRUE(at::equal(top.keys.eq(-1), top.values.eq(0))) << "top_k: -1 marks weights of 0";
  const auto at_keys = weights.gather(-1, top.keys.clamp_min(0));
  EXPECT_TRUE(is_close(at_keys.masked_fill(top.keys == -1, 0), expected, one)) << "top_k keys";
  const auto found = at::zeros_like(weights).scatter_add(
      -1, top.keys.clamp_min(0), top.keys.ge(0).to(weights.scalar_type()));
  EXPECT_FALSE(found.gt(1).any().item<bool>()) << "top_k names a key twice";
}

// Every method of `map` against dense weights (N, H, L, S) of any leading dimensions.
void expect_map_says(const AttentionMap& map, const at::Tensor& dense, int64_t given,
                     Random& random) {
  const auto weights = dense.detach().to(at::kDouble);
  const int64_t h = weights.size(-3), l = weights.size(-2), s = weights.size(-1);
  const double one = weight_tolerance(dense.scalar_type());
  EXPECT_EQ(map.num_heads(), h);
  EXPECT_EQ(map.num_queries(), l);
  EXPECT_EQ(map.num_keys(), s);
  EXPECT_TRUE(is_close(map.dense(), weights, one)) << "dense";

  const int64_t head = random.between(0, h - 1);
  const int64_t row = random.between(0, l), last_row = random.between(row, l);
  const int64_t key = random.between(0, s), last_key = random.between(key, s);
  const auto of_head = weights.select(-3, head);
  const auto of_rows = weights.narrow(-2, row, last_row - row);
  EXPECT_TRUE(is_close(map.head(head), of_head, one)) << "head " << head;
  EXPECT_TRUE(is_close(map.rows(row, last_row), of_rows, one)) << row << " to " << last_row;
  EXPECT_TRUE(is_close(map.block(head, {row, last_row}, {key, last_key}),
                       of_head.narrow(-2, row, last_row - row).narrow(-1, key, last_key - key),
                       one))
      << "block " << head << ": " << row << " to " << last_row << ", " << key << " to "
      << last_key;
  EXPECT_TRUE(is_close(map.mean(), weights.mean(-3), one)) << "mean";
  EXPECT_TRUE(is_close(map.mean(row, last_row), of_rows.mean(-3), one)) << "mean of rows";

  const double length = static_cast<double>(std::max<int64_t>({l, s, 1}));
  EXPECT_TRUE(is_close(map.entropy(), entropy_of(weights), 2.5 * one * (1 + std::log(length))))
      << "entropy";
  EXPECT_TRUE(is_close(map.received(), weights.sum(-2), one * length)) << "received";
  EXPECT_TRUE(is_close(map.distance(), distance_of(weights, given), 2 * one * length))
      << "distance";
  if (s > 0) {
    for (const int64_t k : {int64_t{1}, random.between(1, s), s}) {
      expect_top_keys(map.top_k(k), weights, k, one);
    }
  }
  if (l > 0 && s > 0) {
    const int64_t rows = random.between(1, l), columns = random.between(1, s);
    EXPECT_TRUE(is_close(map.pooled(rows, columns), pooled_of(weights, rows, columns),
                         one * static_cast<double>(s / columns + 1)))
        << "pooled to " << rows << " x " << columns;
  }
  const auto scores = map.scores(ScoreStage::masked), sum = map.log_sum_exp();
  const auto from_scores = at::exp(scores - sum.masked_fill(sum == -infinity, 0).unsqueeze(-1));
  EXPECT_TRUE(is_close(from_scores, weights, 20 * one)) << "exp(scores - log_sum_exp)";
  if (!map.sinks().defined()) {
    EXPECT_TRUE(at::equal(sum == -infinity, weights.sum(-1) == 0))
        << "log_sum_exp of dead rows";
  }
}

TEST(AttentionMapTest, SaysWhatTheWeightsOfTheModuleSayInRandomConfigurations) {
  const at::NoGradGuard no_grad;
  const auto chosen = seed_from_environment();
  for (uint64_t seed = chosen.value_or(0); seed < chosen.value_or(99) + 1; ++seed) {
    const auto c = draw_configuration(seed);
    SCOPED_TRACE(describe(c));
    const auto data = draw_call(c);
    MultiHeadAttention module(c.options);
    randomise_parameters(*module, seed);
    const auto query = to_layout(data.query, c.layout), key = to_layout(data.key, c.layout);
    const auto value = to_layout(data.value, c.layout);
    const auto expected = module->forward(query, key, value, data.mask, Weights::per_head);
    const auto [output, map] = module->trace(query, key, value, data.mask);
    EXPECT_TRUE(is_same_result(
        output, module->forward(query, key, value, data.mask, Weights::none).output));
    Random random(seed);
    expect_map_says(map, expected.weights, c.S, random);
  }
}

struct Heads {
  at::Tensor query, key, value;
};

// Terms of every kind, each with a good chance.
Mask draw_mask(Random& random, int64_t n, int64_t h, int64_t l, int64_t s) {
  const auto plane = [&] {
    return std::vector<int64_t>{random.chance(0.5) ? n : 1, random.chance(0.5) ? h : 1, l, s};
  };
  Mask mask;
  if (random.chance(0.3)) mask = mask & Mask::causal();
  if (random.chance(0.2)) mask = mask & Mask::causal(Mask::Alignment::top_left);
  if (random.chance(0.25))
    mask = mask & Mask::window(random.between(-1, 40), random.between(-1, 40));
  if (random.chance(0.25)) {
    auto lengths = at::empty({n}, at::kLong);
    for (int64_t i = 0; i < n; ++i) lengths[i] = random.between(0, s);
    mask = mask & Mask::lengths(lengths);
  }
  if (random.chance(0.25)) mask = mask & Mask::keep_keys(random.coins({n, s}, 0.7));
  if (random.chance(0.25)) mask = mask & Mask::block_keys(random.coins({s}, 0.2));
  if (random.chance(0.25)) mask = mask & Mask::keep(random.coins(plane(), 0.6));
  if (random.chance(0.25)) mask = mask & Mask::block(random.coins({l, s}, 0.3));
  if (random.chance(0.25)) {
    auto added = random.normal(plane());
    if (random.chance(0.5)) added.masked_fill_(added > 0.5, -infinity);
    mask = mask & Mask::add(added);
  }
  if (random.chance(0.25)) {
    auto offsets = at::empty({n}, at::kLong);
    for (int64_t i = 0; i < n; ++i) offsets[i] = random.between(-5, s);
    mask = mask & Mask::window(random.between(-1, 40), random.between(-1, 40), offsets);
  }
  if (random.chance(0.25)) {
    auto ids = at::empty({s}, at::kLong);
    for (int64_t i = 0; i < s; ++i) ids[i] = i / 37 + random.between(0, 1);
    auto of_queries = at::empty({n, l}, at::kLong);
    for (int64_t i = 0; i < n * l; ++i) of_queries.view(-1)[i] = random.between(0, s / 37);
    mask = mask & Mask::documents(of_queries, ids);
  }
  if (random.chance(0.25)) {
    mask = mask & Mask::relative(random.normal({random.chance(0.5) ? h : 1, l + s - 1}));
  }
  return mask;
}

// Sizes beyond several tiles and key blocks, shared key/value heads, several leading
// dimensions.
TEST(AttentionMapTest, SaysWhatTheWeightsOfTheFunctionSayAcrossBlocks) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Random random(seed);
    const int64_t kv_heads = random.between(1, 3), h = kv_heads * random.between(1, 3);
    const int64_t longest = random.chance(0.3) ? 300 : 60, n = random.between(1, 3);
    const int64_t l = random.between(1, longest), s = random.between(1, longest);
    const int64_t d = random.chance(0.5) ? 64 : random.between(1, 40);
    const auto query = random.normal({n, l, h, d}).transpose(1, 2);
    const auto key = random.normal({n, kv_heads, s, d}),
               value = random.normal({n, kv_heads, s, 3});
    const auto mask = draw_mask(random, n, h, l, s);
    auto options = AttentionOptions().scale(1.5 / std::sqrt(static_cast<double>(d)));
    Random score_options(seed + 100);
    if (score_options.chance(0.4)) options.softcap(1.5);
    if (score_options.chance(0.4)) options.sinks(score_options.normal({h}));
    std::ostringstream setting;
    setting << "seed " << seed << ": N=" << n << " H=" << h << " Hk=" << kv_heads << " L=" << l
            << " S=" << s << " D=" << d << " mask " << mask << " softcap " << options.softcap()
            << (options.sinks().defined() ? " sinks" : "");
    SCOPED_TRACE(setting.str());
    const auto expected = scaled_dot_product_attention(query, key, value, mask, options);
    const auto [output, map] =
        trace_scaled_dot_product_attention(query, key, value, mask, options);
    EXPECT_TRUE(is_same_result(
        output, scaled_dot_product_attention(query, key, value, mask,
                                             AttentionOptions(options).weights(Weights::none))
                    .output));
    expect_map_says(map, expected.weights, s, random);
    EXPECT_TRUE(is_close(AttentionMap(query, key, mask, options).dense(), expected.weights,
                         weight_tolerance(at::kFloat)))
        << "from queries and keys alone";
  }
}

TEST(AttentionMapTest, LeadingDimensionsAreThoseOfTheCall) {
  const auto q = torch::randn({2, 3, 4, 5, 8}), k = torch::randn({2, 3, 2, 7, 8});
  const AttentionMap map(q, k);
  EXPECT_EQ(map.dense().sizes(), (std::vector<int64_t>{2, 3, 4, 5, 7}));
  EXPECT_EQ(map.head(1).sizes(), (std::vector<int64_t>{2, 3, 5, 7}));
  EXPECT_EQ(map.distance().sizes(), (std::vector<int64_t>{2, 3, 4}));
  EXPECT_EQ(AttentionMap(q[0][0], k[0][0]).entropy().sizes(), (std::vector<int64_t>{4, 5}));
  EXPECT_TRUE(at::equal(map.query(), q) && at::equal(map.key(), k));
  EXPECT_EQ(map.scale(), 1 / std::sqrt(8.0));
}

TEST(AttentionMapTest, EmptySizesGiveEmptyOrZeroResults) {
  for (const auto& [n, l, s] : {std::tuple{0, 3, 4}, {2, 0, 4}, {2, 3, 0}, {0, 0, 0}}) {
    SCOPED_TRACE(::testing::Message() << "N=" << n << " L=" << l << " S=" << s);
    const AttentionMap map(torch::randn({n, 2, l, 8}), torch::randn({n, 2, s, 8}));
    Random random(0);
    expect_map_says(map, at::zeros({n, 2, l, s}), s, random);
    EXPECT_TRUE(all_zero(map.entropy()));
    EXPECT_TRUE(all_zero(map.distance()));
  }
}

TEST(AttentionMapTest, EntropyOfEqualScoresIsTheLogarithmOfTheirNumber) {
  const auto zeros = at::zeros({1, 1, 5, 8});
  const auto entropy = AttentionMap(zeros, zeros, Mask::causal()).entropy()[0][0];
  for (int64_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(entropy[i].item<double>(), std::log(static_cast<double>(i + 1)), 3e-7);
  }
}

TEST(AttentionMapTest, DistanceCountsKeysFromTheAlignedPosition) {
  const auto q = at::zeros({1, 1, 2, 8}), k = at::zeros({1, 1, 6, 8});
  // Two queries stand at keys 4 and 5; each sees itself and the key before.
  EXPECT_NEAR(AttentionMap(q, k, Mask::window(1, 0)).distance().item<double>(), 0.5, 1e-6);
  // Seen from the top left, queries 0 and 1 still stand at keys 4 and 5.
  EXPECT_NEAR(AttentionMap(q, k, Mask::window(0, 0, Mask::Alignment::top_left))
                  .distance()
                  .item<double>(),
              4, 1e-6);
}

TEST(AttentionMapTest, OfEqualWeightsTheEarlierKeysAreTheTop) {
  const auto zeros = at::zeros({1, 1, 3, 8});
  const auto keys = AttentionMap(zeros, at::zeros({1, 1, 200, 8})).top_k(4).keys;
  EXPECT_TRUE(at::equal(keys, at::arange(4).expand({1, 1, 3, 4})));
  const auto few = AttentionMap(zeros, zeros, Mask::causal()).top_k(3).keys[0][0];
  EXPECT_TRUE(at::equal(few, torch::tensor({{0, -1, -1}, {0, 1, -1}, {0, 1, 2}})));
}

TEST(AttentionMapTest, ScoresAreShownAtEachStage) {
  Random random(4);
  const auto q = random.normal({2, 4, 5, 8}, at::kDouble),
             k = random.normal({2, 2, 7, 8}, at::kDouble);
  const auto bias = random.normal({5, 7}, at::kDouble);
  const auto mask = Mask::add(bias) & Mask::causal();
  const AttentionMap map(q, k, mask, AttentionOptions().softcap(0.5));
  EXPECT_EQ(map.softcap(), 0.5);
  const auto scaled =
      at::matmul(q, k.repeat_interleave(2, 1).transpose(-2, -1)) / std::sqrt(8.0);
  const auto capped = at::tanh(scaled / 0.5) * 0.5;
  const auto later = at::ones({5, 7}, at::kBool).triu(3);
  const auto masked = (capped + bias).masked_fill(later, -infinity);
  EXPECT_TRUE(is_close(map.scores(ScoreStage::scaled), scaled, 1e-14));
  EXPECT_TRUE(is_close(map.scores(ScoreStage::softcapped), capped, 1e-14));
  EXPECT_TRUE(is_close(map.scores(ScoreStage::masked), masked, 1e-14));
  EXPECT_TRUE(
      is_close(map.scores(ScoreStage::softcapped, 1, 4), capped.narrow(2, 1, 3), 1e-14));
  const AttentionMap plain(q, k, mask);
  EXPECT_TRUE(
      is_same_result(plain.scores(ScoreStage::softcapped), plain.scores(ScoreStage::scaled)));
}

TEST(AttentionMapTest, ASinkIsInTheSumButIsNoKey) {
  Random random(5);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto q = random.normal({2, 4, 50, 8}, dtype), k = random.normal({2, 2, 70, 8}, dtype);
    const auto sinks = random.normal({4}, dtype);
    const auto mask = Mask::lengths(torch::tensor({60, 0}));
    const AttentionMap map(q, k, mask, AttentionOptions().sinks(sinks));
    const auto column = sinks.view({4, 1}).expand({2, 4, 50});
    const auto expected =
        at::cat({map.scores(ScoreStage::masked), column.unsqueeze(-1)}, -1).logsumexp(-1);
    EXPECT_TRUE(is_close(map.log_sum_exp(), expected, 2e-6)) << dtype;
    // What the keys of a row leave to 1, and all in the sample without keys.
    EXPECT_TRUE(is_close(1 - map.dense().sum(-1), at::exp(column - expected), 2e-6)) << dtype;
    EXPECT_TRUE(all_zero(map.dense()[1])) << dtype;
    EXPECT_TRUE(all_zero(map.entropy()[1])) << dtype;
    const auto taken = sinks.clone();
    const AttentionMap stale(q, k, mask, AttentionOptions().sinks(taken));
    taken.add_(1);
    EXPECT_TRUE(refuses([&] { stale.dense(); }, {"sinks", "modified"})) << dtype;
  }
}

TEST(AttentionMapTest, AMapOfAModuleOutlivesAChangeOfItsSinks) {
  MultiHeadAttention module(MultiHeadAttentionOptions(16, 2).sinks(true).softcap(2));
  const at::NoGradGuard no_grad;
  const auto [output, map] = module->trace(torch::randn({2, 9, 16}));
  const auto before = map.dense().clone();
  module->sinks.add_(3);
  EXPECT_TRUE(is_same_result(map.dense(), before));
}

TEST(AttentionMapTest, HalfTypesAreWidened) {
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    Random random(3);
    const auto q = random.normal({2, 4, 50, 16}, dtype),
               k = random.normal({2, 2, 70, 16}, dtype);
    const auto [output, map] = trace_scaled_dot_product_attention(q, k, k, Mask::causal());
    EXPECT_EQ(output.scalar_type(), dtype);
    EXPECT_EQ(map.key().scalar_type(), dtype);
    const auto wide = scaled_dot_product_attention(q.to(at::kFloat), k.to(at::kFloat),
                                                   k.to(at::kFloat), Mask::causal());
    EXPECT_EQ(map.entropy().scalar_type(), at::kFloat);
    expect_map_says(map, wide.weights, 70, random);
  }
}

TEST(AttentionMapTest, AModuleInTrainingShowsTheWeightsBeforeDropout) {
  MultiHeadAttention module(MultiHeadAttentionOptions(16, 2).dropout(0.5));
  const at::NoGradGuard no_grad;
  const auto x = torch::randn({2, 9, 16});
  torch::manual_seed(1);
  const auto expected = module->forward(x);
  torch::manual_seed(1);
  const auto [output, map] = module->trace(x);
  EXPECT_TRUE(is_same_result(output, expected.output));
  EXPECT_TRUE(is_close(map.dense(), expected.weights, 2e-7));
}

}  // namespace
}  // namespace mha::test
