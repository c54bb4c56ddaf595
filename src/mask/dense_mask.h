#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "mask/resolved_mask.h"

namespace mha::detail {

/// Where term `i` of a list lets queries attend to the given keys, bool that broadcasts to
/// (N, H, L, S); undefined: everywhere. The one place that knows what a term blocks, pair by
/// pair. Decided on tensors as they are given, so that large finite terms never turn into
/// blocks.
at::Tensor open_pairs(const ResolvedMask& mask, const MaskList& list, size_t i);

/// Where the mask lets queries attend, bool that broadcasts to (N, H, L, S + extra); undefined:
/// everywhere.
at::Tensor allowed_pairs(const ResolvedMask& mask, at::Device device);

/// The sizes that `allowed_pairs` and `added_pairs` have, or fewer of them: (N or 1, H or 1, L
/// or 1, S + extra or 1).
std::array<int64_t, 4> pair_sizes(const ResolvedMask& mask);

/// Which queries may attend to key `j`, (N or 1, H or 1, L or 1) bool. Memory for one key only.
at::Tensor open_column(const ResolvedMask& mask, int64_t j, at::Device device);

/// What the mask adds to the scores, whose dtype is `dtype`: finite or NaN, and broadcasts to
/// (N, H, L, S + extra); undefined: nothing.
at::Tensor added_pairs(const ResolvedMask& mask, at::ScalarType dtype);

}  // namespace mha::detail
