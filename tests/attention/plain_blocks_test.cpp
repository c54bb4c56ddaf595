// Guards that the composition of ATen calls gives in blocks of queries what it gives in one:
// results, weights, gradients and gradients of gradients, for every mask and option, whatever
// lies behind a mask, in memory for one block. Blocks change the order of sums in float64, so
// that numbers of order 1, of which some hundred are summed, agree to 1e-11.
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "attention/plain_blocks.h"
#include "mask/dense_mask.h"
#include "support/attention_setting.h"
#include "support/expect.h"
#include "support/peak_memory.h"
#include "support/thread_count.h"

namespace mha::detail {
namespace {

using test::is_close;
using Tensors = std::vector<at::Tensor>;

constexpr double tolerance = 1e-11;

// The composition is the same on each instruction set. Its calls are too small for threads.
class PlainBlocksTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv("MHA_CPU_ISA")) GTEST_SKIP() << "MHA_CPU_ISA: no kernel is in use";
    const char* path = std::getenv("MHA_PATH");
    if (path && std::string(path) == "torch") GTEST_SKIP() << "MHA_PATH=torch: another path";
  }
  const test::ThreadCount one_thread_{1};
};

// How many of so many random settings are drawn: under a sanitizer each takes ten times as
// long.
constexpr int64_t settings(int64_t count) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return count / 8;
#else
  return count;
#endif
}

struct BlockInputs {
  at::Tensor query, key, value, grad_output, grad_weights;
};

BlockInputs draw_block_inputs(const AttentionSetting& s, int64_t seed) {
  torch::manual_seed(seed);
  const auto number = torch::TensorOptions(torch::kDouble);
  const int64_t keys = s.keys + s.extra;
  const auto weights = s.call.weights == Weights::averaged
                           ? torch::randn({s.batch, s.queries, 1}, number)
                           : torch::randn({s.batch, s.heads, s.queries, 1}, number);
  auto sizes = weights.sizes().vec();
  sizes.back() = keys;
  // The upstream gradients are one transposed, one expanded.
  return {torch::randn({s.batch, s.queries, s.heads, s.head_dim}, number).transpose(1, 2),
          torch::randn({s.batch, s.kv_heads, keys, s.head_dim}, number),
          torch::randn({s.batch, s.kv_heads, keys, s.value_dim}, number),
          torch::randn({s.batch, s.queries, s.heads, s.value_dim}, number).transpose(1, 2),
          weights.expand(sizes) * torch::linspace(0, 1, keys, number)};
}

// A call's leaves, and mask and call made of them.
struct Leaves {
  Tensors all;
  ResolvedMask mask;
  AttentionCall call;
};

Leaves leaves_of(const AttentionSetting& s, const BlockInputs& in) {
  Leaves leaves{{test::leaf(in.query), test::leaf(in.key), test::leaf(in.value)},
                resolved_mask(s),
                s.call};
  for (auto* list : added_lists(leaves.mask)) {
    for (auto& term : *list) leaves.all.push_back(term = test::leaf(term.to(torch::kDouble)));
  }
  auto& sinks = leaves.call.scoring.sinks;
  if (sinks.defined()) leaves.all.push_back(sinks = test::leaf(sinks.to(torch::kDouble)));
  return leaves;
}

// Defined results of a call in blocks, and their upstream gradients.
struct Outcome {
  Tensors results, grads;
};

Outcome outcome_of(const Leaves& leaves, const BlockInputs& in, const BlockSizes& sizes) {
  const auto result = plain_attention_in_blocks(leaves.all[0], leaves.all[1], leaves.all[2],
                                                leaves.mask, leaves.call, sizes);
  Outcome outcome{{result.output}, {in.grad_output}};
  if (result.weights.defined()) {
    outcome.results.push_back(result.weights);
    outcome.grads.push_back(in.grad_weights);
  }
  return outcome;
}

