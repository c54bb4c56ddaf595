// What the contract says of attention maps beyond their values: what lies behind a mask, NaN in
// sight, wrong arguments, changed tensors, threads, memory; and the rollout.

#include <gtest/gtest.h>
#include <mha/attention_map.h>

#include <cmath>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "runtime/attention_path.h"
#include "support/expect.h"
#include "support/peak_memory.h"
#include "support/support.h"
#include "support/thread_count.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

// The results of every method, in one list.
std::vector<at::Tensor> all_results(const AttentionMap& map) {
  const auto [entropy, received, distance] = map.summary();
  const auto [values, keys] = map.top_k(3);
  return {map.dense(),
          map.head(1),
          map.rows(1, 3),
          map.block(0, {0, 4}, {1, 5}),
          map.mean(),
          entropy,
          received,
          distance,
          values,
          keys,
          map.pooled(2, 3),
          map.log_sum_exp(),
          map.scores(ScoreStage::masked)};
}

TEST(AttentionMapContractTest, WhatLiesBehindAMaskIsNeverSeen) {
  Random random(4);
  const auto q = random.normal({2, 2, 6, 8}), k = random.normal({2, 2, 6, 8});
  const auto bad = random.coins({2, 6}, 0.4);
  // Padded keys, and queries that see nothing.
  const auto mask =
      Mask::block_keys(bad) &
      Mask::block(torch::zeros({6, 6}, at::kBool).index_fill(0, torch::tensor({2}), true));
  const auto rows = bad.view({2, 1, 6, 1});
  const auto dead = torch::zeros({6}, at::kBool).index_fill(0, torch::tensor({2}), true);
  for (const double hidden : {std::nan(""), infinity}) {
    const auto with = all_results(AttentionMap(q.masked_fill(dead.view({1, 1, 6, 1}), hidden),
                                               k.masked_fill(rows, hidden), mask));
    const auto without = all_results(
        AttentionMap(q.masked_fill(dead.view({1, 1, 6, 1}), 0), k.masked_fill(rows, 0), mask));
    for (size_t i = 0; i < with.size(); ++i) {
      const bool is_scores = i + 1 == with.size();  // which are a product of ATen
      EXPECT_TRUE(is_scores ? is_same_but_for_blas(with[i], without[i])
                            : is_same_result(with[i], without[i]))
          << "result " << i << ", " << hidden;
    }
  }
}

TEST(AttentionMapContractTest, NanReachesTheRowsThatSeeIt) {
  Random random(5);
  const auto q = random.normal({1, 2, 60, 8});
  auto k = random.normal({1, 2, 60, 8});
  k.select(2, 20).fill_(std::nan(""));
  const AttentionMap map(q, k, Mask::causal());
  const auto sees = at::arange(60) >= 20;
  EXPECT_TRUE(at::equal(map.dense().isnan().any(-1)[0][0], sees));
  EXPECT_TRUE(at::equal(map.entropy().isnan()[0][1], sees));
  EXPECT_TRUE(at::equal(map.log_sum_exp().isnan()[0][1], sees));
  const auto top = map.top_k(2);
  EXPECT_TRUE(at::equal(top.values.isnan().all(-1)[0][0], sees));
  EXPECT_TRUE(at::equal(top.keys.eq(-1).all(-1)[0][0], sees));
  // No blocked pair is NaN: keys after the last query of rows 20 .. 58.
  EXPECT_TRUE(is_finite(map.rows(0, 59).select(-1, 59)));
}

// -- Errors.

// Counted from a block's first key, lengths fall below 0.
TEST(AttentionMapContractTest, ABlockBeyondTheLengthShowsZerosWhateverTheLengthsDtype) {
  const auto q = Random(11).normal({1, 1, 3, 8}), k = Random(12).normal({1, 1, 300, 8});
  for (const auto dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
    const AttentionMap map(q, k, Mask::lengths(torch::tensor({3}, dtype)));
    EXPECT_TRUE(all_zero(map.block(0, {0, 3}, {5, 300}))) << dtype;
    EXPECT_TRUE(is_close(map.block(0, {0, 3}, {0, 3}).sum(-1), at::ones({1, 3}), 1e-6));
  }
}

