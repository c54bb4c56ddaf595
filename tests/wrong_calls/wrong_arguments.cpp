#include <mha/attention_attribution.h>
#include <mha/attention_map.h>
#include <mha/relative_position_bias.h>
#include <mha/torch_conversion.h>

#include <utility>

#include "support/support.h"
#include "wrong_calls/wrong_calls.h"

namespace mha::test {
namespace {

// Values of tensors that a mask or a call cannot mean.
void add_values(WrongCalls& calls) {
  const auto x = at::ones({2, 4, 3, 6}), y = at::ones({2, 4, 5, 6});
  const auto in_mask = [&](const std::string& name, std::function<Mask()> make) {
    calls.push_back({name, [=] { scaled_dot_product_attention(x, y, y, make()); }});
  };
  const auto of = [](std::vector<double> values) { return torch::tensor(values); };
  const auto integers = [](std::vector<int64_t> values) { return torch::tensor(values); };
  for (const auto& [what, value] :
       {std::pair<std::string, double>{"-inf", -infinity}, {"-1", -1.0}, {"NaN", nan}}) {
    const double bad = value;
    in_mask("Mask::keep: " + what, [=] { return Mask::keep(at::full({3, 5}, bad)); });
    in_mask("Mask::keep_keys: " + what, [=] { return Mask::keep_keys(at::full({5}, bad)); });
    in_mask("Mask::real_queries: " + what,
            [=] { return Mask::real_queries(at::full({3}, bad)); });
  }
  in_mask("Mask::lengths: 6 of 5", [=] { return Mask::lengths(integers({6, 2})); });
  in_mask("Mask::lengths: -1", [=] { return Mask::lengths(integers({2, -1})); });
  in_mask("Mask::query_lengths: 4 of 3", [=] { return Mask::query_lengths(integers({4, 2})); });
  in_mask("Mask::query_lengths: -1", [=] { return Mask::query_lengths(integers({2, -1})); });
  in_mask("Mask::relative: -inf", [=] {
    auto table = at::zeros({4, 7});
    table[0][0] = -infinity;
    return Mask::relative(table);
  });
  in_mask("Mask::documents: L is not S", [=] { return Mask::documents(integers({1, 2, 3})); });
  in_mask("Mask::documents_from_lengths: L is not S",
          [=] { return Mask::documents_from_lengths(integers({0, 5})); });
  for (const auto& [what, ends] :
       {std::pair<std::string, std::vector<int64_t>>{"first is 1", {1, 5}},
        {"last is 4", {0, 4}},
        {"descending", {0, 4, 2, 5}},
        {"none", {}}}) {
    const auto cumulative = torch::tensor(ends, at::kLong);
    calls.push_back({"Mask::documents_from_lengths: " + what, [=] {
                       scaled_dot_product_attention(y, y, y,
                                                    Mask::documents_from_lengths(cumulative));
                     }});
  }
  in_mask("Mask: the second of two", [=] {
    return Mask::causal() & Mask::keep_keys(of({1, 1})) & Mask::lengths(integers({9, 9}));
  });
}

void add_call_combinations(WrongCalls& calls, EntrySetting& setting) {
  const auto x = at::ones({2, 3, 12}), wide = at::ones({2, 3, 16});
  auto module = setting.module, rotating = setting.rotating;
  const auto attend = [&](const std::string& name, const CallOptions& call) {
    calls.push_back({"CallOptions: " + name, [=]() mutable { module->attend(x, call); }});
  };
  attend("weights 9", CallOptions().weights(static_cast<Weights>(9)));
  attend("new_lengths without a cache", CallOptions().new_lengths(torch::tensor({1, 2})));
  attend("positions without rotary", CallOptions().positions(torch::tensor({0, 1, 2})));
  attend("an empty memory", CallOptions().memory(KVCache()));
  attend("a memory of another size", CallOptions().memory(setting.memory));
  attend("a memory beside a cache",
         CallOptions().memory(setting.cache).cache(setting.cache.clone()));
  attend("a head_mask of three heads", CallOptions().head_mask(at::ones({3})));
  attend("new_lengths above L",
         CallOptions().cache(setting.cache.clone()).new_lengths(torch::tensor({4, 1})));
  attend("new_lengths below 0",
         CallOptions().cache(setting.cache.clone()).new_lengths(torch::tensor({-1, 1})));
  attend("a cache of another batch", CallOptions().cache([&] {
    KVCache other;
    const at::NoGradGuard no_grad;
    module->attend(at::ones({3, 1, 12}), CallOptions().cache(other));
    return other;
  }()));
  attend("a cache without room", CallOptions().cache(KVCache(KVCacheOptions().capacity(2))));
  calls.push_back({"CallOptions: key beside a memory", [=]() mutable {
                     rotating->attend(wide, wide, wide, CallOptions().memory(setting.memory));
                   }});
  calls.push_back({"CallOptions: key_positions in self-attention", [=]() mutable {
                     rotating->attend(wide, CallOptions()
                                                .positions(torch::tensor({0, 1, 2}))
                                                .key_positions(torch::tensor({0, 1, 2})));
                   }});
  calls.push_back({"CallOptions: positions without key_positions", [=]() mutable {
                     rotating->attend(wide, wide.clone(), wide.clone(),
                                      CallOptions().positions(torch::tensor({0, 1, 2})));
                   }});
  calls.push_back({"CallOptions: gradients beside a cache", [=]() mutable {
                     const at::AutoGradMode enable_grad(true);
                     module->attend(x, CallOptions().cache(setting.cache.clone()));
                   }});
  const auto moved_from = [] {
    KVCache from;
    const KVCache to = std::move(from);
    return from;
  };
  attend("a cache that was moved from", CallOptions().cache(moved_from()));
  attend("a memory that was moved from", CallOptions().memory(moved_from()));
  calls.push_back({"KVCache::key: moved from", [=] { moved_from().key(); }});
  for (const auto& heads : {std::vector<int64_t>{4}, {-1}, {1, 1}, {0, 1, 2, 3}, {0}}) {
    std::ostringstream name;
    name << "prune_heads: " << at::IntArrayRef(heads);
    calls.push_back({name.str(), [=]() mutable { module->prune_heads(heads); }});
  }
}

void add_cache_methods(WrongCalls& calls, EntrySetting& setting) {
  const KVCache& cache = setting.cache;  // two samples of three tokens
  const auto on_cache = [&](const std::string& name, std::function<void(KVCache)> call) {
    calls.push_back({"KVCache::" + name, [cache, call] { call(cache); }});
  };
  on_cache("crop: -1", [](KVCache c) { c.crop(-1); });
  on_cache("crop: -1 of sample 1", [](KVCache c) { c.crop(torch::tensor({3, -1})); });
  on_cache("crop: three lengths", [](KVCache c) { c.crop(torch::tensor({3, 2, 1})); });
  on_cache("repeat: 0", [](KVCache c) { c.repeat(0); });
  on_cache("repeat: -1", [](KVCache c) { c.repeat(-1); });
  on_cache("repeat: 2^40", [](KVCache c) { c.repeat(int64_t{1} << 40); });
  on_cache("reorder: 2 of 2", [](KVCache c) { c.reorder(torch::tensor({0, 2})); });
  on_cache("reorder: -1", [](KVCache c) { c.reorder(torch::tensor({-1})); });
  on_cache("append: another batch",
           [](KVCache c) { c.append(at::ones({3, 2, 1, 3}), at::ones({3, 2, 1, 3})); });
  on_cache("append: other heads",
           [](KVCache c) { c.append(at::ones({2, 1, 1, 3}), at::ones({2, 1, 1, 3})); });
  on_cache("append: another head size",
           [](KVCache c) { c.append(at::ones({2, 2, 1, 4}), at::ones({2, 2, 1, 3})); });
  on_cache("append: more values",
           [](KVCache c) { c.append(at::ones({2, 2, 1, 3}), at::ones({2, 2, 2, 3})); });
  on_cache("append: a gradient", [](KVCache c) {
    const at::AutoGradMode enable_grad(true);
    c.append(at::ones({2, 2, 1, 3}).requires_grad_(), at::ones({2, 2, 1, 3}));
  });
  calls.push_back({"KVCache::save: empty", [] { KVCache().save("/nowhere"); }});
  calls.push_back({"KVCache::reorder: empty", [] { KVCache().reorder(torch::tensor({0})); }});
}

void add_map_methods(WrongCalls& calls) {
  const AttentionMap map(at::ones({2, 3, 5, 4}), at::ones({2, 3, 7, 4}));
  const auto on_map = [&](const std::string& name,
                          std::function<void(const AttentionMap&)> call) {
    calls.push_back({"AttentionMap::" + name, [map, call] { call(map); }});
  };
  on_map("head: 3", [](auto& m) { m.head(3); });
  on_map("head: -1", [](auto& m) { m.head(-1); });
  on_map("rows: 2 to 6", [](auto& m) { m.rows(2, 6); });
  on_map("rows: 3 to 2", [](auto& m) { m.rows(3, 2); });
  on_map("rows: -1 to 2", [](auto& m) { m.rows(-1, 2); });
  on_map("block: head 3", [](auto& m) { m.block(3, {0, 1}, {0, 1}); });
  on_map("block: rows", [](auto& m) { m.block(0, {0, 6}, {0, 1}); });
  on_map("block: keys", [](auto& m) { m.block(0, {0, 1}, {0, 8}); });
  on_map("mean: -1 to 2", [](auto& m) { m.mean(-1, 2); });
  on_map("top_k: 0", [](auto& m) { m.top_k(0); });
  on_map("top_k: 8", [](auto& m) { m.top_k(8); });
  on_map("pooled: 6 rows", [](auto& m) { m.pooled(6, 1); });
  on_map("pooled: 0 columns", [](auto& m) { m.pooled(1, 0); });
  on_map("scores: stage 9", [](auto& m) { m.scores(static_cast<ScoreStage>(9)); });
  on_map("scores: 0 to 6", [](auto& m) { m.scores(ScoreStage::masked, 0, 6); });
  calls.push_back({"AttentionMap::dense: moved from", [map] {
                     AttentionMap from = map;
                     const AttentionMap to = std::move(from);
                     from.dense();
                   }});
  calls.push_back({"attention_rollout: none", [] { attention_rollout({}); }});
  calls.push_back({"attention_rollout: L is not S", [=] { attention_rollout({map}); }});
  const auto square = [](int64_t n, int64_t t) {
    return AttentionMap(at::ones({n, 1, t, 4}), at::ones({n, 1, t, 4}));
  };
  calls.push_back({"attention_rollout: another length",
                   [=] { attention_rollout({square(1, 5), square(1, 6)}); }});
  calls.push_back({"attention_rollout: another batch",
                   [=] { attention_rollout({square(1, 5), square(2, 5)}); }});
}

void add_attributions(WrongCalls& calls) {
  const auto q = at::ones({2, 3, 5, 4}), k = at::ones({2, 3, 7, 4});
  const AttentionAttribution attribution(AttentionMap(q, k), k, q);
  constexpr auto shown = Attribution::gradient;
  const auto on = [&](const std::string& name,
                      std::function<void(const AttentionAttribution&)> call) {
    calls.push_back({"AttentionAttribution::" + name, [=] { call(attribution); }});
  };
  on("dense: shown 9", [](auto& a) { a.dense(static_cast<Attribution>(9)); });
  on("head: 3", [](auto& a) { a.head(shown, 3); });
  on("rows: 2 to 6", [](auto& a) { a.rows(shown, 2, 6); });
  on("block: keys", [](auto& a) { a.block(shown, 0, {0, 1}, {0, 8}); });
  on("mean: -1 to 2", [](auto& a) { a.mean(shown, -1, 2); });
  on("top_k: 8", [](auto& a) { a.top_k(shown, 8); });
  on("pooled: 6 rows", [](auto& a) { a.pooled(shown, 6, 1); });
  calls.push_back({"AttentionAttribution::sums: moved from", [attribution] {
                     AttentionAttribution from = attribution;
                     const AttentionAttribution to = std::move(from);
                     from.sums(shown);
                   }});
  calls.push_back({"attention_relevance: none", [] { attention_relevance({}); }});
  calls.push_back(
      {"attention_relevance: L is not S", [=] { attention_relevance({attribution}); }});
}

void add_relative_bias(WrongCalls& calls) {
  const RelativePositionBias bias(RelativePositionBiasOptions(2));
  calls.push_back({"RelativePositionBias: -1 queries", [=] { bias->forward(-1, 2); }});
  calls.push_back({"RelativePositionBias: -1 keys", [=] { bias->forward(1, -2); }});
  calls.push_back(
      {"RelativePositionBias: 2^60 queries", [=] { bias->forward(int64_t{1} << 60, 2); }});
  calls.push_back({"RelativePositionBias: alignment 9",
                   [=] { bias->forward(1, 2, static_cast<Mask::Alignment>(9)); }});
}

}  // namespace

WrongCalls wrong_arguments(EntrySetting& setting) {
  WrongCalls calls;
  add_values(calls);
  add_call_combinations(calls, setting);
  add_cache_methods(calls, setting);
  add_map_methods(calls);
  add_attributions(calls);
  add_relative_bias(calls);
  return calls;
}

}  // namespace mha::test
