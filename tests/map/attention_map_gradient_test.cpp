// Gradients through attention maps, against those of the same functions of the dense weights
// that a call returns with its graph, in float64.

#include <gtest/gtest.h>
#include <mha/attention_map.h>
#include <mha/multi_head_attention.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#include "support/dense_map.h"
#include "support/expect.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

struct Method {
  const char* name;
  std::function<at::Tensor(const AttentionMap&)> of_map;
  std::function<at::Tensor(const at::Tensor&)> of_weights;
};

TEST(AttentionMapGradientTest, GradientsAreThoseOfTheWeights) {
  Random random(6);
  const auto dtype = at::kDouble;
  const auto q = leaf(random.normal({2, 4, 5, 6}, dtype)),
             k = leaf(random.normal({2, 2, 7, 6}, dtype));
  auto terms = random.normal({1, 4, 5, 7}, dtype);
  terms.select(3, 2).fill_(-infinity);
  terms.select(2, 1).fill_(-infinity);  // sees nothing
  const auto added = leaf(terms);
  const auto table = leaf(random.normal({4, 11}, dtype));
  const auto mask = Mask::add(added) & Mask::causal() & Mask::relative(table);
  const AttentionMap map(q, k, mask);
  const auto weights = scaled_dot_product_attention(q, k, k, mask).weights;
  const std::vector<Method> methods{
      {"dense", [](const auto& m) { return m.dense(); }, [](const auto& w) { return w; }},
      {"head", [](const auto& m) { return m.head(1); },
       [](const auto& w) { return w.select(1, 1); }},
      {"rows", [](const auto& m) { return m.rows(1, 3); },
       [](const auto& w) { return w.narrow(2, 1, 2); }},
      {"block", [](const auto& m) { return m.block(3, {0, 4}, {2, 6}); },
       [](const auto& w) { return w.select(1, 3).narrow(1, 0, 4).narrow(2, 2, 4); }},
      {"mean", [](const auto& m) { return m.mean(); }, [](const auto& w) { return w.mean(1); }},
      {"entropy", [](const auto& m) { return m.entropy(); },
       [](const auto& w) { return -(w * at::log(w.masked_fill(w == 0, 1))).sum(-1); }},
      {"received", [](const auto& m) { return m.received(); },
       [](const auto& w) { return w.sum(2); }},
      {"distance", [](const auto& m) { return m.distance(); },
       [](const auto& w) { return distance_of(w, 7); }},
      {"top_k", [](const auto& m) { return m.top_k(2).values; },
       [](const auto& w) { return std::get<0>(w.topk(2, -1)); }},
      {"pooled", [](const auto& m) { return m.pooled(2, 3); },
       [](const auto& w) { return pooled_of(w, 2, 3); }},
      {"log_sum_exp of live rows",
       [](const auto& m) { return m.log_sum_exp().narrow(2, 2, 3); },
       [&](const auto&) {
         const auto keys = k.repeat_interleave(2, 1).transpose(-2, -1);
         const auto scores =
             at::matmul(q, keys) / std::sqrt(6.0) + added + table.unfold(1, 7, 1).flip(1);
         const auto later = at::ones({5, 7}, at::kBool).triu(3);
         return scores.masked_fill(later, -infinity).narrow(2, 2, 3).logsumexp(-1);
       }},
  };
  for (const auto& method : methods) {
    const auto actual = method.of_map(map), expected = method.of_weights(weights);
    const auto upstream = random.normal(expected.sizes(), dtype);
    const auto grads = torch::autograd::grad({actual}, {q, k, added, table}, {upstream}, true);
    const auto wanted =
        torch::autograd::grad({expected}, {q, k, added, table}, {upstream}, true);
    const char* names[] = {"query", "key", "mask", "table"};
    for (size_t i = 0; i < grads.size(); ++i) {
      EXPECT_TRUE(is_close(grads[i], wanted[i], 1e-13)) << method.name << ", " << names[i];
      EXPECT_GT(grads[i].abs().max().item<double>(), 0) << method.name << ", " << names[i];
    }
  }
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(map.entropy().requires_grad());
  }
  EXPECT_FALSE(map.detach().entropy().requires_grad());
  EXPECT_TRUE(is_close(map.detach().entropy(), map.entropy(), 1e-14));
}

