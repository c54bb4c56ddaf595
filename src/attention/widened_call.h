#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernel_call.h"

// Half types on the float32 kernels, head by head: a head's rows are widened just before they
// are read, into memory that stays in the cache, and its output is rounded just after.
namespace mha::detail {

/// Whether heads are enough to share among the threads, and all is of one half type.
bool widens_by_head(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const AttentionCall& call);

/// The output has the inputs' dtype.
KernelResult forward_by_head(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const ResolvedMask& mask,
                             const AttentionCall& call);

}  // namespace mha::detail