BlockSizes all_of(const AttentionSetting& s) {
  return {s.batch, s.kv_heads, s.queries};
}

// A few queries of all, of each head and of each sample; whole heads; and whole samples.
// Averaged weights are of all heads.
std::vector<BlockSizes> blocks_for(const AttentionSetting& s, int64_t few) {
  const bool averages = s.call.weights == Weights::averaged;
  const int64_t kv_heads = averages ? s.kv_heads : 1;
  return {{s.batch, s.kv_heads, few},
          {1, kv_heads, 7},
          {2, averages ? s.kv_heads : 2, 64},
          {1, s.kv_heads, s.queries}};
}

// Results and gradients of the leaves.
Tensors attend(const AttentionSetting& s, const BlockInputs& in, const BlockSizes& sizes) {
  const auto leaves = leaves_of(s, in);
  const auto outcome = outcome_of(leaves, in, sizes);
  auto all = torch::autograd::grad(outcome.results, leaves.all, outcome.grads);
  for (const auto& result : outcome.results) all.push_back(result.detach());
  const at::NoGradGuard no_grad;
  for (const auto& result : outcome_of(leaves, in, sizes).results) all.push_back(result);
  return all;
}

void expect_equal(const Tensors& actual, const Tensors& expected, const AttentionSetting& s,
                  const BlockSizes& sizes, double within = tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << i;
    if (!actual[i].defined()) continue;
    ASSERT_TRUE(is_close(actual[i], expected[i], within))
        << "result " << i << "; block " << sizes.samples << ", " << sizes.kv_heads << ", "
        << sizes.queries << "; " << s;
  }
}

TEST_F(PlainBlocksTest, ResultsAndGradientsAreThoseOfOneBlock) {
  for (int64_t seed = 0; seed < settings(80); ++seed) {
    SCOPED_TRACE(seed);
    const auto s = draw_setting(seed);
    const auto inputs = draw_block_inputs(s, seed);
    const auto expected = attend(s, inputs, all_of(s));
    for (const auto& sizes : blocks_for(s, seed % 4 == 0 ? 1 : 3)) {
      expect_equal(attend(s, inputs, sizes), expected, s, sizes);
    }
  }
}

// By the gradients too, and by their upstream gradients.
Tensors second_order(const AttentionSetting& s, const BlockInputs& in,
                     const BlockSizes& sizes) {
  const auto leaves = leaves_of(s, in);
  const auto outcome = outcome_of(leaves, in, sizes);
  Tensors upstream;
  for (const auto& grad : outcome.grads) upstream.push_back(test::leaf(grad));
  const auto first = torch::autograd::grad(outcome.results, leaves.all, upstream,
                                           /*retain_graph=*/true, /*create_graph=*/true);
  at::Tensor loss = torch::zeros({}, torch::kDouble);
  for (const auto& grad : first) loss = loss + grad.sin().sum();
  auto by = leaves.all;
  by.insert(by.end(), upstream.begin(), upstream.end());
  auto second = torch::autograd::grad({loss}, by, {}, /*retain_graph=*/true,
                                      /*create_graph=*/true, /*allow_unused=*/true);
  at::Tensor third_loss = torch::zeros({}, torch::kDouble);
  for (const auto& grad : second) {
    if (grad.defined()) third_loss = third_loss + grad.cos().sum();
  }
  auto all = first;
  all.insert(all.end(), second.begin(), second.end());
  const auto third = torch::autograd::grad({third_loss}, by, {}, /*retain_graph=*/false,
                                           /*create_graph=*/false, /*allow_unused=*/true);
  all.insert(all.end(), third.begin(), third.end());
  return all;
}

