#include "attention/packed_scores.h"

#include "runtime/cpu_kernels.h"
#include "runtime/kernel_rows.h"

namespace mha::detail {

cpu::ScoreArgs score_args(const at::Tensor& query, const at::Tensor& key,
                          const PackedMask& mask, const Scoring& scoring) {
  cpu::ScoreArgs args;
  args.batch = query.size(0);
  args.heads = query.size(1);
  args.kv_heads = key.size(1);
  args.queries = query.size(2);
  args.keys = key.size(2);
  args.head_dim = query.size(3);
  args.scale = static_cast<float>(scoring.scale);
  args.softcap = static_cast<float>(scoring.softcap);
  args.mask = mask.mask;
  return args;
}

cpu::KernelDropout kernel_dropout(const AttentionCall& call) {
  if (call.dropout == 0) return {};
  const double factor = call.dropout == 1 ? 0 : 1 / (1 - call.dropout);
  return {call.dropout_seed, dropout_threshold(call.dropout), static_cast<float>(factor)};
}

at::Tensor float_sinks(const Scoring& scoring) {
  return scoring.sinks.defined() ? scoring.sinks.detach().to(at::kFloat).contiguous()
                                 : at::Tensor();
}

PackedScores pack_scores(const at::Tensor& query, const at::Tensor& key,
                         const ResolvedMask& mask, const Scoring& scoring,
                         const cpu::Kernels& kernels) {
  PackedScores packed{kernel_view(query), kernel_view(key), pack_mask(mask, kernels), {}};
  static_cast<cpu::ScoreArgs&>(packed.args) =
      score_args(packed.query, packed.key, packed.mask, scoring);
  packed.args.query = kernel_rows<const float>(packed.query);
  return packed;
}

}  // namespace mha::detail
