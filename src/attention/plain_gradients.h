#pragma once

#include <vector>

#include "attention/plain_blocks.h"

namespace mha::detail {

/// Gradients of `given`, which are query, key, value, the terms that the mask adds and the
/// sinks, if any, from those of output and weights, which may be undefined, in blocks. They
/// have gradients themselves if gradients are recorded.
std::vector<at::Tensor> plain_gradients(const std::vector<at::Tensor>& given,
                                        const std::vector<at::Tensor>& grad_results,
                                        const ResolvedMask& mask, const AttentionCall& call,
                                        const BlockSizes& sizes);

}  // namespace mha::detail
