// Guards every kind of mask in a call without samples, queries or keys: results of the right
// sizes, outputs of 0 without keys, gradients, and what a map says. Nothing is rounded.
#include <mha/attention_map.h>
#include <mha/multi_head_attention.h>

#include <algorithm>
#include <vector>

#include "support/expect.h"

namespace mha {
namespace {

using test::all_zero;
using test::leaf;

constexpr int64_t h = 4;

// Each constructor in each shape that it takes; some of two shapes together.
std::vector<Mask> every_mask(int64_t n, int64_t l, int64_t s) {
  const auto ids = [](at::IntArrayRef sizes) { return at::zeros(sizes, at::kLong); };
  const auto flags = [](at::IntArrayRef sizes) { return at::ones(sizes, at::kBool); };
  const int64_t distances = std::max<int64_t>(l + s - 1, 0);
  std::vector<Mask> masks;
  for (const std::vector<int64_t>& pairs :
       {std::vector<int64_t>{l, s}, {n, l, s}, {n * h, l, s}, {n, h, l, s}, {1, 1, l, s}}) {
    masks.push_back(Mask::keep(at::ones(pairs)));
    masks.push_back(Mask::block(flags(pairs).logical_not()));
    masks.push_back(Mask::add(leaf(at::zeros(pairs))));
  }
  masks.push_back(Mask::keep(at::ones({1, 1, 1, 1}).expand({n, h, l, s})));
  masks.push_back(Mask::add(at::zeros({1, 1, 1, 1}).expand({n, h, l, s})));
  for (const std::vector<int64_t>& keys : {std::vector<int64_t>{s}, {n, s}}) {
    masks.push_back(Mask::keep_keys(at::ones(keys)));
    masks.push_back(Mask::block_keys(flags(keys).logical_not()));
    masks.push_back(Mask::add_keys(leaf(at::zeros(keys))));
  }
  for (const std::vector<int64_t>& queries : {std::vector<int64_t>{l}, {n, l}}) {
    masks.push_back(Mask::real_queries(flags(queries)));
    masks.push_back(Mask::documents(ids(queries), ids({s})));
    masks.push_back(Mask::documents(ids(queries), ids({n, s})));
  }
  masks.push_back(Mask::documents(ids({l}), ids({n, s})) &
                  Mask::documents(ids({n, l}), ids({s})) & Mask::real_queries(flags({l})));
  if (l == s) {
    masks.push_back(Mask::documents(ids({s})) & Mask::documents(ids({n, s})));
    masks.push_back(Mask::documents_from_lengths(torch::tensor({int64_t{0}, s})) &
                    Mask::documents(ids({n, s})));
  }
  masks.push_back(Mask::lengths(at::full({n}, s, at::kLong)));
  masks.push_back(Mask::query_lengths(at::full({n}, l, at::kLong)));
  masks.push_back(Mask::causal());
  masks.push_back(Mask::window(1, 2));
  masks.push_back(Mask::causal(ids({n})) & Mask::window(2, 1, ids({n})));
  masks.push_back(Mask::relative(leaf(at::zeros({h, distances}))) &
                  Mask::relative(at::zeros({1, distances})));
  masks.push_back(Mask::alibi(leaf(at::ones({h}))) & Mask::alibi(at::ones({h}), ids({n})));
  masks.push_back(Mask::add(at::zeros({l, s})) & Mask::add_keys(at::zeros({n, s})) &
                  Mask::keep_keys(at::ones({s})) & Mask::lengths(at::zeros({n}, at::kLong)));
  return masks;
}

void expect_defined(const Mask& mask, int64_t n, int64_t l, int64_t s) {
  for (const auto weights : {Weights::none, Weights::averaged, Weights::per_head}) {
    const auto q = leaf(at::ones({n, h, l, 8})), k = leaf(at::ones({n, h, s, 8}));
    const auto v = leaf(at::ones({n, h, s, 5}));
    const auto result =
        scaled_dot_product_attention(q, k, v, mask, AttentionOptions().weights(weights));
    ASSERT_EQ(result.output.sizes(), at::IntArrayRef({n, h, l, 5})) << mask;
    if (s == 0) {
      EXPECT_TRUE(all_zero(result.output)) << mask;
    }
    if (weights == Weights::per_head) {
      EXPECT_EQ(result.weights.sizes(), at::IntArrayRef({n, h, l, s})) << mask;
    }
    result.output.sum().backward();
    for (const auto& t : {q, k, v}) EXPECT_TRUE(test::is_finite(t.grad())) << mask;
  }
  const AttentionMap map(at::ones({n, h, l, 8}), at::ones({n, h, s, 8}), mask);
  EXPECT_EQ(map.dense().sizes(), at::IntArrayRef({n, h, l, s})) << mask;
  EXPECT_EQ(map.summary().received.sizes(), at::IntArrayRef({n, h, s})) << mask;
  EXPECT_EQ(map.rows(l, l).sizes(), at::IntArrayRef({n, h, 0, s})) << mask;
  EXPECT_EQ(map.block(1, {0, l}, {0, s}).sizes(), at::IntArrayRef({n, l, s})) << mask;
  EXPECT_EQ(map.log_sum_exp().sizes(), at::IntArrayRef({n, h, l})) << mask;
  EXPECT_EQ(map.scores(ScoreStage::masked).sizes(), at::IntArrayRef({n, h, l, s})) << mask;
}

TEST(EmptyMaskTest, EveryMaskIsDefinedWithoutSamplesQueriesOrKeys) {
  for (const int64_t n : {0, 2}) {
    for (const int64_t l : {0, 1, 3}) {
      for (const int64_t s : {0, 1, 3}) {
        if (n * l * s > 0) continue;
        SCOPED_TRACE(::testing::Message() << "N " << n << ", L " << l << ", S " << s);
        for (const Mask& mask : every_mask(n, l, s)) expect_defined(mask, n, l, s);
      }
    }
  }
}

}  // namespace
}  // namespace mha
