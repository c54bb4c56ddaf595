#include <mha/torch_conversion.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <vector>

#include "attention/attention.h"
#include "module/module_checks.h"
#include "runtime/message.h"

namespace mha {
namespace {

// Gives `target` the value, dtype, device and frozen flag of `source`.
void assign(const at::Tensor& target, const at::Tensor& source, bool requires_grad) {
  torch::NoGradGuard no_grad;
  target.set_data(source.detach().clone());
  target.set_requires_grad(requires_grad);
}

// Puts the CPU's random generator back: torch's constructor draws, a conversion should not.
class KeepCpuGenerator {
 public:
  KeepCpuGenerator() : generator_(at::detail::getDefaultCPUGenerator()) {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  ~KeepCpuGenerator() {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    generator_.set_state(state_);
  }
  KeepCpuGenerator(const KeepCpuGenerator&) = delete;
  KeepCpuGenerator& operator=(const KeepCpuGenerator&) = delete;

 private:
  at::Generator generator_;
  at::Tensor state_;
};

// torch's three input projections, packed into one parameter or apart.
struct InputProjections {
  std::vector<at::Tensor> weights;
  bool packed;
};

InputProjections input_projections(const torch::nn::MultiheadAttentionImpl& module) {
  if (module.in_proj_weight.defined() && module.in_proj_weight.numel() > 0) {
    return {module.in_proj_weight.chunk(3), true};
  }
  return {{module.q_proj_weight, module.k_proj_weight, module.v_proj_weight}, false};
}

// Throws unless a parameter of torch's module has the shape that its options say, and the dtype
// and device of the others.
struct TorchParameters {
  const at::Tensor& first;

  void check(const char* name, const at::Tensor& tensor, at::IntArrayRef shape) const {
    TORCH_CHECK(tensor.defined() && tensor.sizes() == shape, "from_torch: ", name,
                ": expected shape ", shape, " by the module's options, found ",
                tensor.defined() ? detail::message(tensor.sizes()) : "none");
    TORCH_CHECK(tensor.scalar_type() == first.scalar_type(), "from_torch: ", name,
                ": expected the dtype of the projections, ", first.scalar_type(), ", found ",
                tensor.scalar_type());
    TORCH_CHECK(tensor.device() == first.device(), "from_torch: ", name,
                ": expected the device of the projections, ", first.device(), ", found ",
                tensor.device());
  }

