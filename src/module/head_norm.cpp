#include "module/head_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/layer_norm.h>

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

namespace detail {

at::Tensor normalise(const at::Tensor& heads, const HeadNorm& norm) {
  const auto compute = heads.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto x = heads.to(compute), factor = norm.gain.to(compute);
  const auto added = norm.bias.defined() ? norm.bias.to(compute) : at::Tensor();
  if (norm.kind == QKNorm::layer) {
    return at::layer_norm(x, {x.size(3)}, factor, added, norm.eps).to(heads.scalar_type());
  }
  const auto mean_square = x.square().mean(3, /*keepdim=*/true);
  return (x * (mean_square + norm.eps).rsqrt() * factor).to(heads.scalar_type());
}

void normalise_in_place(const at::Tensor& heads, const HeadNorm& norm) {
  const cpu::Kernels& kernels = cpu_kernels();
  const auto factor = norm.gain.to(at::kFloat).contiguous();
  const auto added = norm.bias.defined() ? norm.bias.to(at::kFloat).contiguous() : at::Tensor();
  const cpu::NormArgs args{heads.size(0),
                           heads.size(1),
                           heads.size(2),
                           heads.size(3),
                           kernel_rows<float>(heads),
                           factor.data_ptr<float>(),
                           added.defined() ? added.data_ptr<float>() : nullptr,
                           static_cast<float>(norm.eps),
                           norm.kind == QKNorm::layer};
  const int64_t chunks = (args.tokens + kernels.norm_tokens - 1) / kernels.norm_tokens;
  run_tasks(args.batch * chunks, 1, [&](int64_t i, float*) { kernels.normalise(args, i); });
}

}  // namespace detail
}  // namespace mha
