#include "module/key_source.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <utility>

#include "module/head_projections.h"
#include "runtime/constant.h"
#include "runtime/enum_check.h"

namespace mha::detail {
namespace {

// Positions, padding and window of a call that appends to a cache.
void add_cache_mask(const AppendPlan& plan, std::optional<int64_t> window, int64_t new_keys,
                    at::Device device, KeySource& source) {
  if (window) source.mask = source.mask & Mask::window(*window - 1, -1);
  if (plan.aligned) return;
  auto first_queries = plan.offsets, lengths = plan.offsets, real_queries = plan.added;
  for (size_t i = 0; i < lengths.size(); ++i) {
    first_queries[i] += new_keys - source.sizes.queries;
    real_queries[i] -= new_keys - source.sizes.queries;
    lengths[i] += plan.added[i];
  }
  source.lengths = constant(lengths).to(device);
  source.offsets = constant(first_queries).to(device);
  source.real_queries = constant(real_queries).to(device);
}

bool differ(const std::vector<int64_t>& numbers) {
  return std::any_of(numbers.begin(), numbers.end(),
                     [&](int64_t number) { return number != numbers.front(); });
}

// What an error adds where values are of another size than keys.
std::string values_of(int64_t head_dim, int64_t v_head_dim) {
  return head_dim == v_head_dim ? "" : " (values " + std::to_string(v_head_dim) + ")";
}

KeySource find_memory(const MultiHeadAttentionImpl& module, const at::Tensor& query,
                      const at::Tensor& key, const at::Tensor& value, const CallOptions& call) {
  TORCH_CHECK(!key.defined() && !value.defined(),
              "MultiHeadAttention: memory: expected a call without key and value, which the "
              "memory holds, found both given");
  TORCH_CHECK(!call.cache(),
              "MultiHeadAttention: memory: expected a call without a cache to "
              "append to, found both");
  KVCacheState& cache = call.memory()->state();
  TORCH_CHECK(cache.keys.defined(),
              "MultiHeadAttention: memory: expected what project_keys "
              "returned, found an empty cache");
  KeySource source;
  source.sizes = check_query(module, query);
  source.mask = call.mask();
  source.cache = &cache;
  const int64_t batch = source.sizes.batch;
  const auto& keys = cache.keys;
  TORCH_CHECK(keys.size(0) == batch,
              "MultiHeadAttention: memory: expected the batch size of "
              "query, ",
              batch, ", found ", keys.size(0));
  TORCH_CHECK(keys.size(1) == module.num_kv_heads() && keys.size(3) == module.head_dim() &&
                  cache.values.size(3) == module.v_head_dim(),
              "MultiHeadAttention: memory: expected ", module.num_kv_heads(), " heads of size ",
              module.head_dim(), values_of(module.head_dim(), module.v_head_dim()), ", found ",
              keys.size(1), " of size ", keys.size(3),
              values_of(keys.size(3), cache.values.size(3)));
  TORCH_CHECK(keys.device() == query.device(),
              "MultiHeadAttention: memory: expected the device of query, ", query.device(),
              ", found ", keys.device());
  const int64_t extra = appended_keys(module.options);
  TORCH_CHECK(cache.longest() >= extra,
              "MultiHeadAttention: memory: expected the appended keys "
              "of add_bias_kv and add_zero_attn, found ",
              cache.longest(), " keys");
  if (differ(cache.lengths)) {
    TORCH_CHECK(extra == 0,
                "MultiHeadAttention: memory: expected samples of one length beside add_bias_kv "
                "and add_zero_attn, whose keys come last in each, found ",
                at::IntArrayRef(cache.lengths));
    // Behind a shorter sample's end lie zeros, or tokens that a reset or crop has forgotten.
    source.lengths = constant(cache.lengths).to(query.device());
    // Its last query stands at its own last key.
    auto first_queries = cache.lengths;
    for (auto& place : first_queries) place -= source.sizes.queries;
    source.offsets = constant(first_queries).to(query.device());
  }
  source.sizes.keys = cache.longest() - extra;
  source.positions = cache.next_positions(batch);
  for (auto& position : source.positions) position -= extra;
  return source;
}

}  // namespace

KeySource find_keys(const MultiHeadAttentionImpl& module, const LayerToken& layer,
                    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const CallOptions& call) {
  check_module(module);
  check_enum({"MultiHeadAttention", "weights"}, call.weights().value_or(Weights::none),
             Weights::per_head, "none, averaged or per_head");
  TORCH_CHECK(call.cache() || !call.new_lengths().defined(),
              "MultiHeadAttention: new_lengths: expected a cache to append to, found none; "
              "Mask::lengths marks padding");
  if (call.memory()) return find_memory(module, query, key, value, call);
  const bool self_attention = !key.defined() && !value.defined();
  KeySource source;
  source.key = self_attention ? query : key;
  source.value = self_attention ? query : value;
  source.sizes = check_inputs(module, query, source.key, source.value);
  source.mask = call.mask();
  source.layer = layer;
  if (!call.cache()) return source;
  source.cache = &call.cache()->state();
  source.appends = true;
  const int64_t new_keys = source.sizes.keys;
  source.plan = source.cache->plan({source.sizes.batch, module.num_kv_heads(), new_keys,
                                    module.head_dim(), module.v_head_dim()},
                                   call.new_lengths());
  source.cache->check_layer(layer);
  source.positions = source.cache->next_positions(source.sizes.batch);
  source.sizes.keys = source.plan.keys;
  add_cache_mask(source.plan, source.cache->options.window(), new_keys, query.device(), source);
  return source;
}

void take_cached_keys(const KeySource& source, const MultiHeadAttentionImpl& module,
                      int64_t extra, Heads& heads) {
  if (!source.cache) return;
  CachedKeys keys;
  if (source.appends) {
    // Half modules may project to float32; their cache is half all the same.
    const auto dtype = source.cache->options.dtype() ? heads.key.scalar_type()
                                                     : module.W_k->weight.scalar_type();
    keys = source.cache->append(heads.key.to(dtype), heads.value.to(dtype), source.plan, extra);
    source.cache->layer = source.layer;
  } else {
    keys = source.cache->held();
  }
  // Keys narrower than the query are read as they are stored, but wider ones are not.
  const auto compute = heads.query.scalar_type();
  const bool wider = keys.key.scalar_type() == at::kDouble && compute != at::kDouble;
  heads.key = wider ? keys.key.to(compute) : keys.key;
  heads.value = wider ? keys.value.to(compute) : keys.value;
}

}  // namespace mha::detail
