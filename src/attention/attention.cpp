#include "attention/attention.h"

#include <ATen/ops/empty.h>

#include <cmath>

#include "attention/fused_attention.h"
#include "attention/plain_blocks.h"
#include "attention/torch_attention.h"
#include "attention/torch_blocks.h"
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

namespace {

// The form is that of a choice of LibTorch's path.
struct FormChoice {
  PathChoice choice;
  TorchForm form;
};

FormChoice chosen_form(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       const ResolvedMask& mask, const AttentionCall& call) {
  auto followed = added_terms(mask);
  followed.insert(followed.end(), {query, key, value, call.scoring.sinks});
  const auto choice = choose_path(query.device(), query.scalar_type(), query.size(-1),
                                  value.size(-1), is_followed(followed));
  if (choice.path != Path::torch) return {choice, {}};
  const auto form = torch_form(query, key, value, mask, call);
  if (form.refusal) return {{Path::plain, form.refusal}, form};
  return {choice, form};
}

}  // namespace

PathChoice attention_path(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, const ResolvedMask& mask,
                          const AttentionCall& call) {
  return chosen_form(query, key, value, mask, call).choice;
}

AttentionResult attention(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, const ResolvedMask& mask,
                          const AttentionCall& call) {
  const auto [choice, form] = chosen_form(query, key, value, mask, call);
  switch (choice.path) {
    case Path::fused:
      return fused_attention(query, key, value, mask, call);
    case Path::torch:
      return form.block_queries > 0
                 ? torch_attention_in_blocks(query, key, value, mask, call, form)
                 : torch_attention(query, key, value, mask, call, form);
    case Path::plain:
      break;
  }
  return plain_attention_in_blocks(query, key, value, mask, call);
}

}  // namespace mha::detail
