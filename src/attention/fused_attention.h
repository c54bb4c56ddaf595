#pragma once

#include "attention/attention.h"

namespace mha::detail {

/// `attention` by the CPU kernels, without an L x S tensor. The output lies in memory as
/// (N, L, H, Dv), so that merging the heads is free.
AttentionResult fused_attention(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const ResolvedMask& mask,
                                const AttentionCall& call);

}  // namespace mha::detail
