// Guards that the composition of ATen calls gives in blocks of queries what it gives in one:
// results, weights, gradients and gradients of gradients, for every mask and option, whatever
// lies behind a mask, in memory for one block. Blocks change the order of sums in float64, so
// that numbers of order 1, of which some hundred are summed, agree to 1e-11.
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

TEST(PlainBlocksTest, ResultsAndGradientsAreThoseOfOneBlock) {
  for (int64_t seed = 0; seed < 120; ++seed) {
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

TEST(PlainBlocksTest, GradientsOfGradientsAreThoseOfOneBlock) {
  for (int64_t seed = 200; seed < 240; ++seed) {
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

}  // namespace
}  // namespace mha::detail
