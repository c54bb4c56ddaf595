#include "wrong_calls/tensor_entries.h"

#include <mha/attention_attribution.h>
#include <mha/attention_map.h>
#include <mha/relative_position_bias.h>

#include <utility>

#include "support/support.h"

namespace mha::test {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr int64_t n = 2, h = 4, kv_h = 2, l = 3, s = 5, d = 6, dv = 7;

Tensors results_of(const AttentionOutput& result) {
  return {result.output, result.weights};
}

Tensors results_of(const TracedAttention& result) {
  return {result.output, result.map.dense()};
}

Tensors contents_of(const KVCache& cache) {
  return {cache.key(), cache.value(), cache.lengths(), cache.next_positions()};
}

MultiHeadAttention small_module(const MultiHeadAttentionOptions& options) {
  torch::manual_seed(71);
  MultiHeadAttention module(options);
  module->eval();
  return module;
}

}  // namespace

EntrySetting::EntrySetting()
    : module(small_module(MultiHeadAttentionOptions(12, 4).num_kv_heads(2))),
      rotating(small_module(MultiHeadAttentionOptions(16, 4).rotary(RotaryOptions()))) {
  const at::NoGradGuard no_grad;
  Random random(72);
  query_ = random.normal({n, h, l, d});
  key_ = random.normal({n, kv_h, s, d});
  value_ = random.normal({n, kv_h, s, dv});
  sinks_ = random.normal({h});
  tokens_ = random.normal({n, l, 12});
  other_tokens_ = random.normal({n, s, 12});
  new_key_ = random.normal({n, kv_h, 2, 3});
  new_value_ = random.normal({n, kv_h, 2, 3});
  module->attend(tokens_, CallOptions().cache(cache));
  memory = rotating->project_keys(random.normal({n, s, 16}));
  add_functional();
  add_masks();
  add_module();
  add_cache();
  add_rotary();
}

void EntrySetting::add(const std::string& name, const at::Tensor& right,
                       std::function<Tensors(const at::Tensor&)> call) {
  entries_.push_back({name, right, std::move(call)});
}

std::vector<at::Tensor> EntrySetting::state() const {
  Tensors state{query_, key_, value_, sinks_, tokens_, other_tokens_, new_key_, new_value_};
  for (const auto& each : {module, rotating}) {
    for (const auto& parameter : each->parameters()) state.push_back(parameter);
  }
  for (const auto& each : {cache, memory}) {
    for (const auto& tensor : contents_of(each)) state.push_back(tensor);
    state.push_back(torch::tensor(each.nbytes()));
  }
  for (auto& tensor : state) tensor = tensor.detach().clone();
  return state;
}

void EntrySetting::add_functional() {
  const auto with_sinks = [](const at::Tensor& t) { return AttentionOptions().sinks(t); };
  const auto attend = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const AttentionOptions& options = {}) {
    return results_of(scaled_dot_product_attention(q, k, v, Mask::causal(), options));
  };
  const auto trace = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const AttentionOptions& options = {}) {
    return results_of(trace_scaled_dot_product_attention(q, k, v, Mask::causal(), options));
  };
  const auto map = [](const at::Tensor& q, const at::Tensor& k,
                      const AttentionOptions& options = {}) {
    return Tensors{AttentionMap(q, k, Mask::causal(), options).dense()};
  };
  const auto q = query_, k = key_, v = value_;
  add("scaled_dot_product_attention: query", q, [=](auto& t) { return attend(t, k, v); });
  add("scaled_dot_product_attention: key", k, [=](auto& t) { return attend(q, t, v); });
  add("scaled_dot_product_attention: value", v, [=](auto& t) { return attend(q, k, t); });
  add("scaled_dot_product_attention: sinks", sinks_,
      [=](auto& t) { return attend(q, k, v, with_sinks(t)); });
  add("trace_scaled_dot_product_attention: query", q, [=](auto& t) { return trace(t, k, v); });
  add("trace_scaled_dot_product_attention: key", k, [=](auto& t) { return trace(q, t, v); });
  add("trace_scaled_dot_product_attention: value", v, [=](auto& t) { return trace(q, k, t); });
  add("trace_scaled_dot_product_attention: sinks", sinks_,
      [=](auto& t) { return trace(q, k, v, with_sinks(t)); });
  add("AttentionMap: query", q, [=](auto& t) { return map(t, k); });
  add("AttentionMap: key", k, [=](auto& t) { return map(q, t); });
  add("AttentionMap: sinks", sinks_, [=](auto& t) { return map(q, k, with_sinks(t)); });
  const auto attribute = [=](const at::Tensor& value, const at::Tensor& grad_output) {
    return Tensors{AttentionAttribution(AttentionMap(q, k), value, grad_output)
                       .dense(Attribution::relevance)};
  };
  const auto g = Random(75).normal({n, h, l, dv});
  add("AttentionAttribution: value", v, [=](auto& t) { return attribute(t, g); });
  add("AttentionAttribution: grad_output", g, [=](auto& t) { return attribute(v, t); });
}

