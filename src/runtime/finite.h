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

/// The widest floating dtype that a device has: Metal has no float64.
inline at::ScalarType widest_dtype(at::Device device) {
  return device.is_mps() ? at::kFloat : at::kDouble;
}

/// Whether a computation may take another way for a tensor's numbers: elsewhere than on the CPU
/// that waits for the device, and a trace holds for other numbers.
bool may_branch_on_numbers(const at::Tensor& tensor);

/// Whether a tensor may hold NaN or infinity: yes where it may not be asked, no on meta. Reads
/// it once. Exact for float32; of others it may say yes to huge finite values, whose sum
/// overflows.
bool may_be_non_finite(const at::Tensor& tensor);

/// Whether any of these bools, which may be undefined, may be true: yes where they may not be
/// asked, no on meta.
bool may_have_marks(const at::Tensor& marks);

/// Whether each row [.., i, :] holds only finite numbers.
at::Tensor row_is_finite(const at::Tensor& tensor);

/// `tensor` with zeros, without a gradient, in place of the rows that are not finite.
at::Tensor finite_rows(const at::Tensor& tensor);

/// Indices i for which a row [.., i, :] is marked, for any of the other indices.
std::vector<int64_t> marked_rows(const at::Tensor& marks);

}  // namespace mha::detail
