// Guards the contract's section "Numbers" for scaled_dot_product_attention: precision.
//
// Precision has no tolerance of its own: the error against the float64 loops of oracle.h may be
// twice (gradients: three times) that of torch computing the same in the same dtype, plus one
// rounding of the result's largest element. Torch's way is matmul, softmax, matmul for float32
// and at::scaled_dot_product_attention, which accumulates in float32, for bfloat16 and float16.
// The error of one call is the root mean square over a tensor of some size. The largest error
// is held to the same factors, but over all calls together. float64 is not measured here, since
// the oracle's own rounding errors are of that size: the parity suite holds it to 1e-12.

#include <gtest/gtest.h>
#include <mha/scaled_dot_product_attention.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "numerics/numerics_call.h"
#include "support/oracle.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

double root_mean_square(const at::Tensor& tensor) {
  return tensor.detach().to(at::kDouble).square().mean().sqrt().item<double>();
}

/// The largest errors of one result over all calls, in roundings of the result.
struct LargestErrors {
  double actual = 0, peer = 0;
};

/// In fewer elements torch's error may be small by luck.
constexpr int64_t enough_elements = 256;

class PrecisionTest : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void compare(const std::string& what, const at::Tensor& actual, const at::Tensor& peer,
               const at::Tensor& exact, const Call& call) {
    ASSERT_TRUE(actual.defined() && peer.defined() && exact.defined()) << what;
    ASSERT_EQ(actual.sizes(), exact.sizes()) << what;
    const double rounding =
        unit_roundoff(call.query.scalar_type()) * exact.abs().max().item<double>();
    if (rounding == 0) {
      // A gradient that a single open key leaves at 0. What remains of dy . v - dy . output in
      // float32, terms of up to 30, is summed over up to 129 queries.
      EXPECT_TRUE(is_close(actual, exact, 5e-5)) << what << ", " << call.name;
      return;
    }
    const double error = root_mean_square(actual.detach() - exact);
    const double peer_error = root_mean_square(peer.detach() - exact);
    if (exact.numel() >= enough_elements) {
      EXPECT_LE(error, factor(what) * peer_error + rounding)
          << "error of " << what << " against float64; torch's is " << peer_error
          << ", a rounding is " << rounding << "; " << call.name;
    }
    auto& largest = largest_[what];
    largest.actual = std::max(largest.actual, largest_difference(actual, exact) / rounding);
    largest.peer = std::max(largest.peer, largest_difference(peer, exact) / rounding);
  }

  void compare_largest() const {
    for (const auto& [what, largest] : largest_)
      EXPECT_LE(largest.actual, factor(what) * largest.peer + 1)
          << "largest error of " << what << " over all calls, in roundings of the result; "
          << "torch's is " << largest.peer;
  }

 private:
  static double factor(const std::string& what) {
    return what == "output" || what == "weights" ? 2 : 3;
  }
  std::map<std::string, LargestErrors> largest_;
};

TEST_P(PrecisionTest, ErrorsAreWithinTwiceAndOfGradientsThriceThoseOfTorch) {
  const auto dtype = GetParam();
  const bool half = dtype != at::kFloat;
  Random random(2024);
  for (size_t setting = 0; setting < 120; ++setting) {
    const auto sizes = draw_sizes(random);
    const double spread = setting % 3 == 0 ? 4 : 1;  // 4: most weight on few keys
    for (const auto kind : {MaskKind::none, masked[setting % masked.size()]}) {
      const auto call = draw(random, sizes, kind, dtype, spread);
      const auto exact = run_oracle(call);
      const auto actual = run_library(call);
      const auto peer = half ? run_torch_fused(call) : run_torch_composition(call);
      EXPECT_EQ(actual.output.scalar_type(), dtype);
      EXPECT_EQ(actual.weights.scalar_type(), dtype);
      compare("output", actual.output, peer.output, exact.output, call);
      compare("value gradient", actual.value, peer.value, exact.value, call);
      compare("query gradient", actual.query, peer.query, exact.query, call);
      compare("key gradient", actual.key, peer.key, exact.key, call);
      if (call.added.defined())
        compare("mask gradient", actual.added, peer.added, exact.added, call);
      if (half) {  // without gradients the kernels read half types as they are stored
        at::NoGradGuard no_grad;
        const auto options = AttentionOptions().weights(Weights::none);
        compare(
            "output",
            scaled_dot_product_attention(call.query, call.key, call.value, call.mask, options)
                .output,
            peer.output, exact.output, call);
      }
      if (!half) {
        compare("weights", actual.weights, peer.weights, exact.weights, call);
      } else {
        // torch returns none in a half type. Computed in float32 and rounded once, with 1e-5 of
        // room for float32's own error at scores of up to 40.
        EXPECT_TRUE(is_close(actual.weights, exact.weights, unit_roundoff(dtype) + 1e-5))
            << call.name;
      }
      if (HasFailure()) return;
    }
  }
  compare_largest();
}

TEST_P(PrecisionTest, ASingleKeyHasWeightOneAndNoGradientButThroughItsValue) {
  Random random(1);
  const auto call = draw(random, {2, 3, 3, 9, 1, 16, 16}, MaskKind::none, GetParam());
  const auto results = run_library(call);
  EXPECT_TRUE(is_close(results.weights, at::ones({2, 3, 9, 1}), 4 * unit_roundoff(at::kFloat)));
  // What is left of dy . v - dy . output, terms of size sqrt(16), after rounding to float32.
  EXPECT_TRUE(is_close(results.query, at::zeros_like(results.query), 1e-5));
  EXPECT_TRUE(is_close(results.key, at::zeros_like(results.key), 1e-5));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, PrecisionTest,
                         ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                         [](const ::testing::TestParamInfo<at::ScalarType>& dtype) {
                           return std::string(c10::toString(dtype.param));
                         });

TEST(HalfPrecisionTest, ScoresBeyondTheRangeOfHalfStayFinite) {
  // q . k is 300 * 300 * 64 = 5.76e6 on the diagonal, 88 times what float16 can hold.
  Random random(3);
  const auto signs = random.coins({1, 2, 9, 64}, 0.5).to(at::kDouble) * 2 - 1;
  const auto q = (signs * 300).to(at::kHalf).requires_grad_();
  const auto v = random.normal({1, 2, 9, 64}, at::kHalf);
  const auto [output, weights] = mha::scaled_dot_product_attention(q, q, v);
  const auto exact = oracle_attention(q, q, v);
  EXPECT_TRUE(is_finite(output));
  EXPECT_TRUE(is_close(weights, exact.weights, 0x1p-11));
  EXPECT_TRUE(is_close(output, exact.output, 4 * 0x1p-11));
  output.sum().backward();
  EXPECT_TRUE(is_finite(q.grad()));
}

}  // namespace
}  // namespace mha::test
