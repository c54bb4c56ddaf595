#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

// Memory whose contents are undefined until something is computed into them. With
// MHA_POISON_SCRATCH=1 in the environment, for tests, it holds NaN, so that whatever reaches a
// result without being computed shows in it.
namespace mha::detail {

/// Whether MHA_POISON_SCRATCH=1 is set.
bool poisons_memory();

/// NaN in `count` floats, if memory is poisoned.
void poison(float* data, int64_t count);

/// `at::empty`. Poison in a tensor of integers is their lowest number.
at::Tensor uncomputed(at::IntArrayRef sizes, const at::TensorOptions& options);
/// `at::empty_like`.
at::Tensor uncomputed_like(const at::Tensor& tensor, at::MemoryFormat format);

}  // namespace mha::detail
