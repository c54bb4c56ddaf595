#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "cpu/kernels.h"
#include "mask/resolved_mask.h"

namespace mha::detail {

/// A mask in the form the kernels read, and the memory that it points to.
struct PackedMask {
  cpu::KernelMask mask;
  std::vector<at::Tensor> storage;
};

/// Merges the terms of one kind and packs pair masks into bits, for `kernels`. Nothing grows
/// beyond the shape in which it was given: planes stay shared between samples and heads.
PackedMask pack_mask(const ResolvedMask& mask, const cpu::PairBlocks& kernels);

/// All ids of a mask's documents, (N or 1, L + S) of queries and keys, numbered from 0 in their
/// order, so that ids of any size fit; the second of two terms tells apart what the first
/// leaves together. Undefined: none.
at::Tensor number_documents(const ResolvedMask& mask);

}  // namespace mha::detail
