// Guards that a mask which was expanded, so that it repeats its memory by a stride of 0, takes
// the memory of what it repeats and gives what the written-out mask gives: every kind, over
// samples, heads, both, queries and keys, in every accepted shape; on every path, with maps,
// blocked NaN and gradients.
//
// Tolerance: the same numbers by another way through the kernels: a few roundings of 6e-8.
#include <mha/attention_map.h>
#include <mha/mask.h>

#include "runtime/attention_path.h"
#include "support/cost.h"
#include "support/expect.h"
#include "support/thread_count.h"
#include "support/values.h"

namespace mha {
namespace {

using test::infinity;
using test::is_close;
using test::leaf;
using test::nan;
using test::Random;

const test::Sizes sizes{2, 3, 70, 90};

test::CallInputs draw_inputs(at::ScalarType dtype) {
  return test::draw_call_inputs(81, sizes, dtype);
}

// The shapes of what is repeated, and those that it is expanded to.
struct Expansion {
  std::vector<int64_t> from, to;
};

std::vector<Expansion> expansions() {
  const auto [n, h, l, s] = sizes;
  return {{{1, 1, l, s}, {n, h, l, s}},
          {{n, 1, l, s}, {n, h, l, s}},
          {{1, h, l, s}, {n, h, l, s}},
          {{1, 1, l, s}, {1, h, l, s}},
          {{n, 1, 1, s}, {n, 1, l, s}},
          {{1, 1, 1, s}, {n, h, l, s}},
          {{n, h, 1, s}, {n, h, l, s}},
          {{n, 1, l, 1}, {n, 1, l, s}},
          {{1, 1, l, 1}, {n, h, l, s}},
          {{n, h, l, 1}, {n, h, l, s}},
          {{1, 1, 1, 1}, {n, h, l, s}},
          {{1, l, s}, {n, l, s}},
          {{1, l, s}, {n * h, l, s}},
          {{n, 1, s}, {n, l, s}},
          {{1, s}, {l, s}},
          {{l, 1}, {l, s}}};
}

void expect_same(const Mask& a, const Mask& b, at::ScalarType dtype, const std::string& what) {
  const auto [q, k, v] = draw_inputs(dtype);
  const double tolerance = dtype == at::kDouble ? 1e-13 : 2e-6;
  std::vector<std::vector<at::Tensor>> found;
  for (const Mask& mask : {a, b}) {
    const auto x = leaf(q), y = leaf(k), z = leaf(v);
    const auto [output, weights] = scaled_dot_product_attention(x, y, z, mask);
    scaled_dot_product_attention(x, y, z, mask, AttentionOptions().weights(Weights::none))
        .output.square()
        .sum()
        .backward();
    const AttentionMap map(q, k, mask);
    found.push_back({output, weights, x.grad(), y.grad(), z.grad(), map.entropy(),
                     map.received(), map.block(2, {40, 69}, {30, 80}), map.rows(60, 64),
                     map.log_sum_exp(), map.scores(ScoreStage::masked)});
  }
  for (size_t i = 0; i < found[0].size(); ++i) {
    EXPECT_TRUE(is_close(found[0][i], found[1][i], 20 * tolerance)) << what << ", result " << i;
  }
}

TEST(ExpandedMaskTest, AnExpandedMaskIsTheWrittenOne) {
  Random random(82);
  for (const auto& e : expansions()) {
    const auto tensor = random.normal(e.from);
    const auto what =
        (std::ostringstream() << at::IntArrayRef(e.from) << " to " << at::IntArrayRef(e.to))
            .str();
    const auto from_small = [&](const at::Tensor& small) { return small.expand(e.to); };
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      expect_same(Mask::keep(from_small(tensor.gt(-0.8))),
                  Mask::keep(from_small(tensor.gt(-0.8)).contiguous()), dtype, "keep " + what);
      expect_same(Mask::block(from_small(tensor.lt(-0.8))),
                  Mask::block(from_small(tensor.lt(-0.8)).contiguous()), dtype,
                  "block " + what);
      const auto term = tensor.masked_fill(tensor.lt(-0.8), -infinity);
      expect_same(Mask::add(from_small(term)), Mask::add(from_small(term).contiguous()), dtype,
                  "add " + what);
    }
  }
}

TEST(ExpandedMaskTest, ExpandedKeyMasksAndDocumentsAreTheWrittenOnes) {
  Random random(83);
  const auto [n, h, l, s] = sizes;
  const auto keep = random.coins({1, s}, 0.7).expand({n, s});
  expect_same(Mask::keep_keys(keep), Mask::keep_keys(keep.contiguous()), at::kFloat, "keep");
  expect_same(Mask::block_keys(keep), Mask::block_keys(keep.contiguous()), at::kFloat, "block");
  const auto one = at::ones({1}, at::kLong).expand({s});
  expect_same(Mask::keep_keys(one), Mask(), at::kFloat, "all");
  const auto query_ids = (at::arange(l) % 3).expand({n, l});
  const auto key_ids = (at::arange(s) % 3).expand({n, s});
  expect_same(Mask::documents(query_ids, key_ids),
              Mask::documents(query_ids.contiguous(), key_ids.contiguous()), at::kFloat, "ids");
}

TEST(ExpandedMaskTest, WhatAnExpandedMaskBlocksMayBeNan) {
  auto [q, k, v] = draw_inputs(at::kFloat);
  const auto [n, h, l, s] = sizes;
  const auto keys = at::arange(s).lt(80), rows = at::arange(l).lt(60);
  const auto of_heads = at::arange(h).lt(2).view({1, h, 1, 1});
  k.narrow(2, 80, 10).fill_(nan);
  v.narrow(2, 80, 10).fill_(nan);
  q.narrow(2, 60, 10).fill_(nan);
  for (const auto& mask :
       {Mask::keep(keys.expand({l, s})) & Mask::keep(rows.unsqueeze(1).expand({l, s})),
        Mask::block(keys.logical_not().expand({n, h, l, s})) &
            Mask::keep(rows.unsqueeze(1).expand({n, l, s})),
        Mask::keep(keys.logical_and(of_heads).expand({n, h, l, s})) &
            Mask::keep(rows.view({l, 1}).logical_and(of_heads).expand({n, h, l, s})),
        Mask::add(keys.log().expand({n * h, l, s})) &
            Mask::add(rows.log().unsqueeze(1).expand({l, s}))}) {
    const auto x = leaf(q), y = leaf(k), z = leaf(v);
    const auto output = scaled_dot_product_attention(x, y, z, mask).output;
    EXPECT_TRUE(test::is_finite(output)) << mask;
    output.sum().backward();
    for (const auto& t : {x, y, z}) EXPECT_TRUE(test::is_finite(t.grad())) << mask;
  }
}

TEST(ExpandedMaskTest, TheGradientReachesWhatWasExpanded) {
  const auto [q, k, v] = draw_inputs(at::kDouble);
  Random random(84);
  for (const auto& e : expansions()) {
    const auto small = random.normal(e.from, at::kDouble), term = leaf(small);
    const auto written = leaf(small.expand(e.to).contiguous());
    for (const auto& given : {term.expand(e.to), written}) {
      scaled_dot_product_attention(q, k, v, Mask::add(given)).output.square().sum().backward();
    }
    EXPECT_TRUE(is_close(term.grad(), written.grad().sum_to_size(e.from), 1e-12))
        << at::IntArrayRef(e.from) << " to " << at::IntArrayRef(e.to);
  }
}

TEST(ExpandedMaskTest, LeadingDimensionsOfTheFunctionalFormMayBeExpanded) {
  Random random(85);
  const auto x = random.normal({2, 3, 2, 5, 8});
  for (const std::vector<int64_t>& from : {std::vector<int64_t>{1, 1, 1, 5, 5},
                                           {2, 3, 1, 5, 5},
                                           {2, 1, 1, 5, 5},
                                           {1, 1, 2, 5, 1},
                                           {1, 1, 1, 1, 5}}) {
    const auto term = random.normal(from).expand({2, 3, 2, 5, 5});
    const auto found = scaled_dot_product_attention(x, x, x, Mask::add(term));
    const auto expected = scaled_dot_product_attention(x, x, x, Mask::add(term.contiguous()));
    EXPECT_TRUE(is_close(found.output, expected.output, 1e-6)) << at::IntArrayRef(from);
    EXPECT_TRUE(is_close(found.weights, expected.weights, 1e-6)) << at::IntArrayRef(from);
  }
}

// Written out, each of these would be 64 MiB of float32 or 16 MiB of flags; (L, S) is 4 MiB.
TEST(ExpandedMaskTest, AnExpandedMaskTakesTheMemoryOfWhatItRepeats) {
  if (detail::kernels_are_off()) GTEST_SKIP() << "MHA_PATH=plain: it holds maps";
  test::check_that_memory_is_measured();
  Random random(86);
  const auto x = random.normal({1, 16, 1024, 8});
  const auto term = random.normal({1024, 1024});
  const auto flags = random.coins({1024, 1024}, 0.9);
  const auto options = AttentionOptions().weights(Weights::none);
  const std::vector<int64_t> all{1, 16, 1024, 1024};
  const test::ThreadCount threads(2);  // each has scratch of its own
  for (const auto& mask :
       {Mask::add(term.expand(all)), Mask::add(term.expand(all)) & Mask::add(term.expand(all)),
        Mask::keep(flags.expand(all)), Mask::block(flags.logical_not().expand(all)),
        Mask::add(term.expand({16, 1024, 1024})), Mask::keep(flags[0].expand(all)),
        Mask::keep(flags[0].unsqueeze(1).expand(all)), Mask::add(term[0].expand(all))}) {
    const auto cost =
        test::cost_of([&] { scaled_dot_product_attention(x, x, x, mask, options); });
    const int64_t mib = mask.terms().size() > 1 ? 20 : 13;  // the sum of two takes temporaries
    EXPECT_LT(cost.memory, mib << 20) << mask;
  }
}

// The gradient of what was expanded is (1, 16, L, S), and so is autograd's share of it.
TEST(ExpandedMaskTest, AnExpandedMaskThatWantsAGradientTakesNoMemoryInTheForward) {
  if (detail::kernels_are_off()) GTEST_SKIP() << "MHA_PATH=plain: it holds maps";
  test::check_that_memory_is_measured();
  Random random(87);
  const auto x = random.normal({1, 16, 1024, 8});
  const auto term = leaf(random.normal({1024, 1024})).expand({1, 16, 1024, 1024});
  const auto options = AttentionOptions().weights(Weights::none);
  const test::ThreadCount threads(2);
  const auto cost = test::cost_of([&] {
    scaled_dot_product_attention(x, x, x, Mask::add(term) & Mask::add(term), options);
  });
  EXPECT_LT(cost.memory, 24 << 20);
}

}  // namespace
}  // namespace mha
