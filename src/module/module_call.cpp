#include "module/module_call.h"

#include <ATen/ops/arange.h>

#include <utility>
#include <vector>

#include "attention/attention.h"
#include "map/map_recorder.h"
#include "mask/resolved_mask.h"
#include "module/head_factors.h"
#include "module/head_positions.h"
#include "module/head_projections.h"
#include "module/key_source.h"
#include "module/module_checks.h"
#include "module/off_heads.h"
#include "module/unseen_tokens.h"
#include "runtime/given_tensor.h"

namespace mha::detail {
namespace {

// (N, T, E), whatever the layout; undefined as it is.
at::Tensor batch_of(const at::Tensor& given, bool batch_first) {
  const auto tensor = without_lazy_bits(given);
  if (!tensor.defined()) return tensor;
  if (tensor.dim() == 2) return tensor.unsqueeze(0);
  return batch_first ? tensor : tensor.transpose(0, 1);
}

// What is one tensor stays one, so that it is read and conditioned once.
Tokens tokens_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                 bool batch_first) {
  Tokens tokens{batch_of(query, batch_first), {}, {}, {}};
  tokens.key = key.is_same(query) ? tokens.query : batch_of(key, batch_first);
  tokens.value = value.is_same(key) ? tokens.key : batch_of(value, batch_first);
  return tokens;
}

ResolvedMask mask_of(const MultiHeadAttentionImpl& module, const KeySource& source,
                     const at::Tensor& query) {
  const auto& sizes = source.sizes;
  auto mask = resolve(source.mask,
                      {{},
                       sizes.batch,
                       module.options.num_heads(),
                       sizes.queries,
                       sizes.keys,
                       source.offsets,
                       query.scalar_type()},
                      query.device());
  // Ours, so that nobody need check their numbers.
  if (source.lengths.defined()) mask.lengths.push_back(source.lengths);
  mask.extra_keys = appended_keys(module.options);
  return mask;
}

AttentionCall attention_call(const MultiHeadAttentionImpl& module, const CallOptions& call,
                             const at::Tensor& query, Statistics statistics) {
  const auto& options = module.options;
  auto found = call_of(AttentionOptions()
                           .scale(options.scale())
                           .softcap(options.softcap())
                           .sinks(module.sinks)
                           .dropout(module.is_training() ? options.dropout() : 0.0)
                           .weights(call.weights().value_or(options.weights()))
                           .weights_after_dropout(options.weights_after_dropout()),
                       query);
  found.output = Lifetime::passing;  // W_o takes it
  found.statistics = statistics;
  return found;
}

// A map outlives steps of an optimizer, which change the sinks in place.
std::shared_ptr<const MapState> map_of(const Heads& heads, ResolvedMask mask, Scoring scoring,
                                       std::vector<int64_t> leading, RowStatistics statistics) {
  if (scoring.sinks.defined()) scoring.sinks = scoring.sinks.clone();
  return std::make_shared<MapState>(heads.query, heads.key, std::move(mask), std::move(scoring),
                                    std::move(leading), std::move(statistics));
}

}  // namespace

ModuleResult call_module(MultiHeadAttentionImpl& module,
                         const std::shared_ptr<PackedWeights>& cache, const at::Tensor& query,
                         const at::Tensor& key, const at::Tensor& value,
                         const CallOptions& call, MapOfCall wanted) {
  const auto& options = module.options;
  const auto source = find_keys(module, cache, query, key, value, call);
  auto mask = mask_of(module, source, query);
  check_head_mask(call.head_mask(), source.sizes.batch, options.num_heads(), query.device());
  auto tokens = tokens_of(query, source.key, source.value, options.batch_first());
  tokens.off = heads_off(call.head_mask(), query.device());
  tokens.positions = head_positions(options, call, tokens, source.positions);
  drop_unseen_tokens(module, source, mask, tokens);

  const bool traced = wanted == MapOfCall::wanted || is_recording();
  CacheRollback rollback(source.appends ? source.cache : nullptr);
  auto heads =
      project_heads(module, *cache, tokens, traced ? Lifetime::kept : Lifetime::passing);
  take_cached_keys(source, module, mask.extra_keys, heads);
  const auto core = attention_call(module, call, heads.query,
                                   traced ? Statistics::if_formed : Statistics::unwanted);
  const auto attended = attention(heads.query, heads.key, heads.value, mask, core);
  // In place without gradients, so that `attended.output` is not for reading after this.
  const auto factored = multiply_heads(module, *cache, attended.output, tokens.query,
                                       call.head_mask(), tokens.off);
  const auto output = project_output(module, *cache, factored, tokens.off);

  const bool has_batch = query.dim() == 3;
  ModuleResult result;
  result.output = !has_batch              ? output.squeeze(0)
                  : options.batch_first() ? output
                                          : output.transpose(0, 1);
  if (attended.weights.defined()) {
    // Half modules may form float32.
    const auto weights = attended.weights.to(output.scalar_type());
    result.weights = has_batch ? weights : weights.squeeze(0);
  }
  // What follows sees only calls that came to their end.
  if (traced) {
    auto leading = has_batch ? std::vector{source.sizes.batch} : std::vector<int64_t>{};
    const auto map =
        map_of(heads, std::move(mask), core.scoring, std::move(leading), attended.statistics);
    record_map(module, map, heads.value, attended.output);
    if (wanted == MapOfCall::wanted) result.map = map;
  }
  rollback.keep();
  return result;
}

KVCache project_memory(MultiHeadAttentionImpl& module, PackedWeights& cache,
                       const at::Tensor& key, const at::Tensor& given_value,
                       const KVCacheOptions& options) {
  check_module(module);
  KVCache memory(options);
  const at::Tensor& value = given_value.defined() ? given_value : key;
  check_keys(module, key, value);
  auto tokens = tokens_of({}, key, value, module.options.batch_first());
  if (has_positions(module.options)) tokens.positions.key = at::arange(tokens.key.size(1));
  const auto heads = project_heads(module, cache, tokens, Lifetime::passing);
  const auto dtype =
      options.dtype() ? heads.key.scalar_type() : module.W_k->weight.scalar_type();
  memory.append(heads.key.to(dtype), heads.value.to(dtype));
  return memory;
}

}  // namespace mha::detail
