#include <mha/multi_head_attention.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <torch/nn/init.h>

#include <utility>
#include <vector>

#include "attention/attention.h"
#include "map/map_recorder.h"
#include "map/map_state.h"
#include "mask/resolved_mask.h"
#include "module/head_factors.h"
#include "module/head_positions.h"
#include "module/head_projections.h"
#include "module/key_source.h"
#include "module/module_checks.h"
#include "module/off_heads.h"
#include "module/packed_weight.h"
#include "module/registered_members.h"
#include "module/unseen_tokens.h"

namespace mha {
namespace {

at::TensorOptions tensor_options(const MultiHeadAttentionOptions& options) {
  auto result = at::TensorOptions().dtype(
      options.dtype().value_or(c10::typeMetaToScalarType(c10::get_default_dtype())));
  return options.device() ? result.device(*options.device()) : result;
}

// A Linear of the given sizes whose parameters are not drawn: LinearImpl draws
// in its constructor, of a Linear without outputs nothing.
torch::nn::Linear undrawn_linear(int64_t in, int64_t out, bool bias,
                                 const MultiHeadAttentionOptions& options) {
  torch::nn::Linear linear(torch::nn::LinearOptions(1, 0).bias(bias));
  linear->options.in_features(in).out_features(out);
  // Replaced, since set_data takes no tensor of any device.
  auto& registered = detail::registered_parameters(*linear);
  const auto undrawn = [&](const char* name, at::IntArrayRef sizes) {
    return registered[name] = at::empty(sizes, tensor_options(options)).set_requires_grad(true);
  };
  linear->weight = undrawn("weight", {out, in});
  if (bias) linear->bias = undrawn("bias", {out});
  return linear;
}

// (N, T, E), whatever the layout.
at::Tensor tokens_of(const at::Tensor& given, bool batch_first) {
  const auto tensor = detail::without_lazy_bits(given);
  if (tensor.dim() == 2) return tensor.unsqueeze(0);
  return batch_first ? tensor : tensor.transpose(0, 1);
}

// (N, 0, width): nothing to project by `layer`, for the samples of `tokens`.
at::Tensor no_tokens(const at::Tensor& tokens, const torch::nn::LinearImpl& layer) {
  return at::empty({tokens.size(0), 0, layer.weight.size(1)}, tokens.options());
}

}  // namespace

MultiHeadAttentionOptions::MultiHeadAttentionOptions(int64_t d_model, int64_t num_heads)
    : d_model_(d_model), num_heads_(num_heads) {}

MultiHeadAttentionImpl::MultiHeadAttentionImpl(MultiHeadAttentionOptions options_)
    : MultiHeadAttentionImpl(std::move(options_), detail::Undrawn{}) {
  reset_parameters();
}

MultiHeadAttentionImpl::MultiHeadAttentionImpl(MultiHeadAttentionOptions options_,
                                               detail::Undrawn)
    : options(std::move(options_)), packed_weights_(std::make_shared<detail::PackedWeights>()) {
  MultiHeadAttentionImpl::reset();
}

int64_t MultiHeadAttentionImpl::head_dim() const {
  TORCH_CHECK(options.head_dim() || options.num_heads() > 0,
              "MultiHeadAttention: num_heads: expected a number above 0, found ",
              options.num_heads());
  return options.head_dim().value_or(options.d_model() / options.num_heads());
}

int64_t MultiHeadAttentionImpl::num_kv_heads() const {
  return options.num_kv_heads().value_or(options.num_heads());
}

void MultiHeadAttentionImpl::reset() {
  detail::check_options(options);
  const int64_t d_model = options.d_model(), inner = options.num_heads() * head_dim();
  const int64_t kv_inner = num_kv_heads() * head_dim();
  const bool bias = options.bias(), output_bias = options.output_bias().value_or(bias);
  const int64_t kdim = options.kdim().value_or(d_model),
                vdim = options.vdim().value_or(d_model);
  W_q = register_module("W_q", undrawn_linear(d_model, inner, bias, options));
  W_k = register_module("W_k", undrawn_linear(kdim, kv_inner, bias, options));
  W_v = register_module("W_v", undrawn_linear(vdim, kv_inner, bias, options));
  W_o = register_module("W_o", undrawn_linear(inner, d_model, output_bias, options));
  if (options.add_bias_kv()) {
    bias_k = register_parameter("bias_k", at::empty({1, 1, kv_inner}, tensor_options(options)));
    bias_v = register_parameter("bias_v", at::empty({1, 1, kv_inner}, tensor_options(options)));
  }
  if (options.sinks()) {
    sinks =
        register_parameter("sinks", at::empty({options.num_heads()}, tensor_options(options)));
  }
  if (options.qk_norm() != QKNorm::none) {
    q_norm = register_parameter("q_norm", at::empty({head_dim()}, tensor_options(options)));
    k_norm = register_parameter("k_norm", at::empty({head_dim()}, tensor_options(options)));
  }
  if (options.qk_norm_bias()) {
    const auto undrawn = [&] { return at::empty({head_dim()}, tensor_options(options)); };
    q_norm_bias = register_parameter("q_norm_bias", undrawn());
    k_norm_bias = register_parameter("k_norm_bias", undrawn());
  }
  if (options.output_gate() != OutputGate::none) {
    const bool per_head = options.output_gate() == OutputGate::per_head;
    W_g = register_module(
        "W_g", undrawn_linear(d_model, per_head ? options.num_heads() : inner, bias, options));
  }
}

void MultiHeadAttentionImpl::reset_parameters() {
  detail::check_module(*this);
  for (auto linear : {W_q, W_k, W_v, W_o}) linear->reset_parameters();
  if (options.add_bias_kv()) {
    torch::nn::init::xavier_normal_(bias_k);
    torch::nn::init::xavier_normal_(bias_v);
  }
  if (options.sinks()) torch::nn::init::zeros_(sinks);
  if (options.qk_norm() != QKNorm::none) {
    torch::nn::init::ones_(q_norm);
    torch::nn::init::ones_(k_norm);
  }
  if (options.qk_norm_bias()) {
    torch::nn::init::zeros_(q_norm_bias);
    torch::nn::init::zeros_(k_norm_bias);
  }
  if (options.output_gate() != OutputGate::none) W_g->reset_parameters();
}

AttentionOutput MultiHeadAttentionImpl::forward(const at::Tensor& query, const at::Tensor& key,
                                                const at::Tensor& value, const Mask& mask,
                                                std::optional<Weights> weights) {
  return attend(query, key, value, CallOptions(mask).weights(weights));
}

AttentionOutput MultiHeadAttentionImpl::attend(const at::Tensor& query, const at::Tensor& key,
                                               const at::Tensor& value,
                                               const CallOptions& call) {
  return attend_and_map(query, key, value, call, nullptr);
}

TracedAttention MultiHeadAttentionImpl::trace(const at::Tensor& query, const at::Tensor& key,
                                              const at::Tensor& value,
                                              const CallOptions& call) {
  std::shared_ptr<const detail::MapState> map;
  const auto without_weights = CallOptions(call).weights(Weights::none);
  const auto output = attend_and_map(query, key, value, without_weights, &map).output;
  return {output, AttentionMap(std::move(map))};
}

KVCache MultiHeadAttentionImpl::project_keys(const at::Tensor& key, const at::Tensor& value,
                                             const KVCacheOptions& cache_options) {
  detail::check_module(*this);
  KVCache cache(cache_options);
  const at::Tensor& given_value = value.defined() ? value : key;
  detail::check_keys(*this, key, given_value);
  detail::Tokens tokens{{}, tokens_of(key, options.batch_first()), {}, {}};
  if (options.rotary()) {
    tokens.positions = {at::arange(0), at::arange(tokens.key.size(1))};
  }
  tokens.query = no_tokens(tokens.key, *W_q);
  tokens.value =
      given_value.is_same(key) ? tokens.key : tokens_of(given_value, options.batch_first());
  const auto heads = detail::project_heads(*this, *packed_weights_, tokens,
                                           /*heads_are_passing=*/true);
  const auto dtype =
      cache_options.dtype() ? heads.key.scalar_type() : W_k->weight.scalar_type();
  cache.append(heads.key.to(dtype), heads.value.to(dtype));
  return cache;
}

AttentionOutput MultiHeadAttentionImpl::attend_and_map(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const CallOptions& call, std::shared_ptr<const detail::MapState>* map) {
  const bool self_attention = !key.defined() && !value.defined();
  const at::Tensor& given_key = self_attention ? query : key;
  const at::Tensor& given_value = self_attention ? query : value;
  const auto source = detail::find_keys(*this, packed_weights_, query, key, value, call);
  const auto& sizes = source.sizes;
  auto resolved = detail::resolve(source.mask,
                                  {{},
                                   sizes.batch,
                                   options.num_heads(),
                                   sizes.queries,
                                   sizes.keys,
                                   source.offsets,
                                   query.scalar_type()},
                                  query.device());
  resolved.extra_keys = int64_t{options.add_bias_kv()} + int64_t{options.add_zero_attn()};

  detail::check_head_mask(call.head_mask(), sizes.batch, options.num_heads());
  const auto off = detail::heads_off(call.head_mask(), query.device());

  detail::Tokens tokens{tokens_of(query, options.batch_first()), {}, {}, {}};
  tokens.key =
      given_key.is_same(query) ? tokens.query : tokens_of(given_key, options.batch_first());
  tokens.value = given_value.is_same(given_key) ? tokens.key
                                                : tokens_of(given_value, options.batch_first());
  if (call.memory()) {
    // Projected already.
    tokens.key = no_tokens(tokens.query, *W_k);
    tokens.value = no_tokens(tokens.query, *W_v);
  }
  const auto key_tokens = call.memory()                      ? detail::KeyTokens::projected
                          : tokens.key.is_same(tokens.query) ? detail::KeyTokens::queries
                                                             : detail::KeyTokens::others;
  tokens.positions = detail::head_positions(
      options, call,
      {sizes.batch, sizes.queries, call.memory() ? sizes.keys : tokens.key.size(1)}, key_tokens,
      source.positions);
  detail::drop_unseen_tokens(*this, source, resolved, tokens);

  tokens.off = off;
  const bool traced = map || detail::is_recording();
  detail::CacheRollback rollback(source.appends ? source.cache : nullptr);
  auto projected = detail::project_heads(*this, *packed_weights_, tokens,
                                         /*heads_are_passing=*/!traced);
  detail::take_cached_keys(source, *this, resolved.extra_keys, projected);
  const auto& [q, k, v] = projected;
  const auto attention_options = AttentionOptions()
                                     .scale(options.scale())
                                     .softcap(options.softcap())
                                     .sinks(sinks)
                                     .dropout(is_training() ? options.dropout() : 0.0)
                                     .weights(call.weights().value_or(options.weights()))
                                     .weights_after_dropout(options.weights_after_dropout());
  detail::RowStatistics statistics;
  auto [heads_output, maps] =
      detail::attention(q, k, v, resolved, attention_options,
                        /*output_is_passing=*/true, traced ? &statistics : nullptr);
  heads_output = detail::multiply_heads(*this, *packed_weights_, heads_output, tokens.query,
                                        call.head_mask(), off);
  const auto output = detail::project_output(*this, *packed_weights_, heads_output, off);
  if (maps.defined()) maps = maps.to(output.scalar_type());  // half modules may form float32
  const auto result =
      query.dim() == 2
          ? AttentionOutput{output.squeeze(0), maps.defined() ? maps.squeeze(0) : maps}
          : AttentionOutput{options.batch_first() ? output : output.transpose(0, 1), maps};
  // What follows sees only calls that came to their end.
  if (traced) {
    const auto leading = query.dim() == 2 ? std::vector<int64_t>{} : std::vector{sizes.batch};
    auto scoring = detail::scoring_of(attention_options, head_dim());
    // A map outlives steps of an optimizer, which change the parameter in place.
    if (sinks.defined()) scoring.sinks = sinks.clone();
    const auto state = std::make_shared<detail::MapState>(q, k, resolved, std::move(scoring),
                                                          leading, std::move(statistics));
    detail::record_map(*this, AttentionMap(state));
    if (map) *map = state;
  }
  rollback.keep();
  return result;
}

}  // namespace mha
