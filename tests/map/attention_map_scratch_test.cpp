// Guards that what a map says does not depend on what earlier calls left in scratch memory:
// lanes after the last query of a tile are read by nobody, or hold zeros.
#include <mha/attention_map.h>
#include <mha/scaled_dot_product_attention.h>

#include <cmath>

#include "support/dense_map.h"
#include "support/expect.h"

namespace mha {
namespace {

using test::is_close;

// Every float of a thread's scratch that such maps and calls use becomes NaN.
void fill_scratch_with_nan() {
  const auto nan = at::full({1, 2, 100, 64}, std::nan(""));
  const auto terms = at::full({100, 100}, std::nan(""));
  const AttentionMap map(nan, nan, Mask::add(terms));
  map.summary();
  map.pooled(3, 3);
  map.top_k(2);
  mha::scaled_dot_product_attention(nan, nan, nan, Mask::add(terms));
}

// 1e-6 for sums of up to 40 weights, 1e-5 for those of up to 40 distances and logarithms.
TEST(MapScratchTest, ACallWithNanLeavesNoTraceInTheNextMapWithAddedTerms) {
  constexpr int64_t N = 2, H = 2, D = 16;
  torch::manual_seed(41);
  for (const int64_t l : {1, 3, 5, 13, 23, 29, 37}) {
    const int64_t s = l;
    for (const auto& mask :
         {Mask::alibi(at::ones({H})), Mask::relative(at::randn({H, l + s - 1})),
          Mask::add(at::randn({l, s})), Mask::add(at::randn({N, H, l, s})) & Mask::causal()}) {
      SCOPED_TRACE(::testing::Message() << "L=" << l << " " << mask);
      const auto query = at::randn({N, H, l, D}), key = at::randn({N, H, s, D});
      const auto exact = AttentionMap(query.to(at::kDouble), key.to(at::kDouble), mask).dense();
      const AttentionMap map(query, key, mask);
      fill_scratch_with_nan();
      const auto summary = map.summary();
      EXPECT_TRUE(is_close(summary.received, exact.sum(2), 1e-6));
      EXPECT_TRUE(is_close(summary.entropy, test::entropy_of(exact), 1e-5));
      EXPECT_TRUE(is_close(summary.distance, test::distance_of(exact, s), 1e-5));
      fill_scratch_with_nan();
      EXPECT_TRUE(is_close(map.received(), exact.sum(2), 1e-6));
      fill_scratch_with_nan();
      EXPECT_TRUE(is_close(map.dense(), exact, 1e-6));
      fill_scratch_with_nan();
      EXPECT_TRUE(is_close(map.mean(), exact.mean(1), 1e-6));
      fill_scratch_with_nan();
      EXPECT_TRUE(is_close(map.pooled(1, s), exact.mean(2, true), 1e-6));
      fill_scratch_with_nan();
      EXPECT_TRUE(is_close(map.top_k(1).values, exact.amax(3, true), 1e-6));
    }
  }
}

}  // namespace
}  // namespace mha
