#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <vector>

/// What all tests share: seeded random draws and comparisons that say what differs and where.
/// The oracle is in oracle.h, whole random settings of the module in random_configuration.h.
namespace mha::test {

inline constexpr double infinity = std::numeric_limits<double>::infinity();
inline constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// Draws that depend on the seed alone: not on the machine, the test order or torch's
/// generator.
class Random {
 public:
  explicit Random(uint64_t seed);

  /// An integer in [low, high].
  int64_t between(int64_t low, int64_t high);
  /// true with the given probability.
  bool chance(double probability);
  /// One of the elements.
  template <typename T>
  const T& pick(const std::vector<T>& from) {
    return from[between(0, static_cast<int64_t>(from.size()) - 1)];
  }

  /// Standard normal numbers, drawn in float64 and rounded to `dtype`, so that one seed gives
  /// the same data in every dtype.
  at::Tensor normal(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat);
  /// A bool tensor, true with the given probability.
  at::Tensor coins(at::IntArrayRef shape, double probability);

 private:
  std::mt19937_64 engine_;
  at::Generator generator_;
};

/// The seed in the environment variable MHA_TEST_SEED, by which one failing case is run again.
std::optional<uint64_t> seed_from_environment();

/// The largest |actual - expected|, in float64; +inf if exactly one of a pair is NaN or the
/// infinities differ. 0 for empty tensors. Two NaN and two equal infinities are equal.
double largest_difference(const at::Tensor& actual, const at::Tensor& expected);

/// Whether the shapes are equal and no element differs by more than `tolerance` (absolute).
/// A failure reports the largest difference, where it is, and both values there. Use as
/// `EXPECT_TRUE(is_close(output, expected, 2e-6)) << "seed " << seed;`
::testing::AssertionResult is_close(const at::Tensor& actual, const at::Tensor& expected,
                                    double tolerance);

/// Whether dtype, shape and every bit are equal (NaN equals the same NaN, 0 is not -0).
/// A failure counts the elements that differ and shows the first.
::testing::AssertionResult is_bit_equal(const at::Tensor& actual, const at::Tensor& expected);

/// What two results of the same products may differ by where LibTorch's BLAS formed them. Its
/// order of sums depends on the CPU, the threads, the shapes and where the numbers lie in
/// memory. A chain of a few sums of some hundred terms of order 1 and of either sign comes to a
/// few dozen roundings of such a term or of the largest sum, and a softmax over scores of up to
/// 10 to a few times that. A half type is rounded after each layer, of which there are four,
/// and may fall to the other side, also where terms of a sixteenth come to nothing.
double blas_tolerance(const at::Tensor& expected);

/// Whether two calls that mean the same gave the same: bit-equal where the kernels computed
/// them, which is in float32 and the half types unless MHA_PATH=plain, else up to
/// `blas_tolerance`.
::testing::AssertionResult is_same_result(const at::Tensor& actual, const at::Tensor& expected);

/// The same of what LibTorch's layers or their gradients are part of on every path.
::testing::AssertionResult is_same_but_for_blas(const at::Tensor& actual,
                                                const at::Tensor& expected);

/// Whether no element is NaN or infinite. A failure shows the first that is.
::testing::AssertionResult is_finite(const at::Tensor& tensor);

/// Half the distance between 1 and the next number of the dtype: the relative error of
/// rounding.
double unit_roundoff(at::ScalarType dtype);

}  // namespace mha::test
