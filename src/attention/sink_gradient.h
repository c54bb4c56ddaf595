#pragma once

#include "attention/kernel_call.h"

namespace mha::detail {

/// The gradient of a call's sinks, (H) float32. `result` is what the kernels' forward left.
at::Tensor sink_gradient(const at::Tensor& query, const at::Tensor& key,
                         const KernelResult& result, const at::Tensor& grad_output,
                         const ResolvedMask& mask, const AttentionCall& call);

}  // namespace mha::detail
