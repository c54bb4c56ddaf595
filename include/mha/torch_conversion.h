#pragma once

#include <mha/multi_head_attention.h>
#include <torch/nn/modules/activation.h>

namespace mha {

/// A module with the options, weights, frozen flags, training mode, dtype and device of
/// `module`. The weights are copied. It is sequence-first (`batch_first(false)`) and returns
/// averaged weights, both as the given one does. Draws no random numbers.
MultiHeadAttention from_torch(const torch::nn::MultiheadAttention& module);

/// torch's module with the options, weights, frozen flags, training mode, dtype and device of
/// `module`. The weights are copied; the result takes (L, N, E), as torch's C++ module always
/// does. Where torch packs the three input projections into one parameter, it is frozen only if
/// all three are. Draws no random numbers.
/// Throws `c10::Error` if torch's module cannot express an option: `head_dim` other than
/// d_model / num_heads, `num_kv_heads` other than num_heads, or a `scale` other than
/// 1 / sqrt(head_dim).
torch::nn::MultiheadAttention to_torch(const MultiHeadAttention& module);

}  // namespace mha