TEST_F(PlainBlocksTest, GradientsOfGradientsAreThoseOfOneBlock) {
  for (int64_t seed = 200; seed < 200 + settings(24); ++seed) {
    SCOPED_TRACE(seed);
    auto s = draw_setting(seed);
    if (s.queries * s.keys > 3000) continue;
    const auto inputs = draw_block_inputs(s, seed);
    const auto expected = second_order(s, inputs, all_of(s));
    for (const auto& sizes : blocks_for(s, 5)) {
      // The third order sums products of many numbers.
      expect_equal(second_order(s, inputs, sizes), expected, s, sizes, 1e-8);
    }
  }
}

at::Tensor with_nan(const at::Tensor& tensor, const at::Tensor& rows) {
  return tensor.masked_fill(rows.unsqueeze(-1), NAN);
}

// Behind a mask, or in a key and a query that others see.
TEST_F(PlainBlocksTest, NaNReachesWhatItReachesInOneBlock) {
  for (int64_t seed = 300; seed < 300 + settings(24); ++seed) {
    SCOPED_TRACE(seed);
    const auto s = draw_setting(seed);
    auto inputs = draw_block_inputs(s, seed);
    const auto mask = resolved_mask(s);
    auto allowed = allowed_pairs(mask, at::kCPU);
    if (!allowed.defined()) allowed = torch::ones({1, 1, 1, 1}, torch::kBool);
    allowed = allowed.expand({s.batch, s.heads, s.queries, s.keys + s.extra});
    auto keys = allowed.any(2)
                    .view({s.batch, s.kv_heads, s.heads / s.kv_heads, -1})
                    .any(2)
                    .logical_not();
    auto queries = allowed.any(3).logical_not();
    if (seed % 2) {
      keys.select(2, keys.size(2) / 2).fill_(true);
      queries.select(2, queries.size(2) / 2).fill_(true);
    }
    inputs.query = with_nan(inputs.query, queries);
    inputs.key = with_nan(inputs.key, keys);
    inputs.value = with_nan(inputs.value, keys);
    const auto expected = attend(s, inputs, all_of(s));
    for (const auto& sizes : blocks_for(s, 5)) {
      expect_equal(attend(s, inputs, sizes), expected, s, sizes);
    }
  }
}

TEST_F(PlainBlocksTest, WithoutQueriesOrKeysEveryResultIsComputed) {
  for (int64_t seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(seed);
    auto s = draw_setting(seed);
    s.mask = seed % 2 ? Mask::causal() : Mask();
    s.extra = seed % 3;
    (seed % 4 < 3 ? s.keys : s.queries) = 0;
    const auto inputs = draw_block_inputs(s, seed);
    const auto expected = attend(s, inputs, all_of(s));
    for (const auto& sizes :
         {BlockSizes{s.batch, s.kv_heads, 3}, BlockSizes{1, s.kv_heads, 7}}) {
      expect_equal(attend(s, inputs, sizes), expected, s, sizes);
    }
  }
}

// Sums are float32 in either, and only then rounded.
TEST_F(PlainBlocksTest, HalfTypesAreSummedInFloat) {
  const auto mask = resolve(Mask::causal(), {{}, 2, 4, 90, 90}, at::kCPU);
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    torch::manual_seed(1);
    Tensors leaves, grads[2];
    for (int64_t i = 0; i < 3; ++i) leaves.push_back(test::leaf(torch::randn({2, 4, 90, 16})));
    for (auto& one : leaves) one = test::leaf(one.detach().to(dtype));
    for (const int64_t rows : {90, 4}) {
      const auto result = plain_attention_in_blocks(leaves[0], leaves[1], leaves[2], mask,
                                                    call_for(16), {2, 1, rows});
      ASSERT_EQ(result.output.scalar_type(), dtype);
      grads[rows == 4] =
          torch::autograd::grad({result.output}, leaves, {torch::ones_like(result.output)});
      grads[rows == 4].push_back(result.output.detach());
    }
    for (size_t i = 0; i < 4; ++i) {
      ASSERT_EQ(grads[1][i].scalar_type(), dtype);
      // Of sums of up to 90 numbers, whose last bit may differ.
      EXPECT_TRUE(is_close(grads[1][i], grads[0][i], 64 * test::unit_roundoff(dtype))) << i;
    }
  }
}

