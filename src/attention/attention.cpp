#include "attention/attention.h"

#include <ATen/ops/empty.h>

#include <cmath>

#include "attention/fused_attention.h"
#include "attention/plain_blocks.h"
#include "runtime/attention_path.h"

namespace mha::detail {

double default_scale(int64_t head_dim) {
  return 1.0 / std::sqrt(static_cast<double>(head_dim));
}

Scoring scoring_of(const AttentionOptions& options, int64_t head_dim) {
  return {options.scale().value_or(default_scale(head_dim)), options.softcap(),
          options.sinks()};
}

AttentionCall call_of(const AttentionOptions& options, const at::Tensor& query) {
  AttentionCall call{scoring_of(options, query.size(-1)), options.weights(),
                     options.weights_after_dropout(), options.dropout()};
  if (options.dropout() > 0 && query.device().is_cpu()) {
    const auto seed = at::empty({1}, at::kLong).random_();
    call.dropout_seed = static_cast<uint64_t>(seed.item<int64_t>());
  }
  return call;
}

AttentionResult attention(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, const ResolvedMask& mask,
                          const AttentionCall& call) {
  auto followed = added_terms(mask);
  followed.insert(followed.end(), {query, key, value, call.scoring.sinks});
  const auto choice = choose_path(query.device(), query.scalar_type(), query.size(-1),
                                  value.size(-1), is_followed(followed));
  return choice.path == Path::fused ? fused_attention(query, key, value, mask, call)
                                    : plain_attention_in_blocks(query, key, value, mask, call);
}

}  // namespace mha::detail
