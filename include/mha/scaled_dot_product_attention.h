#pragma once

#include <ATen/core/Tensor.h>
#include <mha/mask.h>
#include <torch/arg.h>

#include <iosfwd>
#include <optional>

namespace mha {

/// Which attention weights a call returns.
enum class Weights {
  none,      ///< none: the result's `weights` is an undefined tensor
  averaged,  ///< the mean over heads, (N, L, S)
  per_head,  ///< every head's own map, (N, H, L, S)
};
std::ostream& operator<<(std::ostream& stream, Weights weights);

/// What an attention call returns. Unpacks as `auto [output, weights] = ...`.
struct AttentionOutput {
  at::Tensor output;   ///< the attended values
  at::Tensor weights;  ///< the attention weights asked for; undefined with `Weights::none`
};

/// Options of `scaled_dot_product_attention`.
struct AttentionOptions {
  /// Multiplies q . k before the softmax. Default: 1 / sqrt(D). Must be finite.
  TORCH_ARG(std::optional<double>, scale);
  /// Holds scores within (-softcap, softcap): they become softcap * tanh(score / softcap) after
  /// the scale, before the mask. From 1e-30 to 1e30, or 0 for none.
  TORCH_ARG(double, softcap) = 0.0;
  /// Attention sinks, (H), floating: one more score in each row of a head, which takes weight
  /// and has no value, so that a row's weights sum to less than 1. Neither scaled nor capped; a
  /// sink of -inf takes nothing, one of NaN reaches every query of its head that sees a key.
  /// Gradient flows into it. Undefined: none.
  TORCH_ARG(at::Tensor, sinks);
  /// Probability in [0, 1] with which each weight is dropped; the others are multiplied by
  /// 1 / (1 - dropout). Applied whenever it is above 0: there is no training mode here.
  TORCH_ARG(double, dropout) = 0.0;
  /// Which weights to return.
  TORCH_ARG(Weights, weights) = Weights::per_head;
  /// Return the weights as dropout left them (as torch does) instead of before dropout, where
  /// the rows sum to 1.
  TORCH_ARG(bool, weights_after_dropout) = false;
};

/// Attention of `query` over `key` and `value`:
///
///     output = dropout(softmax(scale * query @ key^T + added, over the allowed keys)) @ value
///
/// `AttentionOptions::softcap` and `sinks` change the softmax's arguments and denominator.
///
/// | tensor  | shape                                              |
/// | ------- | -------------------------------------------------- |
/// | query   | (..., H, L, D)                                     |
/// | key     | (..., Hk, S, D)                                    |
/// | value   | (..., Hk, S, Dv)                                   |
/// | output  | (..., H, L, Dv), dtype of query                    |
/// | weights | (..., H, L, S) or (..., L, S), dtype of query      |
///
/// The leading dimensions are equal for all three and may be absent; N, which the mask's shapes
/// refer to, is their product (1 when absent). H must be a multiple of Hk: query head h uses
/// key/value head h / (H / Hk), without a copy of the shared heads. L, S and N may be 0; with
/// S = 0 the output is 0.
///
/// Tensors are floating (float32, float64, bfloat16, float16) and of one dtype and device; the
/// half types are computed in float32. Any strides will do. A query that may attend to nothing
/// gets output and weights 0 (see `Mask`).
///
/// Scores that leave the range of float32 (float64) are held at its largest number: scale * q.k,
/// whatever its sum comes to on the way; the sum of the added terms; and the sum of both. So an
/// overflow neither blocks a key nor becomes NaN, and a key that is open alone has weight 1; no
/// gradient flows through a score that is held. An infinite value, or one of NaN, reaches every
/// query that may attend to it, though its weight underflows or is dropped.
///
/// Traces (torch::jit) and forward-mode derivatives follow the composition of ATen calls, which
/// holds an L x S map; a trace draws dropout anew.
///
/// Throws `c10::Error` that names the argument, what was expected and what was found.
///
/// Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1; grouped heads:
/// Ainslie et al., "GQA", 2023; soft cap: Gemma Team, "Gemma 2", 2024, section 2; sinks:
/// OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2.2, and the idea, Xiao et
/// al., "Efficient Streaming Language Models with Attention Sinks", 2023.
AttentionOutput scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key,
                                             const at::Tensor& value, const Mask& mask = {},
                                             const AttentionOptions& options = {});

}  // namespace mha
