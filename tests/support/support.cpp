#include "support/support.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <sstream>
#include <string>

#include "runtime/attention_path.h"

namespace mha::test {
namespace {

/// `[1, 0, 3]`: the index in `shape` of a flat row-major position.
std::string index_text(int64_t position, at::IntArrayRef shape) {
  std::vector<int64_t> index(shape.size());
  for (auto axis = static_cast<int64_t>(shape.size()) - 1; axis >= 0; --axis) {
    index[axis] = position % shape[axis];
    position /= shape[axis];
  }
  std::ostringstream text;
  text << at::IntArrayRef(index);
  return text.str();
}

/// |actual - expected| where equal infinities and two NaN differ by 0, and NaN against a number
/// or an infinity against anything else by +inf. Flat, float64.
at::Tensor differences(const at::Tensor& actual, const at::Tensor& expected) {
  const auto a = actual.detach().to(at::kDouble).flatten();
  const auto b = expected.detach().to(at::kDouble).flatten();
  const auto same = (a == b) | (a.isnan() & b.isnan());
  return (a - b).abs().nan_to_num(std::numeric_limits<double>::infinity()).masked_fill(same, 0);
}

::testing::AssertionResult same_shape(const at::Tensor& actual, const at::Tensor& expected) {
  if (!actual.defined() || !expected.defined())
    return ::testing::AssertionFailure()
           << "actual is " << (actual.defined() ? "" : "un") << "defined, expected is "
           << (expected.defined() ? "" : "un") << "defined";
  if (actual.sizes() != expected.sizes())
    return ::testing::AssertionFailure()
           << "actual has shape " << actual.sizes() << ", expected " << expected.sizes();
  return ::testing::AssertionSuccess();
}

}  // namespace

Random::Random(uint64_t seed)
    : engine_(seed), generator_(at::detail::createCPUGenerator(seed)) {}

int64_t Random::between(int64_t low, int64_t high) {
  // Not std::uniform_int_distribution: what that draws differs between standard libraries.
  return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
}

bool Random::chance(double probability) {
  return static_cast<double>(engine_() >> 11) * 0x1p-53 < probability;
}

at::Tensor Random::normal(at::IntArrayRef shape, at::ScalarType dtype) {
  return at::randn(shape, generator_, at::TensorOptions(at::kDouble)).to(dtype);
}

at::Tensor Random::coins(at::IntArrayRef shape, double probability) {
  return at::rand(shape, generator_, at::TensorOptions(at::kDouble)) < probability;
}

std::optional<uint64_t> seed_from_environment() {
  const char* text = std::getenv("MHA_TEST_SEED");
  if (text == nullptr) return std::nullopt;
  return std::stoull(text);
}

double largest_difference(const at::Tensor& actual, const at::Tensor& expected) {
  const auto difference = differences(actual, expected);
  return difference.numel() == 0 ? 0 : difference.max().item<double>();
}

::testing::AssertionResult is_close(const at::Tensor& actual, const at::Tensor& expected,
                                    double tolerance) {
  if (const auto shapes = same_shape(actual, expected); !shapes) return shapes;
  const auto difference = differences(actual, expected);
  if (difference.numel() == 0) return ::testing::AssertionSuccess();
  const auto worst = difference.argmax().item<int64_t>();
  const auto largest = difference[worst].item<double>();
  if (largest <= tolerance) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "largest difference " << largest << " > " << tolerance << " at "
         << index_text(worst, actual.sizes()) << " of " << actual.sizes() << ": actual "
         << actual.detach().flatten()[worst].item<double>() << ", expected "
         << expected.detach().flatten()[worst].item<double>() << "; "
         << (difference > tolerance).sum().item<int64_t>() << " of " << difference.numel()
         << " elements differ by more";
}

::testing::AssertionResult is_bit_equal(const at::Tensor& actual, const at::Tensor& expected) {
  if (const auto shapes = same_shape(actual, expected); !shapes) return shapes;
  if (actual.scalar_type() != expected.scalar_type())
    return ::testing::AssertionFailure() << "actual has dtype " << actual.scalar_type()
                                         << ", expected " << expected.scalar_type();
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.detach().contiguous().flatten().unsqueeze(-1).view(at::kByte);
  };
  if (actual.numel() == 0) return ::testing::AssertionSuccess();
  const auto differ = (bytes(actual) != bytes(expected)).any(-1);
  const auto count = differ.sum().item<int64_t>();
  if (count == 0) return ::testing::AssertionSuccess();
  const auto first = differ.to(at::kByte).argmax().item<int64_t>();
  return ::testing::AssertionFailure()
         << count << " of " << actual.numel() << " elements differ in their bits, first at "
         << index_text(first, actual.sizes()) << " of " << actual.sizes() << ": actual "
         << actual.detach().flatten()[first].item<double>() << ", expected "
         << expected.detach().flatten()[first].item<double>() << "; largest difference "
         << largest_difference(actual, expected);
}

double blas_tolerance(const at::Tensor& expected) {
  if (expected.numel() == 0) return 0;
  const auto size = expected.detach().to(at::kDouble).abs();
  const double largest =
      size.masked_fill(size.isfinite().logical_not(), 0).max().item<double>();
  const auto dtype = expected.scalar_type();
  const auto summed = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const double rounded =
      summed == dtype ? 0 : 8 * unit_roundoff(dtype) * std::max(1.0 / 16, largest);
  return 256 * unit_roundoff(summed) * std::max(1.0, largest) + rounded;
}

::testing::AssertionResult is_same_but_for_blas(const at::Tensor& actual,
                                                const at::Tensor& expected) {
  if (const auto shapes = same_shape(actual, expected); !shapes) return shapes;
  if (actual.scalar_type() != expected.scalar_type()) return is_bit_equal(actual, expected);
  return is_close(actual, expected, blas_tolerance(expected));
}

::testing::AssertionResult is_same_result(const at::Tensor& actual,
                                          const at::Tensor& expected) {
  const bool by_blas = detail::kernels_are_off() ||
                       (expected.defined() && expected.scalar_type() == at::kDouble);
  return by_blas ? is_same_but_for_blas(actual, expected) : is_bit_equal(actual, expected);
}

::testing::AssertionResult is_finite(const at::Tensor& tensor) {
  const auto bad = tensor.detach().flatten().isfinite().logical_not();
  if (!bad.any().item<bool>()) return ::testing::AssertionSuccess();
  const auto first = bad.to(at::kByte).argmax().item<int64_t>();
  return ::testing::AssertionFailure()
         << bad.sum().item<int64_t>() << " of " << tensor.numel()
         << " elements are not finite, first "
         << tensor.detach().flatten()[first].item<double>() << " at "
         << index_text(first, tensor.sizes()) << " of " << tensor.sizes();
}

double unit_roundoff(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return 0x1p-24;
    case at::kHalf:
      return 0x1p-11;
    case at::kBFloat16:
      return 0x1p-8;
    default:
      return 0x1p-53;
  }
}

}  // namespace mha::test
