#include "attention/forward_args.h"

#include "runtime/huge_pages.h"
#include "runtime/kernel_rows.h"
#include "runtime/uncomputed.h"

namespace mha::detail {

at::Tensor merged_heads(int64_t n, int64_t h, int64_t t, int64_t d, Lifetime lifetime) {
  return allocated({n, t, h, d}, lifetime).transpose(1, 2);
}

ForwardArgs forward_args(const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const ResolvedMask& mask,
                         const AttentionCall& call, const cpu::Kernels& kernels) {
  ForwardArgs found{
      pack_scores(query, key, mask, call.scoring, kernels), kernel_view(value), {}, {}};
  cpu::AttentionForward& args = found.args;
  static_cast<cpu::FloatScoreArgs&>(args) = found.scores.args;
  args.value_dim = value.size(3);
  found.sinks = float_sinks(call.scoring);
  set_options(call, found.sinks, args);
  args.storage = storage_of(key);
  args.key = stored_rows(found.scores.key);
  args.value = stored_rows(found.value);
  return found;
}

void set_options(const AttentionCall& call, const at::Tensor& sinks,
                 cpu::AttentionForward& args) {
  if (sinks.defined()) args.sinks = sinks.data_ptr<float>();
  args.dropout = kernel_dropout(call);
  args.averaged = call.weights == Weights::averaged;
  args.weights_after_dropout = call.weights_after_dropout;
}

void add_output(Lifetime lifetime, cpu::AttentionForward& args, KernelResult& result) {
  result.output = merged_heads(args.batch, args.heads, args.queries, args.value_dim, lifetime);
  prefer_huge_pages(result.output.data_ptr(), result.output.nbytes());
  args.output = kernel_rows<float>(result.output);
}

void add_weights(Weights wanted, cpu::AttentionForward& args, KernelResult& result) {
  const int64_t n = args.batch, h = args.heads, l = args.queries, s = args.keys;
  if (wanted == Weights::none) return;
  if (wanted == Weights::averaged) {
    result.weights = uncomputed({n, l, s}, at::kFloat);
    args.weights = {result.weights.data_ptr<float>(), l * s, 0, s};
  } else {
    result.weights = uncomputed({n, h, l, s}, at::kFloat);
    args.weights = kernel_rows<float>(result.weights);
  }
  prefer_huge_pages(result.weights.data_ptr(), result.weights.nbytes());
}

void add_statistics(cpu::AttentionForward& args, KernelResult& result) {
  auto& [maximum, factor] = result.statistics;
  maximum = uncomputed({args.batch, args.heads, args.queries}, at::kFloat);
  factor = uncomputed(maximum.sizes(), at::kFloat);
  args.row_maximum = maximum.data_ptr<float>();
  args.row_factor = factor.data_ptr<float>();
}

}  // namespace mha::detail