TEST(AttentionMapContractTest, AnIndexOutsideItsRangeIsNamed) {
  const AttentionMap map(torch::randn({1, 2, 5, 8}), torch::randn({1, 2, 7, 8}));
  EXPECT_TRUE(refuses([&] { map.head(2); }, {"head", "0", "1", "2"}));
  EXPECT_TRUE(refuses([&] { map.rows(2, 6); }, {"rows", "5", "2", "6"}));
  EXPECT_TRUE(refuses([&] { map.rows(3, 2); }, {"rows", "3", "2"}));
  EXPECT_TRUE(refuses([&] { map.block(0, {0, 1}, {0, 8}); }, {"keys", "7", "8"}));
  EXPECT_TRUE(refuses([&] { map.mean(-1, 2); }, {"mean", "5"}));
  EXPECT_TRUE(refuses([&] { map.top_k(0); }, {"top_k", "1", "7", "0"}));
  EXPECT_TRUE(refuses([&] { map.top_k(8); }, {"top_k", "1", "7", "8"}));
  EXPECT_TRUE(refuses([&] { map.pooled(6, 1); }, {"pooled", "rows", "5", "6"}));
  EXPECT_TRUE(refuses([&] { map.pooled(1, 0); }, {"pooled", "columns", "7", "0"}));
  EXPECT_TRUE(refuses([&] { map.scores(ScoreStage::scaled, 0, 6); }, {"scores", "5", "6"}));
  EXPECT_TRUE(refuses([] { AttentionMap(torch::randn({2, 5, 8}), torch::randn({2, 5, 4})); },
                      {"key", "8", "4"}));
}

TEST(AttentionMapContractTest, ATensorThatChangedSinceIsAnError) {
  const auto q = torch::randn({1, 2, 5, 8}), k = torch::randn({1, 2, 5, 8});
  const auto keep = at::ones({5, 5}, at::kBool);
  const AttentionMap map(q, k, Mask::keep(keep));
  map.dense();
  k.add_(1);
  EXPECT_TRUE(refuses([&] { map.dense(); }, {"key", "modified"}));
  const AttentionMap other(q, k, Mask::keep(keep));
  keep.fill_(false);
  EXPECT_TRUE(refuses([&] { other.entropy(); }, {"mask", "modified"}));
  EXPECT_TRUE(refuses([&] { other.detach(); }, {"mask", "modified"}));
}

TEST(AttentionMapContractTest, InferenceModeWorks) {
  const c10::InferenceMode inference;
  const auto q = torch::randn({1, 2, 5, 8});
  EXPECT_TRUE(is_close(AttentionMap(q, q).dense().sum(-1), at::ones({1, 2, 5}), 1e-6));
}

// -- Threads and memory.

TEST(AttentionMapContractTest, ResultsAreBitEqualForAnyNumberOfThreads) {
  if (detail::kernels_are_off()) GTEST_SKIP() << "ATen's products may differ";
  Random random(7);
  const auto q = random.normal({1, 2, 1000, 16}), k = random.normal({1, 1, 900, 16});
  const AttentionMap map(q, k, Mask::window(300, 20));
  std::vector<at::Tensor> expected;
  for (const int threads : {1, 2, 4, 8}) {
    const ThreadCount count(threads);
    auto actual = all_results(map);
    actual.pop_back();  // scores are a product of ATen
    if (expected.empty()) expected = actual;
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_TRUE(is_bit_equal(actual[i], expected[i])) << "result " << i << ", " << threads;
    }
  }
}

