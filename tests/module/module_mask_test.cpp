// Guards masks of position in calls of the module: documents and terms by distance against the
// oracle's loops, and over a cache whose samples have different lengths against each sample
// alone, weights, maps, the distance of a map and the table's gradient included.
//
// Tolerance: results of order 1; float32 sums err by some 1e-6 of that, gradients of tables,
// which sum over all queries, by ten times as much. A table that is off by one key changes an
// output by 0.01 or more.
#include <mha/multi_head_attention.h>
#include <mha/relative_position_bias.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "support/expect.h"
#include "support/oracle.h"

namespace mha {
namespace {

using test::is_close;
using test::leaf;
using test::Random;

double rounding(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-13 : 5e-6;
}

MultiHeadAttention make(at::ScalarType dtype) {
  torch::manual_seed(51);
  MultiHeadAttention module(
      MultiHeadAttentionOptions(24, 4).num_kv_heads(2).head_dim(8).dtype(dtype));
  module->eval();
  return module;
}

// The gradient of a table (4, L + S - 1), from that of the scores (N, 4, L, S).
at::Tensor summed_by_distance(const at::Tensor& scores) {
  const int64_t l = scores.size(2), s = scores.size(3);
  auto sums = at::zeros({4, l + s - 1}, at::kDouble);
  for (int64_t i = 0; i < l; ++i) {
    sums.narrow(1, l - 1 - i, s) += scores.select(2, i).sum(0);
  }
  return sums;
}

void expect_oracle(MultiHeadAttention& module, const at::Tensor& query, const at::Tensor& key,
                   const Mask& mask, const at::Tensor& table) {
  const auto dtype = query.scalar_type();
  const auto expected = test::oracle_module(module, query, key, key, mask);
  const auto [output, weights] = module->forward(query, key, key, mask);
  EXPECT_TRUE(is_close(output.to(at::kDouble), expected.output, rounding(dtype)));
  EXPECT_TRUE(is_close(weights.to(at::kDouble), expected.weights, rounding(dtype)));
  const auto traced = module->trace(query, key, key, mask);
  EXPECT_TRUE(is_close(traced.map.dense().to(at::kDouble), expected.weights, rounding(dtype)));

  const auto upstream = at::randn_like(output) / 10;
  module->zero_grad();
  output.backward(upstream);
  const auto gradients =
      test::oracle_module_backward(module, query, key, key, mask, upstream.to(at::kDouble), {});
  for (const auto& [name, gradient] : gradients.parameters) {
    EXPECT_TRUE(is_close(module->named_parameters()[name].grad().to(at::kDouble), gradient,
                         10 * rounding(dtype)))
        << name;
  }
  EXPECT_TRUE(is_close(table.grad().to(at::kDouble), summed_by_distance(gradients.added),
                       10 * rounding(dtype)));
}

TEST(ModuleMaskTest, DocumentsAndTablesAgreeWithLoops) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    Random random(52);
    auto module = make(dtype);
    const auto x = random.normal({2, 70, 24}, dtype), y = random.normal({2, 9, 24}, dtype);
    const auto ids =
        at::stack({at::arange(70) / 30, at::arange(70).remainder(3)}).to(at::kLong);
    const auto square = leaf(random.normal({4, 139}, dtype));
    expect_oracle(module, x, x, Mask::documents(ids) & Mask::relative(square) & Mask::causal(),
                  square);
    square.mutable_grad() = at::Tensor();
    expect_oracle(module, x, x,
                  Mask::documents_from_lengths(torch::tensor({0, 1, 33, 33, 70})) &
                      Mask::relative(square),
                  square);
    const auto wide = leaf(random.normal({4, 78}, dtype));
    expect_oracle(module, y, x,
                  Mask::documents(at::arange(9).remainder(3), ids) & Mask::relative(wide),
                  wide);
  }
}

// What is added by the distance of a key from a query, for any numbers of both.
using Bias = std::function<Mask(int64_t queries, int64_t keys)>;

// Two samples that get different numbers of tokens in each step over one cache, and each of
// them alone. Calls visit(n, ragged, alone, tokens) for what they give.
template <typename Visit>
void step_by_step(MultiHeadAttention& module, const KVCacheOptions& options, const Bias& bias,
                  bool pads, const Visit& visit) {
  Random random(53);
  const auto dtype = module->W_q->weight.scalar_type();
  const KVCache cache(options);
  const std::vector<KVCache> alone{KVCache(options), KVCache(options)};
  for (int64_t step = 0; step < 8; ++step) {
    const int64_t tokens = step == 0 ? 12 : random.between(1, 4);
    std::vector<int64_t> added{tokens, step == 0 ? 5 : tokens};
    if (pads && step > 0) added = {random.between(0, tokens), random.between(1, tokens)};
    const auto x = random.normal({2, tokens, 24}, dtype);
    const auto held = step == 0 ? std::vector<int64_t>{0, 0}
                                : std::vector<int64_t>{cache.lengths()[0].item<int64_t>(),
                                                       cache.lengths()[1].item<int64_t>()};
    const auto call = [&](int64_t queries, int64_t keys) {
      return CallOptions(Mask::causal() & bias(queries, keys));
    };
    const auto ragged =
        module->trace(x, {}, {},
                      call(tokens, std::max(held[0] + added[0], held[1] + added[1]))
                          .cache(cache)
                          .new_lengths(torch::tensor(added, at::kLong)));
    for (int64_t n = 0; n < 2; ++n) {
      if (added[n] == 0) continue;
      const auto expected = module->trace(x.narrow(0, n, 1).narrow(1, 0, added[n]), {}, {},
                                          call(added[n], held[n] + added[n]).cache(alone[n]));
      visit(n, ragged, expected, added[n]);
    }
  }
}