void EntrySetting::add_masks() {
  const auto in_mask = [this](const std::string& name, const at::Tensor& right,
                              std::function<Mask(const at::Tensor&)> make) {
    add("Mask::" + name, right, [q = query_, k = key_, v = value_, make](const at::Tensor& t) {
      return results_of(scaled_dot_product_attention(q, k, v, make(t)));
    });
  };
  Random random(73);
  const auto pairs = random.coins({n, l, s}, 0.7), keys = random.coins({n, s}, 0.7);
  const auto lengths = torch::tensor({4, 2}), offsets = torch::tensor({1, -1});
  const auto query_ids = torch::tensor({0, 1, 1}), key_ids = torch::tensor({0, 0, 1, 2, 1});
  const auto slopes = random.normal({h}).abs();
  in_mask("keep: mask", pairs.to(at::kFloat), [](auto& t) { return Mask::keep(t); });
  in_mask("block: mask", pairs, [](auto& t) { return Mask::block(t); });
  in_mask("add: mask", random.normal({n, l, s}), [](auto& t) { return Mask::add(t); });
  in_mask("keep_keys: mask", keys.to(at::kLong), [](auto& t) { return Mask::keep_keys(t); });
  in_mask("block_keys: mask", keys, [](auto& t) { return Mask::block_keys(t); });
  in_mask("add_keys: mask", random.normal({n, s}), [](auto& t) { return Mask::add_keys(t); });
  in_mask("real_queries: mask", random.coins({n, l}, 0.7).to(at::kLong),
          [](auto& t) { return Mask::real_queries(t); });
  in_mask("query_lengths: lengths", torch::tensor({2, 3}),
          [](auto& t) { return Mask::query_lengths(t); });
  in_mask("lengths: lengths", lengths, [](auto& t) { return Mask::lengths(t); });
  in_mask("causal: offsets", offsets, [](auto& t) { return Mask::causal(t); });
  in_mask("window: offsets", offsets, [](auto& t) { return Mask::window(1, 1, t); });
  in_mask("documents: query_ids", query_ids,
          [=](auto& t) { return Mask::documents(t, key_ids); });
  in_mask("documents: key_ids", key_ids,
          [=](auto& t) { return Mask::documents(query_ids, t); });
  in_mask("relative: table", random.normal({h, l + s - 1}),
          [](auto& t) { return Mask::relative(t); });
  in_mask("alibi: slopes", slopes, [](auto& t) { return Mask::alibi(t); });
  in_mask("alibi: offsets", offsets, [=](auto& t) { return Mask::alibi(slopes, t); });
  // As many queries as keys.
  const auto x = key_;
  add("Mask::documents: ids", key_ids, [x](auto& t) {
    return results_of(scaled_dot_product_attention(x, x, x, Mask::documents(t)));
  });
  add("Mask::documents_from_lengths: cumulative", torch::tensor({0, 2, 5}), [x](auto& t) {
    return results_of(scaled_dot_product_attention(x, x, x, Mask::documents_from_lengths(t)));
  });
}

