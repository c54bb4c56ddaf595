#include "attention/sink_gradient.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/exp2.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "attention/kernel_attention.h"
#include "runtime/finite.h"

namespace mha::detail {

// A sink has weight and no value, so that its score's gradient is -weight * delta in each row,
// where delta, the row sum of weights * their gradients, is grad_output . output.
at::Tensor sink_gradient(const at::Tensor& query, const at::Tensor& key,
                         const KernelResult& result, const at::Tensor& grad_output,
                         const ResolvedMask& mask, const AttentionCall& call) {
  constexpr double log4e = 1.44269504088896341 / 2;
  constexpr double highest = std::numeric_limits<float>::max() * log4e;
  if (key.size(2) == 0) return at::zeros({query.size(1)}, query.options());
  // As in the kernels, for which a sink of -inf is a number too. Of one that is NaN the factor
  // is, in the rows that see a key.
  const auto sinks = call.scoring.sinks.detach();
  const auto score = (sinks.masked_fill(sinks.isnan(), 0) * log4e)
                         .clamp(-highest, highest)
                         .reshape({1, -1, 1});
  const auto weight =
      at::exp2(2 * (score - result.statistics.maximum)) * result.statistics.factor;
  auto delta = (grad_output.to(at::kFloat) * result.output.to(at::kFloat)).sum(-1);
  if (!mask.allows_everything() && may_be_non_finite(grad_output)) {
    // Rows that see nothing are those whose factor is 0 without a sink.
    const auto statistics =
        row_statistics(finite_rows(query), finite_rows(key), mask, {call.scoring.scale});
    delta = delta.masked_fill(statistics.factor.eq(0), 0);
  }
  // In float64, so that the order of ATen's sum leaves no trace in float32.
  return (weight * delta).sum({0, 2}, /*keepdim=*/false, at::kDouble).neg().to(at::kFloat);
}

}  // namespace mha::detail