  void check_if(bool wanted, const char* name, const at::Tensor& tensor,
                at::IntArrayRef shape) const {
    if (wanted) return check(name, tensor, shape);
    TORCH_CHECK(!tensor.defined(), "from_torch: ", name,
                ": expected none by the module's options, found ",
                tensor.defined() ? detail::message(tensor.sizes()) : "none");
  }
};

void check_parameters(const torch::nn::MultiheadAttentionImpl& module) {
  const auto& options = module.options;
  const int64_t e = options.embed_dim();
  TORCH_CHECK(!module.out_proj.is_empty(),
              "from_torch: out_proj: expected a layer, found none");
  const bool packed = module.in_proj_weight.defined() && module.in_proj_weight.numel() > 0;
  const TorchParameters parameters{packed ? module.in_proj_weight : module.q_proj_weight};
  if (packed) {
    parameters.check("in_proj_weight", module.in_proj_weight, {3 * e, e});
    TORCH_CHECK(options.kdim() == e && options.vdim() == e,
                "from_torch: in_proj_weight: expected kdim and vdim of embed_dim = ", e,
                " beside it, found ", options.kdim(), " and ", options.vdim());
  } else {
    TORCH_CHECK(module.q_proj_weight.defined(),
                "from_torch: q_proj_weight: expected it or in_proj_weight, found none");
    parameters.check("q_proj_weight", module.q_proj_weight, {e, e});
    parameters.check("k_proj_weight", module.k_proj_weight, {e, options.kdim()});
    parameters.check("v_proj_weight", module.v_proj_weight, {e, options.vdim()});
  }
  TORCH_CHECK(!parameters.first.is_meta(),
              "from_torch: module: expected parameters with memory, found them on meta");
  parameters.check("out_proj.weight", module.out_proj->weight, {e, e});
  parameters.check_if(options.bias(), "in_proj_bias", module.in_proj_bias, {3 * e});
  parameters.check_if(options.bias(), "out_proj.bias", module.out_proj->bias, {e});
  parameters.check_if(options.add_bias_kv(), "bias_k", module.bias_k, {1, 1, e});
  parameters.check_if(options.add_bias_kv(), "bias_v", module.bias_v, {1, 1, e});
}

void check_expressible(const MultiHeadAttentionOptions& options, int64_t head_dim) {
  TORCH_CHECK(head_dim * options.num_heads() == options.d_model(),
              "to_torch: head_dim: expected d_model / num_heads = ", options.d_model(), " / ",
              options.num_heads(), ", which is all that torch's module has, found ", head_dim);
  TORCH_CHECK(options.v_head_dim().value_or(head_dim) == head_dim && options.value_scale() == 1,
              "to_torch: v_head_dim and value_scale: expected head_dim = ", head_dim,
              " and 1, which is all that torch's module has, found ",
              options.v_head_dim().value_or(head_dim), " and ", options.value_scale());
  TORCH_CHECK(!options.temperature_tuning(),
              "to_torch: temperature_tuning: expected none, since torch's module has none, ",
              "found one");
  TORCH_CHECK(options.num_kv_heads().value_or(options.num_heads()) == options.num_heads(),
              "to_torch: num_kv_heads: expected num_heads = ", options.num_heads(),
              ", which is all that torch's module has, found ",
              options.num_kv_heads().value_or(0));
  TORCH_CHECK(options.output_bias().value_or(options.bias()) == options.bias(),
              "to_torch: output_bias: expected bias = ", options.bias(),
              ", since torch's module has all biases or none, found ", !options.bias());
  TORCH_CHECK(!options.rotary() && options.qk_norm() == QKNorm::none &&
                  options.output_gate() == OutputGate::none,
              "to_torch: rotary, qk_norm and output_gate: expected none, since torch's module "
              "has none, found ",
              options.rotary() ? "rotary" : "no rotary", ", qk_norm ", options.qk_norm(),
              " and output_gate ", options.output_gate());
  const double default_scale = detail::default_scale(head_dim);
  TORCH_CHECK(!options.scale() || *options.scale() == default_scale,
              "to_torch: scale: expected 1 / sqrt(head_dim) = ", default_scale,
              ", which is all that torch's module has, found ", options.scale().value_or(0));
  TORCH_CHECK(options.softcap() == 0,
              "to_torch: softcap: expected 0, since torch's module has none, found ",
              options.softcap());
  TORCH_CHECK(!options.sinks(),
              "to_torch: sinks: expected false, since torch's module has none, found true");
}

}  // namespace

MultiHeadAttention from_torch(const torch::nn::MultiheadAttention& module) {
  TORCH_CHECK(!module.is_empty(), "from_torch: module: expected one, found an empty holder");
  check_parameters(*module);
  const auto& theirs = module->options;
  const auto [weights, packed] = input_projections(*module);
  MultiHeadAttention result(MultiHeadAttentionOptions(theirs.embed_dim(), theirs.num_heads())
                                .kdim(theirs.kdim())
                                .vdim(theirs.vdim())
                                .bias(theirs.bias())
                                .dropout(theirs.dropout())
                                .add_bias_kv(theirs.add_bias_kv())
                                .add_zero_attn(theirs.add_zero_attn())
                                .batch_first(false)
                                .weights(Weights::averaged)
                                .weights_after_dropout(true)
                                .dtype(weights[0].scalar_type())
                                .device(weights[0].device()),
                            detail::Undrawn{});
  const std::vector<torch::nn::Linear> inputs{result->W_q, result->W_k, result->W_v};
  for (size_t i = 0; i < 3; ++i) {
    const bool trained =
        packed ? module->in_proj_weight.requires_grad() : weights[i].requires_grad();
    assign(inputs[i]->weight, weights[i], trained);
  }
  assign(result->W_o->weight, module->out_proj->weight,
         module->out_proj->weight.requires_grad());
  if (theirs.bias()) {
    const auto biases = module->in_proj_bias.chunk(3);
    for (size_t i = 0; i < 3; ++i) {
      assign(inputs[i]->bias, biases[i], module->in_proj_bias.requires_grad());
    }
    assign(result->W_o->bias, module->out_proj->bias, module->out_proj->bias.requires_grad());
  }
  if (theirs.add_bias_kv()) {
    assign(result->bias_k, module->bias_k, module->bias_k.requires_grad());
    assign(result->bias_v, module->bias_v, module->bias_v.requires_grad());
  }
  result->train(module->is_training());
  return result;
}

torch::nn::MultiheadAttention to_torch(const MultiHeadAttention& module) {
  TORCH_CHECK(!module.is_empty(), "to_torch: module: expected one, found an empty holder");
  detail::check_module(*module);
  TORCH_CHECK(!module->W_q->weight.is_meta(),
              "to_torch: module: expected parameters with memory, found them on meta");
  const auto& ours = module->options;
  check_expressible(ours, module->head_dim());
  const KeepCpuGenerator keep_generator;
  torch::nn::MultiheadAttention result(
      torch::nn::MultiheadAttentionOptions(ours.d_model(), ours.num_heads())
          .kdim(ours.kdim().value_or(ours.d_model()))
          .vdim(ours.vdim().value_or(ours.d_model()))
          .bias(ours.bias())
          .dropout(ours.dropout())
          .add_bias_kv(ours.add_bias_kv())
          .add_zero_attn(ours.add_zero_attn()));
  torch::NoGradGuard no_grad;
  const std::vector<torch::nn::Linear> inputs{module->W_q, module->W_k, module->W_v};
  bool any_weight_trained = false, any_bias_trained = false;
  std::vector<at::Tensor> weights, biases;
  for (const auto& linear : inputs) {
    weights.push_back(linear->weight);
    any_weight_trained |= linear->weight.requires_grad();
    if (!ours.bias()) continue;
    biases.push_back(linear->bias);
    any_bias_trained |= linear->bias.requires_grad();
  }
  if (result->_qkv_same_embed_dim) {
    assign(result->in_proj_weight, at::cat(weights), any_weight_trained);
  } else {
    assign(result->q_proj_weight, weights[0], weights[0].requires_grad());
    assign(result->k_proj_weight, weights[1], weights[1].requires_grad());
    assign(result->v_proj_weight, weights[2], weights[2].requires_grad());
  }
  assign(result->out_proj->weight, module->W_o->weight, module->W_o->weight.requires_grad());
  if (ours.bias()) {
    assign(result->in_proj_bias, at::cat(biases), any_bias_trained);
    assign(result->out_proj->bias, module->W_o->bias, module->W_o->bias.requires_grad());
  }
  if (ours.add_bias_kv()) {
    assign(result->bias_k, module->bias_k, module->bias_k.requires_grad());
    assign(result->bias_v, module->bias_v, module->bias_v.requires_grad());
  }
  result->train(module->is_training());
  return result;
}

}  // namespace mha
