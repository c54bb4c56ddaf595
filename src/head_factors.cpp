#include "head_factors.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <ostream>
#include <vector>

#include "finite.h"
#include "head_projections.h"

namespace mha {

std::ostream& operator<<(std::ostream& stream, OutputGate gate) {
  switch (gate) {
    case OutputGate::none:
      return stream << "none";
    case OutputGate::per_head:
      return stream << "per_head";
    case OutputGate::elementwise:
      return stream << "elementwise";
  }
  return stream << "?";
}

namespace detail {

void check_head_mask(const at::Tensor& head_mask, int64_t batch, int64_t heads) {
  if (!head_mask.defined()) return;
  TORCH_CHECK(head_mask.is_floating_point(),
              "MultiHeadAttention: head_mask: expected a floating dtype, found ",
              head_mask.scalar_type());
  const bool fits =
      (head_mask.dim() == 1 && head_mask.size(0) == heads) ||
      (head_mask.dim() == 2 && head_mask.size(0) == batch && head_mask.size(1) == heads);
  TORCH_CHECK(fits,
              "MultiHeadAttention: head_mask: expected shape (H) or (N, H) with H = ", heads,
              " and N = ", batch, ", found ", head_mask.sizes());
}

at::Tensor multiply_heads(MultiHeadAttentionImpl& module, PackedWeights& cache,
                          const at::Tensor& heads, const at::Tensor& query,
                          const at::Tensor& head_mask) {
  auto result = heads;
  // What records nothing is this call's own memory.
  const auto multiply = [&](const at::Tensor& factor) {
    const auto same_dtype = factor.to(result.device(), result.scalar_type());
    result = at::GradMode::is_enabled() ? result * same_dtype : result.mul_(same_dtype);
  };
  if (module.options.output_gate() != OutputGate::none) {
    const auto logits = project_gate(module, cache, query);
    const auto gate = at::GradMode::is_enabled() ? logits.sigmoid() : logits.sigmoid_();
    multiply(gate.transpose(1, 2));
  }
  if (head_mask.defined()) {
    const auto factor = head_mask.to(result.device()).unsqueeze(-1).unsqueeze(-1);
    const auto off = factor.eq(0);
    if (off.any().item<bool>() && may_be_non_finite(result)) {  // 0 * NaN is NaN
      result = result.masked_fill(off.logical_and(result.isfinite().logical_not()), 0);
    }
    multiply(factor);
  }
  return result;
}

std::shared_ptr<MultiHeadAttentionImpl> without_heads_off(const MultiHeadAttentionImpl& module,
                                                          const at::Tensor& head_mask) {
  if (!head_mask.defined()) return nullptr;
  auto off = head_mask.detach().eq(0);
  if (off.dim() == 2) off = off.all(0);
  const auto parameters = module.parameters();
  if (!off.any().item<bool>() ||
      std::none_of(parameters.begin(), parameters.end(), may_be_non_finite)) {
    return nullptr;
  }
  off = off.to(module.W_q->weight.device());
  const auto kv_off = off.view({module.num_kv_heads(), -1}).all(1);
  // `heads` are blocks of equal size along `dim`.
  const auto zeroed = [](const at::Tensor& parameter, int64_t dim, const at::Tensor& heads) {
    if (!parameter.defined()) return parameter;
    std::vector<int64_t> shape(static_cast<size_t>(parameter.dim()), 1);
    shape[static_cast<size_t>(dim)] = parameter.size(dim);
    const auto places = heads.repeat_interleave(parameter.size(dim) / heads.size(0));
    return parameter.masked_fill(places.view(shape), 0);
  };
  const auto take = [&](torch::nn::LinearImpl& layer, const torch::nn::LinearImpl& given,
                        const at::Tensor& heads) {
    layer.weight = zeroed(given.weight, 0, heads);
    layer.bias = zeroed(given.bias, 0, heads);
  };
  const auto result = std::make_shared<MultiHeadAttentionImpl>(module.options, Undrawn{});
  take(*result->W_q, *module.W_q, off);
  take(*result->W_k, *module.W_k, kv_off);
  take(*result->W_v, *module.W_v, kv_off);
  if (!module.W_g.is_empty()) take(*result->W_g, *module.W_g, off);
  result->W_o->weight = zeroed(module.W_o->weight, 1, off);
  result->W_o->bias = module.W_o->bias;
  result->sinks = zeroed(module.sinks, 0, off);
  result->bias_k = zeroed(module.bias_k, 2, kv_off);
  result->bias_v = zeroed(module.bias_v, 2, kv_off);
  result->q_norm = module.q_norm;
  result->k_norm = module.k_norm;
  return result;
}

}  // namespace detail
}  // namespace mha
