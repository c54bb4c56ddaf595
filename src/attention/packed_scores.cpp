#include "attention/packed_scores.h"

#include "runtime/kernel_rows.h"

namespace mha::detail {

PackedScores pack_scores(const at::Tensor& query, const at::Tensor& key,
                         const ResolvedMask& mask, const Scoring& scoring,
                         const cpu::Kernels& kernels) {
  PackedScores packed{kernel_view(query), kernel_view(key), pack_mask(mask, kernels), {}};
  const auto &q = packed.query, &k = packed.key;
  cpu::ScoreArgs& args = packed.args;
  args.batch = q.size(0);
  args.heads = q.size(1);
  args.kv_heads = k.size(1);
  args.queries = q.size(2);
  args.keys = k.size(2);
  args.head_dim = q.size(3);
  args.scale = static_cast<float>(scoring.scale);
  args.softcap = static_cast<float>(scoring.softcap);
  args.query = kernel_rows<const float>(q);
  args.mask = packed.mask.mask;
  return packed;
}

}  // namespace mha::detail
