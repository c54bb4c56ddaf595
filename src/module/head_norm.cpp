#include "module/head_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/ones.h>

#include <ostream>

#include "runtime/cpu_kernels.h"
#include "runtime/kernel_rows.h"
#include "runtime/run_tasks.h"

namespace mha {

std::ostream& operator<<(std::ostream& stream, QKNorm norm) {
  switch (norm) {
    case QKNorm::none:
      return stream << "none";
    case QKNorm::rms:
      return stream << "rms";
    case QKNorm::layer:
      return stream << "layer";
  }
  return stream << "?";
}

std::ostream& operator<<(std::ostream& stream, QKNormScope scope) {
  switch (scope) {
    case QKNormScope::head:
      return stream << "head";
    case QKNormScope::all_heads:
      return stream << "all_heads";
  }
  return stream << "?";
}

std::ostream& operator<<(std::ostream& stream, QKNormGain gain) {
  switch (gain) {
    case QKNormGain::elementwise:
      return stream << "elementwise";
    case QKNormGain::per_head:
      return stream << "per_head";
    case QKNormGain::none:
      return stream << "none";
  }
  return stream << "?";
}

std::ostream& operator<<(std::ostream& stream, QKNormOrder order) {
  switch (order) {
    case QKNormOrder::before_rotary:
      return stream << "before_rotary";
    case QKNormOrder::after_rotary:
      return stream << "after_rotary";
  }
  return stream << "?";
}

namespace detail {
namespace {

// Over the last dimension of x, which gain and bias go with.
at::Tensor normalise_last(const at::Tensor& x, const HeadNorm& norm, const at::Tensor& gain,
                          const at::Tensor& bias) {
  at::Tensor result;
  if (norm.kind == QKNorm::layer) {
    const bool is_of_rows = !gain.defined() || gain.dim() == 1;
    if (is_of_rows) return at::layer_norm(x, {x.size(-1)}, gain, bias, norm.eps);
    result = at::layer_norm(x, {x.size(-1)}, {}, {}, norm.eps);
  } else {
    result = x * (x.square().mean(-1, /*keepdim=*/true) + norm.eps).rsqrt();
  }
  if (gain.defined()) result = result * gain;
  return bias.defined() ? result + bias : result;
}

// Rows (N, H, T, D) by the kernel, with one gain (D) for all.
void normalise_by_kernel(const at::Tensor& rows, const HeadNorm& norm, const at::Tensor& gain,
                         const at::Tensor& bias) {
  const cpu::Kernels& kernels = cpu_kernels();
  const cpu::NormArgs args{rows.size(0),
                           rows.size(1),
                           rows.size(2),
                           rows.size(3),
                           kernel_rows<float>(rows),
                           gain.data_ptr<float>(),
                           bias.defined() ? bias.data_ptr<float>() : nullptr,
                           static_cast<float>(norm.eps),
                           norm.kind == QKNorm::layer};
  const int64_t chunks = (args.tokens + kernels.norm_tokens - 1) / kernels.norm_tokens;
  run_tasks(args.batch * chunks, 1, [&](int64_t i, float*) { kernels.normalise(args, i); });
}

HeadNorm norm_of(const MultiHeadAttentionImpl& module, const at::Tensor& gain,
                 const at::Tensor& bias) {
  const auto& options = module.options;
  return {options.qk_norm(), options.qk_norm_scope(), options.qk_norm_eps(), gain, bias};
}

}  // namespace

HeadNorm query_norm(const MultiHeadAttentionImpl& module) {
  return norm_of(module, module.q_norm, module.q_norm_bias);
}

HeadNorm key_norm(const MultiHeadAttentionImpl& module) {
  return norm_of(module, module.k_norm, module.k_norm_bias);
}

std::vector<int64_t> gain_shape(const MultiHeadAttentionOptions& options, int64_t heads,
                                int64_t head_dim) {
  if (options.qk_norm() == QKNorm::none || options.qk_norm_gain() == QKNormGain::none)
    return {};
  if (options.qk_norm_gain() == QKNormGain::per_head) return {heads, head_dim};
  return {options.qk_norm_scope() == QKNormScope::all_heads ? heads * head_dim : head_dim};
}

at::Tensor normalise(const at::Tensor& heads, const HeadNorm& norm) {
  const auto compute = heads.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto converted = [&](const at::Tensor& parameter) {
    if (!parameter.defined()) return parameter;
    const auto wide = parameter.to(compute);
    return wide.dim() == 2 ? wide.unsqueeze(1) : wide;  // (H, 1, D)
  };
  const auto x = heads.to(compute), gain = converted(norm.gain), bias = converted(norm.bias);
  if (norm.scope == QKNormScope::head) {
    return normalise_last(x, norm, gain, bias).to(heads.scalar_type());
  }
  return normalise_last(x.transpose(1, 2).flatten(2), norm, gain, bias)
      .unflatten(2, {x.size(1), x.size(3)})
      .transpose(1, 2)
      .to(heads.scalar_type());
}

void normalise_in_place(const at::Tensor& heads, const HeadNorm& norm) {
  if (norm.scope == QKNormScope::all_heads) {
    heads.copy_(normalise(heads, norm));
    return;
  }
  const auto converted = [](const at::Tensor& parameter) {
    return parameter.defined() ? parameter.to(at::kFloat).contiguous() : parameter;
  };
  const auto bias = converted(norm.bias), gain = norm.gain.defined()
                                                     ? converted(norm.gain)
                                                     : at::ones({heads.size(3)}, at::kFloat);
  if (gain.dim() == 1) return normalise_by_kernel(heads, norm, gain, bias);
  for (int64_t h = 0; h < heads.size(1); ++h) {
    normalise_by_kernel(heads.narrow(1, h, 1), norm, gain[h],
                        bias.defined() ? bias[h] : at::Tensor());
  }
}

}  // namespace detail
}  // namespace mha
