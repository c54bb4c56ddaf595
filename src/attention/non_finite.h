#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "mask/resolved_mask.h"

// What lies behind a mask may be NaN or infinite, and 0 * NaN is NaN. The paths compute with
// such rows replaced by zeros and put back what they give to the pairs that may see them.

namespace mha::detail {

/// Whether each row [.., i, :] holds only finite numbers.
at::Tensor row_is_finite(const at::Tensor& tensor);

/// `tensor` with zeros, without a gradient, in place of the rows that are not finite.
at::Tensor finite_rows(const at::Tensor& tensor);

/// Indices i for which a row [.., i, :] is marked, for any of the other indices.
std::vector<int64_t> marked_rows(const at::Tensor& marks);

/// Which queries may attend to key `j`, (N or 1, H or 1, L or 1) bool. Memory for one key only.
at::Tensor open_column(const ResolvedMask& mask, int64_t j, at::Device device);

}  // namespace mha::detail
