#include "attention/kernel_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>

#include <limits>

#include "mask/dense_mask.h"
#include "runtime/finite.h"

namespace mha::detail {
namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

// (H, 1): the sinks that are NaN; undefined: none is.
at::Tensor unknown_sinks(const at::Tensor& sinks) {
  if (!sinks.defined() || !may_be_non_finite(sinks)) return {};
  const auto unknown = sinks.detach().isnan();
  return unknown.any().item<bool>() ? unknown.view({-1, 1}) : at::Tensor();
}

Scoring without_unknown(Scoring scoring, const at::Tensor& unknown) {
  scoring.sinks = scoring.sinks.detach().masked_fill(unknown.squeeze(1), 0);
  return scoring;
}

// The queries (N, H, L) that a sink of NaN reaches: those of its head that see a key.
at::Tensor reached_by(const at::Tensor& unknown, const at::Tensor& query, const at::Tensor& key,
                      const ResolvedMask& mask, Scoring scoring) {
  scoring.sinks = at::Tensor();
  const auto without = row_statistics(query, key.to(at::kFloat), mask, scoring);
  return without.factor.ne(0).logical_and(unknown);
}

// A sink of NaN makes every weight NaN that is not 0 for being blocked. The kernels see 0 in
// its place.
KernelResult with_unknown_sinks(const at::Tensor& unknown, const at::Tensor& query,
                                const at::Tensor& key, const at::Tensor& value,
                                const ResolvedMask& mask, const AttentionCall& call) {
  auto known = call;
  known.scoring = without_unknown(call.scoring, unknown);
  auto result = kernel_attention(query, key, value, mask, known);
  const auto reached = reached_by(unknown, query, key, mask, call.scoring);
  result.output.masked_fill_(reached.unsqueeze(-1), not_a_number);
  if (auto& factor = result.statistics.factor; factor.defined()) {
    factor.masked_fill_(reached, not_a_number);
  }
  if (result.weights.defined()) {
    const auto allowed = allowed_pairs(mask, query.device());
    auto pairs = reached.unsqueeze(-1);
    if (allowed.defined()) pairs = pairs.logical_and(allowed);
    result.weights.masked_fill_(call.weights == Weights::averaged ? pairs.any(1) : pairs,
                                not_a_number);
  }
  return result;
}

// The same for finite values, whose sums are divided by those of the weights at their end and
// may leave the range before.
KernelResult with_lower_sums(KernelResult result, const at::Tensor& query,
                             const at::Tensor& key, const at::Tensor& value,
                             const ResolvedMask& mask, const AttentionCall& call) {
  // Nothing that float16 holds can leave it, and 2^-64 of it is 0.
  if (value.scalar_type() == at::kHalf) return result;
  constexpr double down = 0x1p-64;
  // The dtype stays that of the keys.
  const auto lower = kernel_forward(query, key, value * down, mask, call);
  result.output.copy_(
      at::where(at::isfinite(result.output), result.output, lower.output / down));
  return result;
}

// The kernels see zeros in place of what is not finite in the values, and the queries that may
// attend to it get what it gives afterwards, whatever its weight.
KernelResult with_seen_values(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const ResolvedMask& mask,
                              const AttentionCall& call) {
  const auto finite = at::isfinite(value);
  auto result =
      kernel_forward(query, key, value.masked_fill(finite.logical_not(), 0), mask, call);
  const int64_t group = query.size(1) / value.size(1);
  const auto given = value.masked_fill(finite, 0).to(at::kFloat);
  if (mask.allows_everything()) {
    result.output.add_(given.sum(2, /*keepdim=*/true).repeat_interleave(group, 1));
    return result;
  }
  const auto bad = finite.all(-1).logical_not();
  for (const int64_t j : marked_rows(bad)) {
    // (N, H, L): who sees this value.
    const auto sees =
        open_column(mask, j, query.device())
            .logical_and(bad.select(2, j).repeat_interleave(group, 1).unsqueeze(-1));
    const auto seen = given.select(2, j).repeat_interleave(group, 1).unsqueeze(2);
    result.output.copy_(at::where(sees.unsqueeze(-1), seen + result.output, result.output));
  }
  return result;
}

}  // namespace

// An infinite value, or one of NaN, times a weight of 0, of a blocked pair or underflowed,
// shows as NaN in the output: only then the values are looked at.
KernelResult kernel_attention(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const ResolvedMask& mask,
                              const AttentionCall& call) {
  if (const auto unknown = unknown_sinks(call.scoring.sinks); unknown.defined()) {
    return with_unknown_sinks(unknown, query, key, value, mask, call);
  }
  const auto result = kernel_forward(query, key, value, mask, call);
  if (result.is_finite) return result;
  return may_be_non_finite(value) ? with_seen_values(query, key, value, mask, call)
                                  : with_lower_sums(result, query, key, value, mask, call);
}

// Where pairs are blocked and numbers may be NaN, the kernels see zeros in place of such rows,
// and a factor of NaN makes every weight of the queries that they reach NaN.
std::vector<at::Tensor> kernel_attention_backward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const KernelResult& result, const at::Tensor& grad_output, const ResolvedMask& mask,
    const AttentionCall& call) {
  if (mask.allows_everything() ||
      !(may_be_non_finite(query) || may_be_non_finite(key) || may_be_non_finite(value) ||
        may_be_non_finite(grad_output))) {
    return kernel_backward(query, key, value, result, grad_output, mask, call);
  }
  auto reached =
      row_is_finite(query).logical_and(row_is_finite(grad_output)).logical_not();  // (N, H, L)
  const int64_t group = query.size(1) / key.size(1);
  const auto bad = row_is_finite(key).logical_not();
  for (const int64_t j : marked_rows(bad)) {
    reached = reached.logical_or(
        open_column(mask, j, query.device())
            .logical_and(bad.select(2, j).repeat_interleave(group, 1).unsqueeze(-1)));
  }
  auto marked = result;
  marked.statistics.factor = result.statistics.factor.masked_fill(reached, not_a_number);
  return kernel_backward(finite_rows(query), finite_rows(key), finite_rows(value), marked,
                         finite_rows(grad_output), mask, call);
}

RowStatistics row_statistics(const at::Tensor& query, const at::Tensor& key,
                             const ResolvedMask& mask, const Scoring& scoring) {
  if (const auto unknown = unknown_sinks(scoring.sinks); unknown.defined()) {
    const auto known = row_statistics(query, key, mask, without_unknown(scoring, unknown));
    const auto reached = reached_by(unknown, query, key, mask, scoring);
    return {known.maximum, known.factor.masked_fill(reached, not_a_number)};
  }
  AttentionCall call{scoring};
  call.output = Lifetime::passing;
  call.statistics = Statistics::needed;
  // The output is not wanted, so any values will do: the first column of the keys.
  return kernel_forward(query, key, key.narrow(3, 0, 1), mask, call).statistics;
}

}  // namespace mha::detail
