#pragma once

#include <cstdlib>
#include <vector>

#include "attention/torch_attention.h"
#include "support/attention_setting.h"
#include "support/expect.h"

// Calls of the path by at::scaled_dot_product_attention, compared with the composition of ATen
// calls. Either sums in float64 in an order of its own, so that numbers of order 1, of which
// some hundred are summed, agree to 1e-11.
namespace mha::detail {

using test::is_close;
using test::leaf;
using Tensors = std::vector<at::Tensor>;
using Pairs = TorchForm::Pairs;

inline constexpr double tolerance = 1e-11;

class TorchAttentionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv("MHA_CPU_ISA")) GTEST_SKIP() << "MHA_CPU_ISA: no kernel is in use";
    if (std::getenv("MHA_BLOCK_BYTES")) GTEST_SKIP() << "MHA_BLOCK_BYTES is set";
    const auto q = torch::zeros({1, 1, 4, 4});
    if (torch_form(q, q, q, resolve(Mask(), {{}, 1, 1, 4, 4}, at::kCPU), call_for(4)).refusal) {
      GTEST_SKIP() << "this LibTorch has no fused attention for grouped heads";
    }
  }
};

struct Sizes {
  int64_t queries, keys, heads = 4, kv_heads = 2, head_dim = 8, value_dim = 8;
};

struct Heads {
  at::Tensor query, key, value;
};

inline Heads draw_heads(const Sizes& s, int64_t seed = 1) {
  torch::manual_seed(seed);
  const auto number = torch::TensorOptions(torch::kDouble);
  return {torch::randn({2, s.heads, s.queries, s.head_dim}, number),
          torch::randn({2, s.kv_heads, s.keys, s.head_dim}, number),
          torch::randn({2, s.kv_heads, s.keys, s.value_dim}, number)};
}

inline ResolvedMask resolved(const Mask& mask, const Sizes& s) {
  return resolve(mask, {{}, 2, s.heads, s.queries, s.keys}, at::kCPU);
}

// Output and gradients of query, key and value, and output without a graph.
template <typename Attend>
Tensors outcome(const Heads& heads, const at::Tensor& grad, Attend attend) {
  const Tensors leaves{leaf(heads.query), leaf(heads.key), leaf(heads.value)};
  const auto output = attend(leaves[0], leaves[1], leaves[2]);
  auto all = torch::autograd::grad({output}, leaves, {grad});
  all.push_back(output.detach());
  const at::NoGradGuard no_grad;
  all.push_back(attend(leaves[0], leaves[1], leaves[2]));
  return all;
}

// The largest number of each row, at least 1: what roundings of its sums are in proportion to.
inline at::Tensor row_sizes(const at::Tensor& tensor) {
  const auto sizes = tensor.detach().abs();
  return sizes.masked_fill(sizes.isfinite().logical_not(), 0).amax(-1, true).clamp_min(1);
}

inline void expect_same(const Tensors& actual, const Tensors& expected,
                        double within = tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    const auto sizes = row_sizes(expected[i]);
    EXPECT_TRUE(is_close(actual[i] / sizes, expected[i] / sizes, within)) << "result " << i;
  }
}

/// Gradients of a sum of sines of gradients.
template <typename Attend>
Tensors second_order(const Heads& heads, Attend attend) {
  const Tensors leaves{leaf(heads.query), leaf(heads.key), leaf(heads.value)};
  const auto output = attend(leaves[0], leaves[1], leaves[2]);
  const auto first = torch::autograd::grad({output.sin().sum()}, leaves, {},
                                           /*retain_graph=*/true, /*create_graph=*/true);
  return torch::autograd::grad(
      {first[0].sin().sum() + first[1].sin().sum() + first[2].sin().sum()}, leaves);
}

}  // namespace mha::detail
