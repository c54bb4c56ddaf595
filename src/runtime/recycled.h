#pragma once

#include <ATen/core/Tensor.h>

namespace mha::detail {

/// A contiguous float32 CPU tensor, contents undefined, for what does not outlive the call. Its
/// memory is taken again by a later call of this thread once no tensor uses it, since fresh
/// pages cost as much as what is computed in them. A tensor that escapes is safe: its memory is
/// then its own. Up to 64 MiB a thread are kept; what is smaller than 64 KiB or does not fit
/// comes from the allocator.
at::Tensor recycled(at::IntArrayRef sizes);

/// How long a tensor lives.
enum class Lifetime {
  kept,     ///< it may outlive the call of the library, and shall keep no more than its own
  passing,  ///< it ends before the call does
};

/// Such a tensor, `recycled` if it passes; of float32 or of bfloat16.
at::Tensor allocated(at::IntArrayRef sizes, Lifetime lifetime,
                     at::ScalarType dtype = at::kFloat);

}  // namespace mha::detail