void EntrySetting::add_module() {
  const auto x = tokens_, y = other_tokens_;
  const auto forward = [module = module](const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v) {
    return results_of(MultiHeadAttention(module)->forward(q, k, v));
  };
  const auto attend = [module = module, x](const CallOptions& call) {
    return results_of(MultiHeadAttention(module)->attend(x, call));
  };
  add("MultiHeadAttention::forward: query", x, [=](auto& t) { return forward(t, y, y); });
  add("MultiHeadAttention::forward: key", y, [=](auto& t) { return forward(x, t, y); });
  add("MultiHeadAttention::forward: value", y, [=](auto& t) { return forward(x, y, t); });
  add("MultiHeadAttention::trace: query", x,
      [module = module](auto& t) { return results_of(MultiHeadAttention(module)->trace(t)); });
  add("CallOptions: head_mask", torch::tensor({1.0f, 0.5f, 0.0f, 2.0f}),
      [=](auto& t) { return attend(CallOptions().head_mask(t)); });
  add("CallOptions: new_lengths", torch::tensor({3, 1}), [=](auto& t) {
    const KVCache own = cache.clone();  // what it may append to
    auto results = attend(CallOptions().cache(own).new_lengths(t));
    results[0] = own.key();  // outputs of padding mean nothing
    results[1] = own.lengths();
    return results;
  });
  add("MultiHeadAttention::project_keys: key", y, [module = module](auto& t) {
    return contents_of(MultiHeadAttention(module)->project_keys(t));
  });
  add("MultiHeadAttention::project_keys: value", y, [module = module, y](auto& t) {
    return contents_of(MultiHeadAttention(module)->project_keys(y, t));
  });
}

void EntrySetting::add_cache() {
  const auto k = new_key_, v = new_value_;
  const auto append = [this](const at::Tensor& key, const at::Tensor& value,
                             const at::Tensor& lengths) {
    const KVCache own = cache.clone();
    KVCache(own).append(key, value, lengths);
    return contents_of(own);
  };
  add("KVCache::append: key", k, [=](auto& t) { return append(t, v, {}); });
  add("KVCache::append: value", v, [=](auto& t) { return append(k, t, {}); });
  add("KVCache::append: new_lengths", torch::tensor({1, 2}),
      [=](auto& t) { return append(k, v, t); });
  add("KVCache::crop: lengths", torch::tensor({2, 1}), [this](auto& t) {
    KVCache own = cache.clone();
    own.crop(t);
    return contents_of(own);
  });
  add("KVCache::reorder: indices", torch::tensor({1, 0, 1}), [this](auto& t) {
    KVCache own = cache.clone();
    own.reorder(t);
    return contents_of(own);
  });
}

void EntrySetting::add_rotary() {
  Random random(74);
  const auto x = random.normal({n, 2, l, 8}), positions = torch::tensor({7, 0, 3});
  add("apply_rotary: x", x, [=](auto& t) { return Tensors{apply_rotary(t, positions)}; });
  add("apply_rotary: positions", positions,
      [=](auto& t) { return Tensors{apply_rotary(x, t)}; });
  const auto queries = random.normal({n, l, 16}), keys = random.normal({n, s, 16});
  const auto key_positions = torch::tensor({4, 3, 2, 1, 9});
  const auto attend = [rotating = rotating, queries, keys](const CallOptions& call) {
    return results_of(MultiHeadAttention(rotating)->attend(queries, keys, keys, call));
  };
  add("CallOptions: positions", positions,
      [=](auto& t) { return attend(CallOptions().positions(t).key_positions(key_positions)); });
  add("CallOptions: key_positions", key_positions,
      [=](auto& t) { return attend(CallOptions().positions(positions).key_positions(t)); });
  add("RelativePositionBias::buckets: relative_positions", torch::tensor({{-9, 0}, {3, 40}}),
      [](auto& t) {
        return Tensors{RelativePositionBias(RelativePositionBiasOptions(2))->buckets(t)};
      });
}

}  // namespace mha::test
