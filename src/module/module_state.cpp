// What a module is apart from its calls: its copies, its archives and its text.
#include <mha/multi_head_attention.h>

#include <iomanip>
#include <ostream>

#include "attention/attention.h"
#include "module/archive.h"
#include "module/module_checks.h"
#include "module/registered_members.h"

namespace mha {
namespace {

// For printing, which throws for no options.
template <typename T>
void print(std::ostream& stream, const char* name, const std::optional<T>& value) {
  stream << name;
  if (value) {
    stream << *value;
  } else {
    stream << "none";
  }
}

std::optional<int64_t> head_dim_of(const MultiHeadAttentionOptions& options) {
  if (options.head_dim() || options.num_heads() < 1) return options.head_dim();
  return options.d_model() / options.num_heads();
}

}  // namespace

std::shared_ptr<torch::nn::Module> MultiHeadAttentionImpl::clone(
    const std::optional<at::Device>& device) const {
  detail::check_module(*this);
  const at::Device held = W_q->weight.device(), wanted = device.value_or(held);
  TORCH_CHECK(!held.is_meta() || wanted.is_meta(),
              "MultiHeadAttention: clone: device: expected meta, where the parameters are, "
              "which have no values, found ",
              wanted);
  torch::NoGradGuard no_grad;
  auto copy = std::make_shared<MultiHeadAttentionImpl>(
      MultiHeadAttentionOptions(options).device(wanted), detail::Undrawn{});
  copy->options = options;
  const auto source = named_parameters();
  for (auto& parameter : copy->named_parameters()) {
    const at::Tensor& original = source[parameter.key()];
    parameter.value().set_data(original.to(wanted, original.scalar_type(),
                                           /*non_blocking=*/false, /*copy=*/true));
    parameter.value().set_requires_grad(original.requires_grad());
  }
  copy->train(is_training());
  return copy;
}

void MultiHeadAttentionImpl::save(torch::serialize::OutputArchive& archive) const {
  detail::check_registered(*this);
  torch::nn::Module::save(archive);
}

void MultiHeadAttentionImpl::load(torch::serialize::InputArchive& archive) {
  detail::check_registered(*this);
  detail::load_archive(*this, archive);
}

void MultiHeadAttentionImpl::pretty_print(std::ostream& stream) const {
  const auto size = head_dim_of(options);
  auto scale = options.scale();
  if (!scale && size) scale = detail::default_scale(*size);
  stream << std::boolalpha << "mha::MultiHeadAttention(d_model=" << options.d_model()
         << ", num_heads=" << options.num_heads() << ", num_kv_heads=" << num_kv_heads();
  print(stream, ", head_dim=", size);
  if (options.v_head_dim() && options.v_head_dim() != size) {
    stream << ", v_head_dim=" << *options.v_head_dim();
  }
  stream << ", kdim=" << options.kdim().value_or(options.d_model())
         << ", vdim=" << options.vdim().value_or(options.d_model())
         << ", bias=" << options.bias()
         << ", output_bias=" << options.output_bias().value_or(options.bias())
         << ", dropout=" << options.dropout() << ", add_bias_kv=" << options.add_bias_kv()
         << ", add_zero_attn=" << options.add_zero_attn()
         << ", batch_first=" << options.batch_first();
  print(stream, ", scale=", scale);
  stream << ", softcap=" << options.softcap() << ", sinks=" << options.sinks();
  print(stream, ", rotary=", options.rotary());
  if (options.temperature_tuning()) {
    stream << ", temperature_tuning=" << *options.temperature_tuning();
  }
  if (options.value_scale() != 1) stream << ", value_scale=" << options.value_scale();
  stream << ", qk_norm=" << options.qk_norm();
  if (options.qk_norm() != QKNorm::none) {
    stream << ", qk_norm_eps=" << options.qk_norm_eps()
           << ", qk_norm_bias=" << options.qk_norm_bias()
           << ", qk_norm_scope=" << options.qk_norm_scope()
           << ", qk_norm_gain=" << options.qk_norm_gain()
           << ", qk_norm_order=" << options.qk_norm_order();
  }
  stream << ", output_gate=" << options.output_gate() << ", weights=" << options.weights()
         << ", weights_after_dropout=" << options.weights_after_dropout();
  const bool has_weight = !W_q.is_empty() && W_q->weight.defined();
  stream << ", dtype=" << (has_weight ? c10::toString(W_q->weight.scalar_type()) : "none");
  print(stream, ", device=",
        has_weight ? std::optional(W_q->weight.device()) : std::optional<at::Device>());
  stream << ")" << std::noboolalpha;
}

}  // namespace mha
