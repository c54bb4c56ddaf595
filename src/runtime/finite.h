#pragma once

#include <ATen/core/Tensor.h>

namespace mha::detail {

/// Whether a tensor may hold NaN or infinity. Reads it once. Exact for float32 on the CPU;
/// elsewhere it may say yes to huge finite values, whose sum overflows.
bool may_be_non_finite(const at::Tensor& tensor);

/// Whether a computation may take another way for a tensor's numbers: elsewhere than on the CPU
/// that waits for the device, and a trace holds for other numbers.
bool may_branch_on_numbers(const at::Tensor& tensor);

}  // namespace mha::detail