TEST(AttentionMapGradientTest, InputsComputedFromOneAnotherGetGradientsOfTheirOwnUseOnly) {
  Random random(12);
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    const auto x = leaf(random.normal({2, 2, 3, 4}, dtype));
    const auto added = x.narrow(3, 0, 3);
    const auto mask = Mask::add(added) & Mask::add(added);
    const auto options = AttentionOptions().sinks(x.mean({0, 2, 3}));
    const auto first_and_second = [&](const at::Tensor& weights) {
      const auto first = torch::autograd::grad({weights.pow(2).sum()}, {x}, {}, true, true)[0];
      return std::pair{first, torch::autograd::grad({first.pow(2).sum()}, {x})[0]};
    };
    const auto [first, second] =
        first_and_second(AttentionMap(x, x.sin(), mask, options).dense());
    const auto [wanted_first, wanted_second] =
        first_and_second(scaled_dot_product_attention(x, x.sin(), x, mask, options).weights);
    const double tolerance = dtype == at::kDouble ? 1e-13 : 1e-5;
    EXPECT_TRUE(is_close(first, wanted_first, tolerance));
    EXPECT_TRUE(is_close(second, wanted_second, tolerance));
    EXPECT_GT(first.abs().max().item<double>(), 1e-2);
  }
}

// 2^21 weights at a time are 2,000 of these rows: parts of one head and of several, summed and
// put together, in the backward of the kernels' path as well.
TEST(AttentionMapGradientTest, GradientsOfLongInputsAreFormedByParts) {
  if (std::getenv("MHA_CPU_ISA")) GTEST_SKIP() << "the backward is the same on each";
  Random random(10);
  const int64_t l = 2500, s = 1000;
  const auto q = leaf(random.normal({1, 2, l, 4})), k = leaf(random.normal({1, 1, s, 4}));
  const auto added = leaf(random.normal({1, 1, l, s})), sinks = leaf(random.normal({2}));
  const auto mask = Mask::add(added) & Mask::causal();
  const auto options = AttentionOptions().softcap(2).sinks(sinks);
  const AttentionMap map(q, k, mask, options);
  const auto weights = scaled_dot_product_attention(q, k, k, mask, options).weights;
  const std::vector<Method> methods{
      {"rows", [](const auto& m) { return m.rows(5, 2405); },
       [](const auto& w) { return w.narrow(2, 5, 2400); }},
      {"mean", [](const auto& m) { return m.mean(); }, [](const auto& w) { return w.mean(1); }},
      {"entropy", [](const auto& m) { return m.entropy(); },
       [](const auto& w) { return entropy_of(w); }},
      {"received", [](const auto& m) { return m.received(); },
       [](const auto& w) { return w.sum(2); }},
      {"distance", [](const auto& m) { return m.distance(); },
       [](const auto& w) { return distance_of(w, s); }},
      {"top_k", [](const auto& m) { return m.top_k(3).values; },
       [](const auto& w) { return std::get<0>(w.topk(3, -1)); }},
      {"pooled", [](const auto& m) { return m.pooled(7, 9); },
       [](const auto& w) { return pooled_of(w.to(at::kDouble), 7, 9); }},
  };
  for (const auto& method : methods) {
    const auto actual = method.of_map(map), expected = method.of_weights(weights);
    const auto upstream = random.normal(expected.sizes(), expected.scalar_type());
    const auto grads = torch::autograd::grad({actual}, {q, k, added, sinks},
                                             {upstream.to(actual.scalar_type())}, true);
    const auto wanted =
        torch::autograd::grad({expected}, {q, k, added, sinks}, {upstream}, true);
    for (size_t i = 0; i < grads.size(); ++i) {
      const double scale = wanted[i].abs().max().item<double>();
      EXPECT_TRUE(is_close(grads[i], wanted[i], 2e-5 * scale)) << method.name << ", " << i;
    }
  }
}

