// Guards T5's relative position bias: buckets against the published formula in plain loops, and
// what attention makes of the table. Tolerance: a few roundings of float32 near 1.
#include <mha/attention_map.h>
#include <mha/multi_head_attention.h>
#include <mha/relative_position_bias.h>

#include <cmath>
#include <memory>

#include "support/expect.h"
#include "support/oracle.h"

namespace mha {
namespace {

using test::is_close;
using test::refuses;

// Written again, for one position, in double; no edge of the sizes below is a matter of
// rounding but powers of two, where the logarithms' ratio is exact.
int64_t bucket_of(int64_t position, int64_t buckets, int64_t most, bool both) {
  int64_t first = 0, distance = position < 0 ? -position : 0;
  if (both) {
    buckets /= 2;
    if (position > 0) first = buckets;
    distance = std::abs(position);
  }
  const int64_t exact = buckets / 2;
  if (distance < exact) return first + distance;
  const double steps = std::log(static_cast<double>(distance) / static_cast<double>(exact)) /
                       std::log(static_cast<double>(most) / static_cast<double>(exact)) *
                       static_cast<double>(buckets - exact);
  return first + std::min(exact + static_cast<int64_t>(steps + 1e-9), buckets - 1);
}

TEST(RelativePositionBiasTest, BucketsAreThoseOfT5) {
  for (const bool both : {true, false}) {
    const RelativePositionBias bias(RelativePositionBiasOptions(2).bidirectional(both));
    const auto found = bias->buckets(at::arange(-300, 301));
    for (int64_t p = -300; p <= 300; ++p) {
      EXPECT_EQ(found[p + 300].item<int64_t>(), bucket_of(p, 32, 128, both)) << p;
    }
  }
  // From the published code's own output.
  const RelativePositionBias encoder(RelativePositionBiasOptions(1));
  EXPECT_TRUE(at::equal(encoder->buckets(torch::tensor({-128, -64, -8, -7, 0, 1, 8, 16, 127})),
                        torch::tensor({15, 14, 8, 7, 0, 17, 24, 26, 31})));
  const RelativePositionBias decoder(RelativePositionBiasOptions(1).bidirectional(false));
  EXPECT_TRUE(at::equal(decoder->buckets(torch::tensor({-128, -64, -16, -15, -1, 0, 5})),
                        torch::tensor({31, 26, 16, 15, 1, 0, 0})));
}

TEST(RelativePositionBiasTest, TheBiasIsAddedByDistanceFromTheAlignedQuery) {
  torch::manual_seed(1);
  const RelativePositionBias bias(
      RelativePositionBiasOptions(2).num_buckets(8).max_distance(20));
  const int64_t l = 3, s = 30;
  const auto q = torch::randn({1, 2, l, 4}), k = torch::randn({1, 2, s, 4});
  for (const auto alignment : {Mask::Alignment::bottom_right, Mask::Alignment::top_left}) {
    auto added = at::empty({1, 2, l, s});
    const int64_t shift = alignment == Mask::Alignment::bottom_right ? s - l : 0;
    for (int64_t i = 0; i < l; ++i) {
      for (int64_t j = 0; j < s; ++j) {
        added.select(2, i).select(2, j).copy_(
            bias->weight.detach()[bucket_of(j - i - shift, 8, 20, true)]);
      }
    }
    const auto mask = bias->forward(l, s, alignment);
    const auto found = scaled_dot_product_attention(q, k, k, mask);
    const auto expected = test::oracle_attention(q, k, k, Mask::add(added));
    EXPECT_TRUE(is_close(found.output.to(at::kDouble), expected.output, 2e-6));
  }
}

TEST(RelativePositionBiasTest, TheTableLearns) {
  const RelativePositionBias bias(
      RelativePositionBiasOptions(2).num_buckets(4).max_distance(5));
  const auto q = torch::randn({1, 2, 4, 4}), v = torch::randn({1, 2, 4, 4});
  scaled_dot_product_attention(q, q, v, bias->forward(4, 4)).output.square().sum().backward();
  const auto gradient = bias->weight.grad();
  ASSERT_TRUE(gradient.defined());
  // Bucket 2 would hold distance 0 of the keys after the query, of which there is none.
  for (const int64_t bucket : {0, 1, 3}) {
    EXPECT_GT(gradient[bucket].abs().min().item<double>(), 0) << bucket;
  }
  EXPECT_TRUE(test::all_zero(gradient[2]));
  // A softmax ignores what is added to all scores.
  EXPECT_TRUE(is_close(gradient.sum(0), at::zeros({2}), 1e-5));
}

// With 4 keys gradients of the table are sums of some ten numbers, each rounded once to half.
TEST(RelativePositionBiasTest, AHalfTableIsThatOfItsNumbersInFloat32) {
  torch::manual_seed(2);
  const auto q = torch::randn({1, 2, 4, 4}), v = torch::randn({1, 2, 4, 4});
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    RelativePositionBias half(RelativePositionBiasOptions(2)), wide(half->options);
    half->to(dtype);
    at::Tensor(wide->weight).set_data(half->weight.detach().to(at::kFloat));
    const auto attend = [&](const RelativePositionBias& bias) {
      return scaled_dot_product_attention(q, q, v, bias->forward(4, 4));
    };
    const auto found = attend(half), expected = attend(wide);
    EXPECT_TRUE(is_close(found.output, expected.output, 1e-6)) << dtype;
    EXPECT_TRUE(
        is_close(AttentionMap(q, q, half->forward(4, 4)).dense(), expected.weights, 1e-6))
        << dtype;
    found.output.square().sum().backward();
    expected.output.square().sum().backward();
    EXPECT_EQ(half->weight.grad().scalar_type(), dtype);
    const auto& gradient = wide->weight.grad();
    EXPECT_TRUE(is_close(half->weight.grad(), gradient,
                         8 * test::unit_roundoff(dtype) * gradient.abs().max().item<double>()))
        << dtype;

    MultiHeadAttention module(MultiHeadAttentionOptions(8, 2).dtype(dtype));
    const auto x = torch::randn({2, 4, 8}).to(dtype);
    const auto mixed = module(x, x, x, wide->forward(4, 4)).output;
    EXPECT_TRUE(test::is_same_but_for_blas(module(x, x, x, half->forward(4, 4)).output, mixed))
        << dtype;
  }
}

TEST(RelativePositionBiasTest, ItsParameterHasTheNameAndShapeOfT5s) {
  torch::nn::Module attention;
  attention.register_module("relative_attention_bias",
                            RelativePositionBias(RelativePositionBiasOptions(6)).ptr());
  const auto parameters = attention.named_parameters();
  ASSERT_EQ(parameters.size(), 1u);
  EXPECT_EQ(parameters[0].key(), "relative_attention_bias.weight");
  EXPECT_EQ(parameters[0].value().sizes(), at::IntArrayRef({32, 6}));
  const RelativePositionBias bias(RelativePositionBiasOptions(6));
  const auto copy = std::dynamic_pointer_cast<RelativePositionBiasImpl>(bias->clone());
  EXPECT_TRUE(at::equal(copy->weight, bias->weight));
  EXPECT_FALSE(copy->weight.is_same(bias->weight));
}

TEST(RelativePositionBiasTest, OptionsOutOfRangeAreRefused) {
  const auto make = [](const RelativePositionBiasOptions& options) {
    return [options] { RelativePositionBias bias(options); };
  };
  using Options = RelativePositionBiasOptions;
  EXPECT_TRUE(refuses(make(Options(0)), {"num_heads", "0"}));
  EXPECT_TRUE(refuses(make(Options(1).num_buckets(7)), {"num_buckets", "even", "7"}));
  EXPECT_TRUE(refuses(make(Options(1).num_buckets(2)), {"num_buckets", "4", "2"}));
  EXPECT_TRUE(
      refuses(make(Options(1).num_buckets(1).bidirectional(false)), {"num_buckets", "2", "1"}));
  EXPECT_TRUE(refuses(make(Options(1).max_distance(8)), {"max_distance", "8"}));
  const RelativePositionBias bias(Options(1));
  EXPECT_TRUE(refuses([&] { bias->forward(-1, 2); }, {"queries", "-1"}));
  EXPECT_TRUE(refuses([&] { bias->buckets(at::zeros({2})); }, {"integer", "Float"}));
}

}  // namespace
}  // namespace mha
