#pragma once

#include <mha/attention_map.h>
#include <mha/call_options.h>
#include <mha/kv_cache.h>
#include <mha/mask.h>
#include <mha/rotary.h>
#include <mha/scaled_dot_product_attention.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <iosfwd>
#include <memory>
#include <optional>
#include <vector>

namespace mha {

namespace detail {
/// Asks for a module whose parameters have no values yet.
struct Undrawn {};
class PackedWeights;
}  // namespace detail

/// How queries and keys are normalised: rms is x / sqrt(mean(x^2) + eps) * gain, layer takes
/// the mean off first.
enum class QKNorm { none, rms, layer };
std::ostream& operator<<(std::ostream& stream, QKNorm norm);

/// Over what: the D elements of each head, or all H * D of a token's query (Hk * D of its key).
enum class QKNormScope { head, all_heads };
std::ostream& operator<<(std::ostream& stream, QKNormScope scope);

/// The learned gain: one for each element of what is normalised, (D), which all heads share, or
/// over all heads (H * D) and (Hk * D); one for each element of every head, (H, D) and (Hk, D);
/// or none.
enum class QKNormGain { elementwise, per_head, none };
std::ostream& operator<<(std::ostream& stream, QKNormGain gain);

/// Whether queries and keys are normalised before their rotation or after it.
enum class QKNormOrder { before_rotary, after_rotary };
std::ostream& operator<<(std::ostream& stream, QKNormOrder order);

/// Queries of later positions have larger scores: at position p, from 0 on, a query is
/// multiplied by
///
///     1 + scale * ln(1 + floor((p + offset) / floor_scale))
///
/// Source: Nakanishi, "Scalable-Softmax Is Superior for Attention", 2025, in the form of Llama
/// 4 (`attn_scale`, `floor_scale`, offset 1) and Ministral 3 (`llama_4_scaling_beta`, offset
/// 0).
struct TemperatureTuning {
  TemperatureTuning(double scale, int64_t floor_scale)
      : scale_(scale), floor_scale_(floor_scale) {}
  TORCH_ARG(double, scale);
  TORCH_ARG(int64_t, floor_scale);
  TORCH_ARG(int64_t, offset) = 0;
};
std::ostream& operator<<(std::ostream& stream, const TemperatureTuning& tuning);

/// By what the heads' output is multiplied before W_o, from the query's token x:
/// sigmoid(x W_g), one number for each head, or one for each of its elements.
enum class OutputGate { none, per_head, elementwise };
std::ostream& operator<<(std::ostream& stream, OutputGate gate);

/// Options of `MultiHeadAttention`. Checked by the module's constructor and by each call: those
/// that say nothing of parameters may change between calls (`dropout`, `batch_first`, `scale`,
/// `softcap`, `rotary`, ...), others then no longer fit and throw.
struct MultiHeadAttentionOptions {
  MultiHeadAttentionOptions(int64_t d_model, int64_t num_heads);

