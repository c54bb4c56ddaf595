#include "attention/attention.h"

#include <ATen/ops/empty.h>

#include <cmath>

#include "attention/fused_attention.h"
#include "attention/plain_attention.h"
#include "runtime/attention_path.h"

namespace mha::detail {
namespace {

AttentionCall resolve_options(const AttentionOptions& options, const at::Tensor& query) {
  AttentionCall call{scoring_of(options, query.size(-1)), options.dropout(), 0,
                     options.weights(), options.weights_after_dropout()};
  if (options.dropout() > 0 && query.device().is_cpu()) {
    const auto seed = at::empty({1}, at::kLong).random_();
    call.dropout_seed = static_cast<uint64_t>(seed.item<int64_t>());
  }
  return call;
}

}  // namespace

double default_scale(int64_t head_dim) {
  return 1.0 / std::sqrt(static_cast<double>(head_dim));
}

Scoring scoring_of(const AttentionOptions& options, int64_t head_dim) {
  return {options.scale().value_or(default_scale(head_dim)), options.softcap(),
          options.sinks()};
}

AttentionOutput attention(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, const ResolvedMask& mask,
                          const AttentionOptions& options, bool output_is_passing,
                          RowStatistics* row_statistics) {
  AttentionCall call = resolve_options(options, query);
  call.output_is_passing = output_is_passing;
  call.row_statistics = row_statistics;
  auto followed = added_terms(mask);
  followed.insert(followed.end(), {query, key, value, options.sinks()});
  const auto choice = choose_path(query.device(), query.scalar_type(), query.size(-1),
                                  value.size(-1), is_followed(followed));
  if (choice.path == Path::fused) {
    return fused_attention(query, key, value, mask, call);
  }
  return plain_attention(query, key, value, mask, call);
}

}  // namespace mha::detail
