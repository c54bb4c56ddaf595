#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <vector>

// Which numbers are finite. What lies behind a mask may be NaN or infinite, and 0 * NaN is NaN.
// The paths compute with such rows replaced by zeros and put back what they give to the pairs
// that may see them.
namespace mha::detail {

/// The lowest finite number of sums in this dtype, which are float32 unless it is float64.
constexpr double lowest_of(at::ScalarType dtype) {
  return dtype == at::kDouble ? std::numeric_limits<double>::lowest()
                              : std::numeric_limits<float>::lowest();
}

/// Whether a tensor may hold NaN or infinity. Reads it once. Exact for float32 on the CPU;
/// elsewhere it may say yes to huge finite values, whose sum overflows.
bool may_be_non_finite(const at::Tensor& tensor);

/// Whether a computation may take another way for a tensor's numbers: elsewhere than on the CPU
/// that waits for the device, and a trace holds for other numbers.
bool may_branch_on_numbers(const at::Tensor& tensor);

/// Whether each row [.., i, :] holds only finite numbers.
at::Tensor row_is_finite(const at::Tensor& tensor);

/// `tensor` with zeros, without a gradient, in place of the rows that are not finite.
at::Tensor finite_rows(const at::Tensor& tensor);

/// Indices i for which a row [.., i, :] is marked, for any of the other indices.
std::vector<int64_t> marked_rows(const at::Tensor& marks);

}  // namespace mha::detail
