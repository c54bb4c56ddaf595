#pragma once

#include "attention/attention.h"

namespace mha::detail {

/// Attention as a composition of ATen calls: any device, any floating dtype, every option, and
/// gradients of every order. It holds the whole (N, H, L, S) map. It is the fallback of the
/// fused paths and the oracle they are tested against.
///
/// Arguments and results are those of `attention`; it forms no statistics.
AttentionResult plain_attention(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const ResolvedMask& mask,
                                const AttentionCall& call);

/// The scores that the weights are the softmax of, with the sinks, (N, H, L, S): -inf where the
/// mask blocks.
/// query and key are both float32 or both float64.
at::Tensor plain_scores(const at::Tensor& query, const at::Tensor& key,
                        const ResolvedMask& mask, const Scoring& scoring);

}  // namespace mha::detail