TEST_F(PlainBlocksTest, ChangesInPlaceBeforeABackwardAreNoticed) {
  const auto q = test::leaf(torch::randn({1, 2, 9, 4}, torch::kDouble));
  const auto k = torch::randn({1, 2, 9, 4}, torch::kDouble);
  const auto keep = torch::ones({9, 9}, torch::kBool);
  const auto mask = resolve(Mask::keep(keep), {{}, 1, 2, 9, 9}, at::kCPU);
  for (const auto& changed : {k, keep}) {
    const auto output = plain_attention_in_blocks(q, k, k, mask, call_for(4), {1, 1, 4}).output;
    changed.fill_(1);
    EXPECT_THROW(output.sum().backward(), c10::Error);
  }
}

// float64: 8 bytes a pair, 8 tensors at once, 32 MiB.
TEST_F(PlainBlocksTest, BlocksHoldNoMoreThanTheyMay) {
  const auto sizes_of = [](AttentionSizes sizes, Weights weights) {
    return plain_block_sizes(resolve(Mask(), sizes, at::kCPU), 4, at::kDouble, at::kCPU,
                             weights);
  };
  if (std::getenv("MHA_BLOCK_BYTES")) GTEST_SKIP() << "MHA_BLOCK_BYTES is set";
  const auto is = [](const BlockSizes& sizes, int64_t samples, int64_t heads, int64_t queries) {
    return sizes.samples == samples && sizes.kv_heads == heads && sizes.queries == queries;
  };
  EXPECT_TRUE(is(sizes_of({{}, 2, 8, 128, 128}, Weights::none), 2, 4, 128));
  EXPECT_TRUE(is(sizes_of({{}, 8, 8, 128, 128}, Weights::none), 4, 4, 128));
  EXPECT_TRUE(is(sizes_of({{}, 8, 8, 512, 256}, Weights::none), 1, 2, 512));
  EXPECT_TRUE(is(sizes_of({{}, 8, 8, 2048, 2048}, Weights::none), 1, 1, 128));
  EXPECT_TRUE(is(sizes_of({{}, 8, 8, 2048, 2048}, Weights::averaged), 1, 4, 32));
  EXPECT_TRUE(is(sizes_of({{}, 8, 8, 4, 1 << 26}, Weights::none), 1, 1, 1));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// The map would be 128 MiB.
TEST_F(PlainBlocksTest, NoMapIsHeld) {
  if (std::getenv("MHA_BLOCK_BYTES")) GTEST_SKIP() << "MHA_BLOCK_BYTES is set";
  constexpr int64_t length = 4096;
  Tensors leaves;
  for (int64_t i = 0; i < 3; ++i) {
    leaves.push_back(test::leaf(torch::randn({1, 1, length, 32}, torch::kDouble)));
  }
  // LibTorch's own attention has no soft cap.
  const auto options = AttentionOptions().weights(Weights::none).softcap(50);
  const test::ThreadCount threads(2);
  const auto attend = [&] {
    return scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], Mask::causal(),
                                        options)
        .output;
  };
  test::PeakMemory::reset();
  const double before = test::PeakMemory::mib();
  if (before == 0) GTEST_SKIP() << "no VmHWM in /proc/self/status";
  const auto output = attend();
  EXPECT_LT(test::PeakMemory::mib() - before, 1 + 32 + 64)
      << "forward: the output is 1 MiB, a block 32; the rest is the allocator's";
  output.sum().backward();
  EXPECT_LT(test::PeakMemory::mib() - before, 5 * 1 + 32 + 64)
      << "training: the output, gradients of q, k and v are 1 MiB each, a block 32";
}
#endif

}  // namespace
}  // namespace mha::detail