TEST(AttentionMapContractTest, OneMapServesSeveralThreads) {
  Random random(8);
  const auto q = random.normal({1, 2, 100, 16});
  const AttentionMap map(q, q, Mask::causal());
  const auto expected = AttentionMap(q, q, Mask::causal()).dense();
  std::vector<at::Tensor> found(4);
  std::vector<std::thread> threads;
  for (auto& result : found) threads.emplace_back([&] { result = map.dense(); });
  for (auto& thread : threads) thread.join();
  for (const auto& result : found) EXPECT_TRUE(is_same_result(result, expected));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// The widest instruction set takes a map of 1 GiB, the others of 64 MiB and the plain path,
// which forms 2^21 weights at a time and a dozen copies of them, of 512 MiB.
TEST(AttentionMapContractTest, SummariesOfLongInputsTakeNoMemoryForAMap) {
  const bool plain = detail::kernels_are_off(), fast = !plain && !std::getenv("MHA_CPU_ISA");
  const int64_t t = fast ? 16384 : plain ? 8192 : 4096, h = plain ? 2 : 1;
  const auto q = torch::randn({1, h, t, 32}), k = torch::randn({1, h, t, 32});
  const ThreadCount threads(2);  // each has scratch of its own
  const AttentionMap map(q, k, Mask::causal());
  map.rows(0, 1);  // the row statistics, and what is loaded at first use
  PeakMemory::reset();
  const double before = PeakMemory::mib();
  if (before == 0) GTEST_SKIP() << "no VmHWM in /proc/self/status";
  const auto summary = map.summary();
  // The plain path is slow, above all where it sorts: there of the last queries only.
  const auto some = plain ? AttentionMap(q.narrow(2, t - 512, 512), k, Mask::causal()) : map;
  const auto top = some.top_k(8);
  const auto pooled = some.pooled(64, 64);
  const auto row = map.rows(t - 1, t);
  EXPECT_LT(PeakMemory::mib() - before, plain ? 12 * 8 + 32 : 32);
  EXPECT_TRUE(
      is_close(summary.received.sum(-1), at::full({1, h}, static_cast<double>(t)), 0.05));
  EXPECT_TRUE(is_close(pooled.sum(-1), at::ones({1, h, 64}), 1e-5));
  EXPECT_TRUE(is_close(top.values.select(2, -1), std::get<0>(row.squeeze(2).topk(8)), 2e-7));
}

// A graph over the map would hold its 128 MiB about ten times.
TEST(AttentionMapContractTest, GradientsOfLongInputsTakeNoMemoryForAMap) {
  if (std::getenv("MHA_CPU_ISA")) GTEST_SKIP() << "the backward is the same on each";
  const auto q = leaf(torch::randn({1, 2, 4096, 32})), k = leaf(torch::randn({1, 2, 4096, 32}));
  const ThreadCount threads(2);
  const AttentionMap map(q, k, Mask::causal());
  map.rows(0, 1).sum().backward();
  PeakMemory::reset();
  const double before = PeakMemory::mib();
  if (before == 0) GTEST_SKIP() << "no VmHWM in /proc/self/status";
  const auto [entropy, received, distance] = map.summary();
  (entropy.sum() + received.square().sum() + distance.sum()).backward();
  EXPECT_LT(PeakMemory::mib() - before, 120);
  EXPECT_GT(q.grad().abs().max().item<double>(), 0);
}
#endif

// -- Rollout.

TEST(AttentionMapContractTest, RolloutMultipliesTheLayersWithTheirResidual) {
  Random random(9);
  std::vector<AttentionMap> layers;
  auto expected = at::eye(6, at::kDouble).expand({2, 6, 6});
  for (int layer = 0; layer < 3; ++layer) {
    const auto q = random.normal({2, 3, 6, 8}), k = random.normal({2, 3, 6, 8});
    layers.emplace_back(q, k, Mask::causal());
    const auto mean = scaled_dot_product_attention(q, k, k, Mask::causal()).weights.mean(1);
    expected = at::matmul(0.5 * mean.to(at::kDouble) + 0.5 * at::eye(6, at::kDouble), expected);
  }
  const auto rollout = attention_rollout(layers);
  EXPECT_TRUE(is_close(rollout, expected, 1e-6));
  EXPECT_TRUE(is_close(rollout.sum(-1), at::ones({2, 6}), 1e-6));
}

TEST(AttentionMapContractTest, RolloutRefusesLayersThatDoNotFit) {
  const auto map = [](int64_t n, int64_t l, int64_t s) {
    return AttentionMap(torch::randn({n, 2, l, 8}), torch::randn({n, 2, s, 8}));
  };
  EXPECT_TRUE(refuses([] { attention_rollout({}); }, {"layers", "none"}));
  EXPECT_TRUE(refuses([&] { attention_rollout({map(1, 5, 6)}); }, {"5", "6", "0"}));
  EXPECT_TRUE(
      refuses([&] { attention_rollout({map(1, 5, 5), map(1, 6, 6)}); }, {"5", "6", "1"}));
  EXPECT_TRUE(refuses([&] { attention_rollout({map(1, 5, 5), map(2, 5, 5)}); }, {"1", "2"}));
}

}  // namespace
}  // namespace mha::test
