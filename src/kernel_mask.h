#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "cpu/kernels.h"
#include "resolved_mask.h"

namespace mha::detail {

/// A mask in the form the kernels read, and the memory that it points to.
struct PackedMask {
  cpu::KernelMask mask;
  std::vector<at::Tensor> storage;
};

/// Merges the terms of one kind and packs pair masks into bits, for `kernels`. Nothing grows
/// beyond the shape in which it was given: planes stay shared between samples and heads.
PackedMask pack_mask(const ResolvedMask& mask, const cpu::Kernels& kernels);

}  // namespace mha::detail
