#include "module/head_factors.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <ostream>

#include "module/head_projections.h"
#include "runtime/finite.h"
#include "runtime/given_tensor.h"

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

void check_head_mask(const at::Tensor& head_mask, int64_t batch, int64_t heads,
                     at::Device device) {
  if (!head_mask.defined()) return;
  given_tensor({"MultiHeadAttention", "head_mask"}, head_mask, Numbers::floating,
               memory_on(device));
  const bool fits =
      (head_mask.dim() == 1 && head_mask.size(0) == heads) ||
      (head_mask.dim() == 2 && head_mask.size(0) == batch && head_mask.size(1) == heads);
  TORCH_CHECK(fits,
              "MultiHeadAttention: head_mask: expected shape (H) or (N, H) with H = ", heads,
              " and N = ", batch, ", found ", head_mask.sizes());
}

at::Tensor multiply_heads(MultiHeadAttentionImpl& module, PackedWeights& cache,
                          const at::Tensor& heads, const at::Tensor& query,
                          const at::Tensor& head_mask, const at::Tensor& off) {
  auto result = heads;
  // What records nothing is this call's own memory.
  const auto multiply = [&](const at::Tensor& factor) {
    const auto same_dtype = factor.to(result.device(), result.scalar_type());
    result = at::GradMode::is_enabled() ? result * same_dtype : result.mul_(same_dtype);
  };
  const auto off_heads =
      off.defined() ? off.to(result.device()).unsqueeze(-1).unsqueeze(-1) : off;
  const auto clear_off = [&] {  // 0 * NaN is NaN
    if (!off.defined() || !may_be_non_finite(result)) return;
    result = result.masked_fill(off_heads.logical_and(result.isfinite().logical_not()), 0);
  };
  clear_off();
  if (module.options.output_gate() != OutputGate::none) {
    const auto logits = project_gate(module, cache, query, off);
    const auto gate = at::GradMode::is_enabled() ? logits.sigmoid() : logits.sigmoid_();
    multiply(gate.transpose(1, 2));
    clear_off();
  }
  if (head_mask.defined()) {
    if (off.defined() && at::GradMode::is_enabled() && !head_mask.requires_grad()) {
      // Nor may a gradient that overflowed be multiplied by 0.
      result = at::where(off_heads, result.detach(), result);
    }
    multiply(head_mask.to(result.device()).unsqueeze(-1).unsqueeze(-1));
  }
  return result;
}

}  // namespace detail
}  // namespace mha