// A table over distances up to 60 of four heads, of which each call takes its part.
Bias part_of(const at::Tensor& by_distance) {
  return [by_distance](int64_t queries, int64_t keys) {
    return Mask::relative(by_distance.narrow(1, 60 - (keys - 1), queries + keys - 1));
  };
}

TEST(ModuleMaskTest, OverACacheATableFollowsEachSamplesOwnPositions) {
  torch::NoGradGuard no_grad;
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    auto module = make(dtype);
    const RelativePositionBias t5(
        RelativePositionBiasOptions(4).num_buckets(8).max_distance(20));
    const Bias learned = [&](int64_t queries, int64_t keys) {
      return t5->forward(queries, keys);
    };
    for (const auto& bias :
         {part_of(at::randn({4, 121})), part_of(at::randn({1, 121})), learned}) {
      for (const bool pads : {false, true}) {
        step_by_step(
            module, {}, bias, pads,
            [&](int64_t n, const auto& ragged, const auto& alone, int64_t tokens) {
              const auto output = ragged.output.narrow(0, n, 1).narrow(1, 0, tokens);
              EXPECT_TRUE(is_close(output, alone.output, rounding(dtype)));
              const auto map = ragged.map.dense().narrow(0, n, 1).narrow(2, 0, tokens);
              const int64_t keys = alone.map.num_keys();
              EXPECT_TRUE(is_close(map.narrow(3, 0, keys), alone.map.dense(), rounding(dtype)));
              EXPECT_TRUE(test::all_zero(map.slice(3, keys)));
              // Some rows, one head, some keys: parts of the same table.
              const auto block = ragged.map.block(2, {tokens - 1, tokens}, {1, keys});
              EXPECT_TRUE(is_close(block[n], map[0][2].slice(0, tokens - 1).slice(1, 1, keys),
                                   rounding(dtype)));
            });
      }
    }
  }
}

TEST(ModuleMaskTest, OverACacheATableLearnsFromEachSamplesOwnPositions) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    auto module = make(dtype);
    for (auto& parameter : module->parameters()) parameter.set_requires_grad(false);
    const auto table = leaf(at::randn({4, 121}).to(dtype));
    step_by_step(
        module, {}, part_of(table), /*pads=*/true,
        [&](int64_t n, const auto& ragged, const auto& alone, int64_t tokens) {
          const auto loss = [](const at::Tensor& output) {
            return (output * at::linspace(-1, 1, 24).to(output.dtype())).sum();
          };
          const auto gradient = [&](const at::Tensor& output) {
            return torch::autograd::grad({loss(output)}, {table}, {}, true)[0];
          };
          const auto of_ragged = gradient(ragged.output[n].narrow(0, 0, tokens));
          const auto of_alone = gradient(alone.output);
          EXPECT_TRUE(is_close(of_ragged, of_alone, 10 * rounding(dtype)));
          // And through the map.
          const auto from = [&](const AttentionMap& map, int64_t sample) {
            return torch::autograd::grad(
                {map.dense()[sample].narrow(1, 0, tokens).square().sum()}, {table}, {},
                true)[0];
          };
          EXPECT_TRUE(is_close(from(ragged.map, n), from(alone.map, 0), 10 * rounding(dtype)));
        });
  }
}

TEST(ModuleMaskTest, AMapOverACacheMeasuresDistancesFromEachSamplesOwnPositions) {
  torch::NoGradGuard no_grad;
  const Bias none = [](int64_t, int64_t) { return Mask(); };
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    auto module = make(dtype);
    for (const auto& options : {KVCacheOptions(), KVCacheOptions().window(6)}) {
      int64_t step = 0;
      step_by_step(module, options, none, /*pads=*/false,
                   [&](int64_t n, const auto& ragged, const auto& alone, int64_t) {
                     // In the first step the second sample is padded, which counts too.
                     if (step++ < 2) return;
                     EXPECT_TRUE(is_close(ragged.map.distance()[n], alone.map.distance()[0],
                                          10 * rounding(dtype)));
                   });
    }
  }
}

}  // namespace
}  // namespace mha
