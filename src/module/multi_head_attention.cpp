#include <mha/multi_head_attention.h>

#include <ATen/ops/empty.h>
#include <torch/nn/init.h>

#include <utility>

#include "module/head_norm.h"
#include "module/module_call.h"
#include "module/module_checks.h"
#include "module/packed_weight.h"
#include "module/registered_members.h"

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

int64_t MultiHeadAttentionImpl::v_head_dim() const {
  return options.v_head_dim() ? *options.v_head_dim() : head_dim();
}

int64_t MultiHeadAttentionImpl::num_kv_heads() const {
  return options.num_kv_heads().value_or(options.num_heads());
}

void MultiHeadAttentionImpl::reset() {
  detail::check_options(options);
  const int64_t d_model = options.d_model(), inner = options.num_heads() * head_dim();
  const int64_t kv_inner = num_kv_heads() * head_dim();
  const int64_t v_inner = num_kv_heads() * v_head_dim(),
                merged = options.num_heads() * v_head_dim();
  const bool bias = options.bias(), output_bias = options.output_bias().value_or(bias);
  const int64_t kdim = options.kdim().value_or(d_model),
                vdim = options.vdim().value_or(d_model);
  W_q = register_module("W_q", undrawn_linear(d_model, inner, bias, options));
  W_k = register_module("W_k", undrawn_linear(kdim, kv_inner, bias, options));
  W_v = register_module("W_v", undrawn_linear(vdim, v_inner, bias, options));
  W_o = register_module("W_o", undrawn_linear(merged, d_model, output_bias, options));
  if (options.add_bias_kv()) {
    bias_k = register_parameter("bias_k", at::empty({1, 1, kv_inner}, tensor_options(options)));
    bias_v = register_parameter("bias_v", at::empty({1, 1, v_inner}, tensor_options(options)));
  }
  if (options.sinks()) {
    sinks =
        register_parameter("sinks", at::empty({options.num_heads()}, tensor_options(options)));
  }
  const auto of_queries = detail::gain_shape(options, options.num_heads(), head_dim()),
             of_keys = detail::gain_shape(options, num_kv_heads(), head_dim());
  if (!of_queries.empty()) {
    q_norm = register_parameter("q_norm", at::empty(of_queries, tensor_options(options)));
    k_norm = register_parameter("k_norm", at::empty(of_keys, tensor_options(options)));
  }
  if (options.qk_norm_bias()) {
    q_norm_bias =
        register_parameter("q_norm_bias", at::empty(of_queries, tensor_options(options)));
    k_norm_bias =
        register_parameter("k_norm_bias", at::empty(of_keys, tensor_options(options)));
  }
  if (options.output_gate() != OutputGate::none) {
    const bool per_head = options.output_gate() == OutputGate::per_head;
    W_g = register_module(
        "W_g", undrawn_linear(d_model, per_head ? options.num_heads() : merged, bias, options));
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
  if (q_norm.defined()) {
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
  const auto result = detail::call_module(*this, packed_weights_, query, key, value,
                                          CallOptions(mask).weights(weights));
  return {result.output, result.weights};
}

AttentionOutput MultiHeadAttentionImpl::attend(const at::Tensor& query, const at::Tensor& key,
                                               const at::Tensor& value,
                                               const CallOptions& call) {
  const auto result = detail::call_module(*this, packed_weights_, query, key, value, call);
  return {result.output, result.weights};
}

TracedAttention MultiHeadAttentionImpl::trace(const at::Tensor& query, const at::Tensor& key,
                                              const at::Tensor& value,
                                              const CallOptions& call) {
  const auto without_weights = CallOptions(call).weights(Weights::none);
  auto result = detail::call_module(*this, packed_weights_, query, key, value, without_weights,
                                    detail::MapOfCall::wanted);
  return {result.output, AttentionMap(std::move(result.map))};
}

KVCache MultiHeadAttentionImpl::project_keys(const at::Tensor& key, const at::Tensor& value,
                                             const KVCacheOptions& cache_options) {
  return detail::project_memory(*this, *packed_weights_, key, value, cache_options);
}

}  // namespace mha
