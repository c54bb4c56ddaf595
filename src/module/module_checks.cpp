#include "module/module_checks.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <string>
#include <utility>

#include "attention/attention.h"
#include "module/head_norm.h"
#include "module/registered_members.h"
#include "rotary/rotary.h"
#include "runtime/enum_check.h"
#include "runtime/given_tensor.h"
#include "runtime/message.h"
#include "runtime/torch_compat.h"

namespace mha::detail {
namespace {

constexpr int64_t largest_size = int64_t{1} << 40;
constexpr int64_t largest_weight = int64_t{1} << 44;  // 2^47 bytes of float64: an address space

void check_positive(const char* name, int64_t size) {
  TORCH_CHECK(size > 0 && size <= largest_size, "MultiHeadAttentionOptions: ", name,
              ": expected a size from 1 to 2^40, found ", size);
}

// Checks one input against its projection, whose width is `width`.
void check_input(const char* name, const at::Tensor& tensor, int64_t width,
                 const torch::nn::LinearImpl& projection) {
  TORCH_CHECK(tensor.defined(), "MultiHeadAttention: ", name,
              ": expected a tensor, found an undefined one; leave out both key "
              "and value for "
              "self-attention");
  const at::Tensor& weight = projection.weight;
  TORCH_CHECK(tensor.scalar_type() == weight.scalar_type() ||
                  (is_floating_dtype(tensor.scalar_type()) &&
                   torch_compat::autocast_enabled(tensor.device().type())),
              "MultiHeadAttention: ", name, ": expected the dtype of the parameters, ",
              weight.scalar_type(), ", found ", tensor.scalar_type());
  given_tensor({"MultiHeadAttention", name}, tensor, Numbers::floating, Memory::or_meta);
  TORCH_CHECK(tensor.dim() == 2 || tensor.dim() == 3, "MultiHeadAttention: ", name,
              ": expected 3 dimensions, or 2 without a batch, found ", tensor.dim(), " in ",
              tensor.sizes());
  TORCH_CHECK(tensor.size(-1) == width, "MultiHeadAttention: ", name, ": expected width ",
              width, " in the last dimension, found ", tensor.size(-1), " in ", tensor.sizes());
  TORCH_CHECK(tensor.device() == weight.device(), "MultiHeadAttention: ", name,
              ": expected the device of the parameters, ", weight.device(), ", found ",
              tensor.device());
}

}  // namespace

void check_options(const MultiHeadAttentionOptions& options) {
  check_positive("d_model", options.d_model());
  check_positive("num_heads", options.num_heads());
  if (options.head_dim()) {
    check_positive("head_dim", *options.head_dim());
    TORCH_CHECK(*options.head_dim() <= largest_size / options.num_heads(),
                "MultiHeadAttentionOptions: head_dim: expected num_heads * "
                "head_dim up to 2^40, "
                "found ",
                options.num_heads(), " * ", *options.head_dim());
  } else {
    TORCH_CHECK(options.d_model() % options.num_heads() == 0,
                "MultiHeadAttentionOptions: num_heads: expected a divisor of "
                "d_model = ",
                options.d_model(), ", found ", options.num_heads(),
                "; set head_dim to choose the head size freely");
  }
  if (options.v_head_dim()) {
    check_positive("v_head_dim", *options.v_head_dim());
    TORCH_CHECK(*options.v_head_dim() <= largest_size / options.num_heads(),
                "MultiHeadAttentionOptions: v_head_dim: expected num_heads * v_head_dim up to "
                "2^40, found ",
                options.num_heads(), " * ", *options.v_head_dim());
  }
  if (options.num_kv_heads()) {
    check_positive("num_kv_heads", *options.num_kv_heads());
    TORCH_CHECK(options.num_heads() % *options.num_kv_heads() == 0,
                "MultiHeadAttentionOptions: num_kv_heads: expected a divisor of num_heads = ",
                options.num_heads(), ", found ", *options.num_kv_heads());
  }
  if (options.kdim()) check_positive("kdim", *options.kdim());
  if (options.vdim()) check_positive("vdim", *options.vdim());
  const int64_t inner =
      options.head_dim() ? options.num_heads() * *options.head_dim() : options.d_model();
  const int64_t merged = options.num_heads() * options.v_head_dim().value_or(1);
  for (const auto& [name, width] : {std::pair{"d_model", options.d_model()},
                                    std::pair{"vdim", options.vdim().value_or(1)}}) {
    TORCH_CHECK(width <= largest_weight / merged, "MultiHeadAttentionOptions: v_head_dim: ",
                "expected weights of up to 2^44 numbers, found ", name,
                " * num_heads * v_head_dim = ", width, " * ", merged);
  }
  for (const auto& [name, width] :
       {std::pair{"d_model", options.d_model()}, std::pair{"kdim", options.kdim().value_or(1)},
        std::pair{"vdim", options.vdim().value_or(1)}}) {
    TORCH_CHECK(width <= largest_weight / inner, "MultiHeadAttentionOptions: ", name,
                ": expected weights of up to 2^44 numbers, found ", width,
                " * num_heads * head_dim = ", width, " * ", inner);
  }
  TORCH_CHECK(options.dropout() >= 0 && options.dropout() <= 1,
              "MultiHeadAttentionOptions: dropout: expected a probability in "
              "[0, 1], found ",
              options.dropout());
  TORCH_CHECK(!options.scale() || std::isfinite(*options.scale()),
              "MultiHeadAttentionOptions: scale: expected a finite number, found ",
              options.scale().value_or(0));
  TORCH_CHECK(is_softcap(options.softcap()), "MultiHeadAttentionOptions: softcap: expected ",
              softcap_range, ", found ", options.softcap());
  if (options.rotary()) {
    check_rotary(*options.rotary(),
                 options.head_dim().value_or(options.d_model() / options.num_heads()));
  }
  if (const auto& tuning = options.temperature_tuning()) {
    TORCH_CHECK(std::isfinite(tuning->scale()),
                "TemperatureTuning: scale: expected a finite number, found ", tuning->scale());
    TORCH_CHECK(tuning->floor_scale() > 0,
                "TemperatureTuning: floor_scale: expected a number above 0, found ",
                tuning->floor_scale());
    TORCH_CHECK(tuning->offset() >= 0,
                "TemperatureTuning: offset: expected a number of at least 0, found ",
                tuning->offset());
  }
  TORCH_CHECK(std::isfinite(options.value_scale()),
              "MultiHeadAttentionOptions: value_scale: expected a finite number, found ",
              options.value_scale());
  TORCH_CHECK(
      std::isfinite(options.qk_norm_eps()) && options.qk_norm_eps() > 0,
      "MultiHeadAttentionOptions: qk_norm_eps: expected a finite number above 0, found ",
      options.qk_norm_eps());
  const char* subject = "MultiHeadAttentionOptions";
  check_enum({subject, "qk_norm"}, options.qk_norm(), QKNorm::layer, "none, rms or layer");
  check_enum({subject, "qk_norm_scope"}, options.qk_norm_scope(), QKNormScope::all_heads,
             "head or all_heads");
  check_enum({subject, "qk_norm_gain"}, options.qk_norm_gain(), QKNormGain::none,
             "elementwise, per_head or none");
  check_enum({subject, "qk_norm_order"}, options.qk_norm_order(), QKNormOrder::after_rotary,
             "before_rotary or after_rotary");
  check_enum({subject, "output_gate"}, options.output_gate(), OutputGate::elementwise,
             "none, per_head or elementwise");
  check_enum({subject, "weights"}, options.weights(), Weights::per_head,
             "none, averaged or per_head");
  TORCH_CHECK(!options.qk_norm_bias() || options.qk_norm() == QKNorm::layer,
              "MultiHeadAttentionOptions: qk_norm_bias: expected qk_norm to be layer, found ",
              options.qk_norm());
  TORCH_CHECK(!options.qk_norm_bias() || options.qk_norm_gain() != QKNormGain::none,
              "MultiHeadAttentionOptions: qk_norm_bias: expected a gain beside it, found "
              "qk_norm_gain none");
  TORCH_CHECK(options.qk_norm_scope() == QKNormScope::head ||
                  options.qk_norm_gain() != QKNormGain::per_head,
              "MultiHeadAttentionOptions: qk_norm_gain: expected elementwise or none with "
              "qk_norm_scope all_heads, found per_head");
  TORCH_CHECK(!options.dtype() || is_floating_dtype(*options.dtype()),
              "MultiHeadAttentionOptions: dtype: expected a floating dtype (float32, float64, "
              "bfloat16 or float16), found ",
              options.dtype().value_or(at::kFloat));
}

namespace {

// That all parameters go together: the layers' have one dtype, all are on one device.
void check_types(const MultiHeadAttentionImpl& module) {
  const at::Tensor& first = module.W_q->weight;
  const auto like_first = [&](const at::Tensor& parameter) {
    return !parameter.defined() ||
           (parameter.dtype() == first.dtype() && parameter.device() == first.device() &&
            is_plain_memory(parameter));
  };
  const auto layer_like_first = [&](const torch::nn::Linear& layer) {
    return layer.is_empty() || (like_first(layer->weight) && like_first(layer->bias));
  };
  const bool all_alike = layer_like_first(module.W_q) && layer_like_first(module.W_k) &&
                         layer_like_first(module.W_v) && layer_like_first(module.W_o) &&
                         layer_like_first(module.W_g) && like_first(module.bias_k) &&
                         like_first(module.bias_v) && like_first(module.sinks) &&
                         like_first(module.q_norm) && like_first(module.k_norm) &&
                         like_first(module.q_norm_bias) && like_first(module.k_norm_bias);
  if (all_alike && is_floating_dtype(first.scalar_type())) return;
  const auto check = [&](const char* name, const at::Tensor& parameter, bool of_layer) {
    if (!parameter.defined()) return;
    const auto dtype = parameter.scalar_type();
    TORCH_CHECK(is_floating_dtype(dtype), "MultiHeadAttention: ", name,
                ": expected a floating dtype (float32, float64, "
                "bfloat16 or float16), found ",
                dtype);
    TORCH_CHECK(!of_layer || dtype == first.scalar_type(), "MultiHeadAttention: ", name,
                ": expected the dtype of W_q.weight, ", first.scalar_type(), ", found ", dtype);
    TORCH_CHECK(parameter.device() == first.device(), "MultiHeadAttention: ", name,
                ": expected the device of W_q.weight, ", first.device(), ", found ",
                parameter.device());
    if (parameter.is_meta()) return;
    given_tensor({"MultiHeadAttention", name}, parameter, Numbers::floating);
    TORCH_CHECK(!parameter.is_neg(), "MultiHeadAttention: ", name,
                ": expected its numbers in memory, found their negatives; set the tensor's "
                "resolve_neg()");
  };
  const auto check_layer = [&](const char* weight_name, const char* bias_name,
                               const torch::nn::Linear& layer) {
    check(weight_name, layer->weight, true);
    check(bias_name, layer->bias, true);
  };
  check_layer("W_q.weight", "W_q.bias", module.W_q);
  check_layer("W_k.weight", "W_k.bias", module.W_k);
  check_layer("W_v.weight", "W_v.bias", module.W_v);
  check_layer("W_o.weight", "W_o.bias", module.W_o);
  if (!module.W_g.is_empty()) check_layer("W_g.weight", "W_g.bias", module.W_g);
  check("bias_k", module.bias_k, false);
  check("bias_v", module.bias_v, false);
  check("sinks", module.sinks, false);
  check("q_norm", module.q_norm, false);
  check("k_norm", module.k_norm, false);
  check("q_norm_bias", module.q_norm_bias, false);
  check("k_norm_bias", module.k_norm_bias, false);
}

}  // namespace

void check_module(const MultiHeadAttentionImpl& module) {
  const auto& options = module.options;
  check_options(options);
  check_has_layers(module);
  const int64_t d_model = options.d_model(), heads = options.num_heads(), d = module.head_dim();
  const int64_t inner = heads * d, kv_inner = module.num_kv_heads() * d;
  const int64_t dv = module.v_head_dim(), merged = heads * dv,
                v_inner = module.num_kv_heads() * dv;
  const auto check = [&](const char* name, const at::Tensor& parameter, at::IntArrayRef shape) {
    TORCH_CHECK(parameter.defined() && parameter.sizes() == shape, "MultiHeadAttention: ", name,
                ": expected shape ", shape, " by the options (d_model ", d_model,
                ", num_heads ", heads, ", num_kv_heads ", module.num_kv_heads(), ", head_dim ",
                d, dv == d ? "" : ", v_head_dim " + std::to_string(dv), "), found ",
                parameter.defined() ? message(parameter.sizes()) : "none",
                "; sizes are for the constructor to set");
  };
  const auto check_if = [&](bool wanted, const char* name, const at::Tensor& parameter,
                            at::IntArrayRef shape) {
    if (wanted) return check(name, parameter, shape);
    TORCH_CHECK(!parameter.defined(), "MultiHeadAttention: ", name,
                ": expected none by the options, found ", parameter.sizes(),
                "; parameters are for the constructor to register");
  };
  const auto check_layer = [&](const char* weight_name, const char* bias_name,
                               const torch::nn::Linear& layer, int64_t out, int64_t in,
                               bool bias) {
    check(weight_name, layer->weight, {out, in});
    check_if(bias, bias_name, layer->bias, {out});
  };
  const bool bias = options.bias(), output_bias = options.output_bias().value_or(bias);
  const int64_t kdim = options.kdim().value_or(d_model),
                vdim = options.vdim().value_or(d_model);
  check_layer("W_q.weight", "W_q.bias", module.W_q, inner, d_model, bias);
  check_layer("W_k.weight", "W_k.bias", module.W_k, kv_inner, kdim, bias);
  check_layer("W_v.weight", "W_v.bias", module.W_v, v_inner, vdim, bias);
  check_layer("W_o.weight", "W_o.bias", module.W_o, d_model, merged, output_bias);
  check_if(options.add_bias_kv(), "bias_k", module.bias_k, {1, 1, kv_inner});
  check_if(options.add_bias_kv(), "bias_v", module.bias_v, {1, 1, v_inner});
  check_if(options.sinks(), "sinks", module.sinks, {heads});
  const auto of_queries = gain_shape(options, heads, d),
             of_keys = gain_shape(options, module.num_kv_heads(), d);
  check_if(!of_queries.empty(), "q_norm", module.q_norm, of_queries);
  check_if(!of_keys.empty(), "k_norm", module.k_norm, of_keys);
  check_if(options.qk_norm_bias(), "q_norm_bias", module.q_norm_bias, of_queries);
  check_if(options.qk_norm_bias(), "k_norm_bias", module.k_norm_bias, of_keys);
  const bool gated = options.output_gate() != OutputGate::none;
  TORCH_CHECK(gated != module.W_g.is_empty(), "MultiHeadAttention: W_g: expected ",
              gated ? "a layer" : "none", " by output_gate ", options.output_gate(), ", found ",
              gated ? "none" : "one", "; set it before the module is made");
  if (gated) {
    const bool per_head = options.output_gate() == OutputGate::per_head;
    check_layer("W_g.weight", "W_g.bias", module.W_g, per_head ? heads : merged, d_model, bias);
  }
  check_registered(module);
  check_types(module);
}

InputSizes check_query(const MultiHeadAttentionImpl& module, const at::Tensor& query) {
  check_input("query", query, module.options.d_model(), *module.W_q);
  if (query.dim() == 2) return {1, query.size(0), 0};
  const bool batch_first = module.options.batch_first();
  return {query.size(batch_first ? 0 : 1), query.size(batch_first ? 1 : 0), 0};
}

void check_keys(const MultiHeadAttentionImpl& module, const at::Tensor& key,
                const at::Tensor& value) {
  const auto& options = module.options;
  check_input("key", key, options.kdim().value_or(options.d_model()), *module.W_k);
  check_input("value", value, options.vdim().value_or(options.d_model()), *module.W_v);
  TORCH_CHECK(value.sizes().slice(0, value.dim() - 1) == key.sizes().slice(0, key.dim() - 1),
              "MultiHeadAttention: value: expected the batch size and length of key ",
              key.sizes(), ", found ", value.sizes());
}

InputSizes check_inputs(const MultiHeadAttentionImpl& module, const at::Tensor& query,
                        const at::Tensor& key, const at::Tensor& value) {
  const auto& options = module.options;
  check_input("query", query, options.d_model(), *module.W_q);
  check_input("key", key, options.kdim().value_or(options.d_model()), *module.W_k);
  check_input("value", value, options.vdim().value_or(options.d_model()), *module.W_v);
  const bool batch_first = options.batch_first();
  const bool batched = query.dim() == 3;
  for (const auto& [name, tensor] : {std::pair{"key", key}, std::pair{"value", value}}) {
    TORCH_CHECK(tensor.dim() == query.dim(), "MultiHeadAttention: ", name, ": expected ",
                query.dim(), " dimensions like query ", query.sizes(), ", found ",
                tensor.sizes());
  }
  const int64_t batch_dim = batch_first ? 0 : 1;
  const int64_t length_dim = batched && batch_first ? 1 : 0;
  const char* layout = batch_first ? "batch first" : "sequence first";
  if (batched) {
    const int64_t n = query.size(batch_dim);
    TORCH_CHECK(key.size(batch_dim) == n && value.size(batch_dim) == n,
                "MultiHeadAttention: key and value: expected the batch size of query, ", n,
                ", found ", key.size(batch_dim), " and ", value.size(batch_dim), " (", layout,
                "; query ", query.sizes(), ", key ", key.sizes(), ", value ", value.sizes(),
                ")");
  }
  TORCH_CHECK(key.size(length_dim) == value.size(length_dim),
              "MultiHeadAttention: value: expected the length of key, ", key.size(length_dim),
              ", found ", value.size(length_dim), " (", layout, "; key ", key.sizes(),
              ", value ", value.sizes(), ")");
  return {batched ? query.size(batch_dim) : 1, query.size(length_dim), key.size(length_dim)};
}

}  // namespace mha::detail