  /// Width E of query and output.
  TORCH_ARG(int64_t, d_model);
  /// Number of heads H.
  TORCH_ARG(int64_t, num_heads);
  /// Size D of one head. Default: d_model / num_heads, which must then divide.
  TORCH_ARG(std::optional<int64_t>, head_dim);
  /// Size Dv of one value head (as in MiMo). Default: D.
  TORCH_ARG(std::optional<int64_t>, v_head_dim);
  /// Number of key and value heads Hk, which divides num_heads: query head h uses key/value
  /// head h / (H / Hk). Default: num_heads, a pair for each.
  TORCH_ARG(std::optional<int64_t>, num_kv_heads);
  /// Width of key. Default: d_model.
  TORCH_ARG(std::optional<int64_t>, kdim);
  /// Width of value. Default: d_model.
  TORCH_ARG(std::optional<int64_t>, vdim);
  /// Whether the projections have a bias.
  TORCH_ARG(bool, bias) = true;
  /// Whether W_o has one. Default: as `bias`. (In Qwen2 all but W_o have one; in encoders of
  /// images without `qkv_bias` W_o alone.)
  TORCH_ARG(std::optional<bool>, output_bias);
  /// Probability in [0, 1] with which a weight is dropped in training mode.
  TORCH_ARG(double, dropout) = 0.0;
  /// Append one learned key and value, `bias_k`, (1, 1, Hk * D), and `bias_v`, (1, 1, Hk * Dv),
  /// to every sequence.
  TORCH_ARG(bool, add_bias_kv) = false;
  /// Append one key and value of zeros to every sequence.
  TORCH_ARG(bool, add_zero_attn) = false;
  /// Inputs and output are (N, L, E); false: (L, N, E).
  TORCH_ARG(bool, batch_first) = true;
  /// Multiplies q . k before the softmax. Default: 1 / sqrt(D).
  TORCH_ARG(std::optional<double>, scale);
  /// Holds scores within (-softcap, softcap), see `AttentionOptions::softcap`. 0: none.
  TORCH_ARG(double, softcap) = 0.0;
  /// A learned score `sinks`, (H), for each head, which takes weight and has no value: see
  /// `AttentionOptions::sinks`. 0 at first, so that a query may attend to nothing in part.
  TORCH_ARG(bool, sinks) = false;
  /// Rotates queries and keys by their positions. The appended keys of `add_bias_kv` and
  /// `add_zero_attn` have no position. Default: no positions.
  TORCH_ARG(std::optional<RotaryOptions>, rotary);
  /// Multiplies queries by a factor of their positions, last of all. Default: none.
  TORCH_ARG(std::optional<TemperatureTuning>, temperature_tuning);
  /// Multiplies values (MiMo's `attention_value_scale`).
  TORCH_ARG(double, value_scale) = 1.0;
  /// Normalises queries and keys (as Qwen3 and Gemma 3 do by rms).
  TORCH_ARG(QKNorm, qk_norm) = QKNorm::none;
  TORCH_ARG(double, qk_norm_eps) = 1e-6;
  /// Over all heads as in OLMo 2, whose heads can't be pruned then.
  TORCH_ARG(QKNormScope, qk_norm_scope) = QKNormScope::head;
  /// Per head as in Cohere's Command R+; none as in Llama 4.
  TORCH_ARG(QKNormGain, qk_norm_gain) = QKNormGain::elementwise;
  /// After the rotation as in Hunyuan.
  TORCH_ARG(QKNormOrder, qk_norm_order) = QKNormOrder::before_rotary;
  /// With `layer`, adds a learned bias after the gain, as torch's `LayerNorm` does (timm's
  /// `qk_norm`).
  TORCH_ARG(bool, qk_norm_bias) = false;
  /// Gates the heads' output.
  TORCH_ARG(OutputGate, output_gate) = OutputGate::none;
  /// The weights that a call without the argument returns.
  TORCH_ARG(Weights, weights) = Weights::per_head;
  /// Return the weights as dropout left them (as torch does) instead of before dropout.
  TORCH_ARG(bool, weights_after_dropout) = false;
  /// dtype of the parameters. Default: torch's default dtype.
  TORCH_ARG(std::optional<at::ScalarType>, dtype);
  /// Device of the parameters. Default: the CPU.
  TORCH_ARG(std::optional<at::Device>, device);
};

/// Multi-head attention:
///
///     head_h = softmax(scale * (query W_q)_h (key W_k)_h^T) (value W_v)_h
///     output = concat(head_0 .. head_{H-1}) W_o
///
/// With `num_kv_heads` below num_heads, groups of query heads share one key/value head, which
/// is never copied: (key W_k)_h is then that of head h / (H / Hk).
///
/// Parameters, in the order in which they are created, with `torch.nn.Linear`'s initialisation,
/// so that one seed gives the numbers that the same four `nn.Linear` give in Python:
///
/// | name             | shape                                   |
/// | ---------------- | --------------------------------------- |
/// | `W_q`            | Linear(d_model -> H * D)                |
/// | `W_k`            | Linear(kdim -> Hk * D)                  |
/// | `W_v`            | Linear(vdim -> Hk * Dv)                 |
/// | `W_o`            | Linear(H * Dv -> d_model)               |
/// | `bias_k, bias_v` | (1, 1, Hk * D), (1, 1, Hk * Dv), with `add_bias_kv` |
/// | `sinks`          | (H), with `sinks`                       |
/// | `q_norm, k_norm` | shaped as `QKNormGain` says, ones at first, with |
/// |                  | `qk_norm`; with `qk_norm_bias` `q_norm_bias`, |
/// |                  | `k_norm_bias` of these shapes too, zeros at first |
/// | `W_g`            | Linear(d_model -> H or H * Dv), with `output_gate` |
///
/// The appended keys of `add_bias_kv` and `add_zero_attn` (in this order) come after the S
/// given ones and are open to every query whatever the mask says; the weights then have S + 1
/// or S + 2 columns. Masks always refer to the S given keys.
///
/// Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2; the meaning of the
/// options is that of `torch.nn.MultiheadAttention`. Grouped heads: Ainslie et al., "GQA",
/// 2023. Normalised queries and keys: Dehghani et al., "Scaling Vision Transformers to 22
/// Billion Parameters", 2023; gate: Qiu et al., "Gated Attention for Large Language Models",
/// 2025.
class MultiHeadAttentionImpl : public torch::nn::Cloneable<MultiHeadAttentionImpl> {
 public:
  /// Throws `c10::Error` naming the first option that has no sensible meaning.
  explicit MultiHeadAttentionImpl(MultiHeadAttentionOptions options);
  MultiHeadAttentionImpl(int64_t d_model, int64_t num_heads)
      : MultiHeadAttentionImpl(MultiHeadAttentionOptions(d_model, num_heads)) {}
  /// For code that gives every parameter its value at once; draws no random numbers.
  MultiHeadAttentionImpl(MultiHeadAttentionOptions options, detail::Undrawn);

