#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "cpu/kernels.h"
#include "mask/resolved_mask.h"

namespace mha::detail {

/// Gradients of `added_terms(mask)`, undefined for those that ask for none. `args` are the
/// call's, without its `grad_added`.
std::vector<at::Tensor> mask_gradients(const cpu::Kernels& kernels, cpu::AttentionBackward args,
                                       const ResolvedMask& mask);

}  // namespace mha::detail