TEST(AttentionMapGradientTest, GradientsFlowThroughSoftCapAndSinks) {
  Random random(12);
  const auto dtype = at::kDouble;
  const auto q = leaf(random.normal({2, 4, 5, 6}, dtype)),
             k = leaf(random.normal({2, 2, 7, 6}, dtype)),
             sinks = leaf(random.normal({4}, dtype));
  const auto options = AttentionOptions().softcap(0.8).sinks(sinks);
  const AttentionMap map(q, k, Mask::causal(), options);
  const auto [output, weights] = scaled_dot_product_attention(q, k, k, Mask::causal(), options);
  const std::vector<Method> methods{
      {"dense", [](const auto& m) { return m.dense(); }, [](const auto& w) { return w; }},
      {"head", [](const auto& m) { return m.head(2); },
       [](const auto& w) { return w.select(1, 2); }},
      {"entropy", [](const auto& m) { return m.entropy(); },
       [](const auto& w) { return entropy_of(w); }},
      {"log_sum_exp", [](const auto& m) { return m.log_sum_exp(); },
       [&](const auto& w) {  // of the sink's weight
         return sinks.view({4, 1}) - at::log(1 - w.sum(-1));
       }},
  };
  for (const auto& method : methods) {
    const auto actual = method.of_map(map), expected = method.of_weights(weights);
    const auto upstream = random.normal(expected.sizes(), dtype);
    const auto grads = torch::autograd::grad({actual}, {q, k, sinks}, {upstream}, true);
    const auto wanted = torch::autograd::grad({expected}, {q, k, sinks}, {upstream}, true);
    for (size_t i = 0; i < grads.size(); ++i) {
      EXPECT_TRUE(is_close(grads[i], wanted[i], 1e-12)) << method.name << ", " << i;
      EXPECT_GT(grads[i].abs().max().item<double>(), 0) << method.name << ", " << i;
    }
  }
  EXPECT_FALSE(map.detach().entropy().requires_grad());
}

TEST(AttentionMapGradientTest, GradientsHaveGradients) {
  Random random(11);
  const auto q = leaf(random.normal({1, 2, 4, 3}, at::kDouble));
  const auto k = leaf(random.normal({1, 1, 5, 3}, at::kDouble));
  const auto twice = [&](const at::Tensor& entropy) {
    const auto grads = torch::autograd::grad({entropy.sum()}, {q, k}, {}, true, true);
    return torch::autograd::grad({grads[0].square().sum() + grads[1].pow(3).sum()}, {q, k});
  };
  const auto actual = twice(AttentionMap(q, k, Mask::causal()).entropy());
  const auto expected =
      twice(entropy_of(scaled_dot_product_attention(q, k, k, Mask::causal()).weights));
  EXPECT_TRUE(is_close(actual[0], expected[0], 1e-12));
  EXPECT_TRUE(is_close(actual[1], expected[1], 1e-12));
}

TEST(AttentionMapGradientTest, NothingIsKeptOnceResultsAreGone) {
  const auto q = torch::randn({1, 2, 4, 8}).requires_grad_();
  {
    const AttentionMap map(q, q);
    const auto top = map.top_k(2);
    const auto summary = map.summary();
    (top.values.sum() + summary.entropy.sum() + map.pooled(2, 2).sum()).backward();
  }
  EXPECT_EQ(q.use_count(), 1u);
}

TEST(AttentionMapGradientTest, AnEntropyPenaltyTrainsTheModulesProjections) {
  MultiHeadAttention module(16, 2);
  const auto x = torch::randn({2, 9, 16});
  const auto [output, map] = module->trace(x, {}, {}, Mask::causal());
  (output.sum() + map.entropy().sum()).backward();
  const auto together = module->W_q->weight.grad().clone();
  module->zero_grad();
  const auto [plain, weights] = module->forward(x, {}, {}, Mask::causal());
  (plain.sum() - (weights * at::log(weights.masked_fill(weights == 0, 1))).sum()).backward();
  EXPECT_TRUE(is_close(together, module->W_q->weight.grad(), 1e-4));
  EXPECT_GT(together.abs().max().item<double>(), 1e-2);
}

}  // namespace
}  // namespace mha::test