  /// | tensor  | shape                                                           |
  /// | ------- | --------------------------------------------------------------- |
  /// | query   | (N, L, E), unbatched (L, E); with `batch_first(false)` (L, N, E) |
  /// | key     | (N, S, kdim), (S, kdim) or (S, N, kdim) alike                    |
  /// | value   | (N, S, vdim), (S, vdim) or (S, N, vdim) alike                    |
  /// | output  | as query                                                        |
  /// | weights | (N, H, L, S) or (N, L, S), without N if unbatched               |
  ///
  /// With `key` and `value` left out it is self-attention, the same as `forward(x, x, x)`.
  /// `mask`: see `Mask`. `weights`: what to return; default: the option of that name.
  /// A query that may attend to nothing gives the output projection's bias.
  /// Throws `c10::Error` that names the argument, what was expected and what was found.
  AttentionOutput forward(const at::Tensor& query, const at::Tensor& key = {},
                          const at::Tensor& value = {}, const Mask& mask = {},
                          std::optional<Weights> weights = std::nullopt);

  /// `forward` with everything that a call may be given. (`forward` itself has one signature,
  /// so that `torch::nn::AnyModule` and `Sequential` can take its address.)
  AttentionOutput attend(const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const CallOptions& call);
  /// Self-attention.
  AttentionOutput attend(const at::Tensor& query, const CallOptions& call) {
    return attend(query, {}, {}, call);
  }

  /// `attend` with the map beside the output: the weights that the output used, rebuilt where
  /// they are asked for. Where attention is fused no (L, S) tensor is held. In training mode
  /// the map is that before dropout. The output is that with `Weights::none`, bit for bit;
  /// `call.weights` is not looked at.
  TracedAttention trace(const at::Tensor& query, const at::Tensor& key = {},
                        const at::Tensor& value = {}, const CallOptions& call = {});

  /// Projects keys and values once, for `CallOptions::memory` of any number of calls: the same
  /// outputs as those of calls with this key and value. Shapes as in `forward`; `value`
  /// defaults to `key`. No gradient flows back from the cache: call it under `at::NoGradGuard`.
  KVCache project_keys(const at::Tensor& key, const at::Tensor& value = {},
                       const KVCacheOptions& cache_options = {});

  /// Registers the parameters, without values. Called once, by the constructor.
  void reset() override;

  /// Draws all parameters as at construction: `torch.nn.Linear`'s initialisation for the
  /// projections, Xavier normal for `bias_k` and `bias_v`, zeros for `sinks`, ones for gains.
  void reset_parameters();

  /// Takes heads away for good: the parameters shrink to the rows and columns of the others,
  /// and the output is that with a `head_mask` of 0 for them. A key/value head goes with the
  /// last of its query heads; those that stay must all keep the same number of query heads.
  /// Queries and keys must not be normalised over all heads, of which each is then a part.
  /// `heads` holds distinct numbers in [0, H), at most H - 1. Frozen flags stay; gradients are
  /// dropped. An optimizer keeps its state in the old shapes, so make a new one. Throws
  /// `c10::Error` with the module unchanged.
  void prune_heads(const std::vector<int64_t>& heads);

  /// A deep copy with equal values, training mode and frozen flags, on `device` if given.
  /// Draws no random numbers. It is another layer, with caches of its own.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;

  /// `torch::save` and `torch::load`. Loading is all or nothing: it throws `c10::Error` that
  /// lists every parameter that is missing, unexpected or of another shape or dtype, with the
  /// module unchanged. The parameters go to the archive's device, as in torch's modules.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// Writes `mha::MultiHeadAttention(...)` with every option that has an effect.
  void pretty_print(std::ostream& stream) const override;

  /// Size D of one head.
  int64_t head_dim() const;
  /// Size Dv of one value head.
  int64_t v_head_dim() const;
  /// Number Hk of key and value heads.
  int64_t num_kv_heads() const;

  MultiHeadAttentionOptions options;
  // What is registered: each call throws where one was replaced by assignment, which files and
  // clones would not see. Write values by `copy_` or `set_data`, and replace a layer by
  // `W_q = replace_module("W_q", layer)`.
  torch::nn::Linear W_q{nullptr}, W_k{nullptr}, W_v{nullptr}, W_o{nullptr}, W_g{nullptr};
  at::Tensor bias_k, bias_v, sinks, q_norm, k_norm, q_norm_bias, k_norm_bias;

 private:
  // The projections' weights as the CPU kernels want them; noticed when they change. Also
  // tells this layer's caches from another's.
  std::shared_ptr<detail::PackedWeights> packed_weights_;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())},
                           {2, torch::nn::AnyValue(at::Tensor())},
                           {3, torch::nn::AnyValue(Mask())},
                           {4, torch::nn::AnyValue(std::optional<Weights>())})
};

/// Holder of a `MultiHeadAttentionImpl`, used like any module of `torch::nn`.
TORCH_MODULE(MultiHeadAttention);

}  // namespace mha
