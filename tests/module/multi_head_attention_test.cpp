// Guards the module's call: its layouts, options and results, and what happens to padding in
// its inputs. Numbers are measured against the loops of oracle.h; float32 results of unit scale
// differ from them by a few 1e-7.
#include <mha/multi_head_attention.h>

#include "support/expect.h"
#include "support/oracle.h"

namespace mha {
namespace {

using test::all_zero;
using test::is_bit_equal;
using test::is_close;
using test::is_finite;
using test::is_same_but_for_blas;
using test::is_same_result;
using test::leaf;
using test::nan;

constexpr double rounding = 2e-6;

MultiHeadAttention module_with(const MultiHeadAttentionOptions& options) {
  torch::manual_seed(41);
  return MultiHeadAttention(options);
}
MultiHeadAttentionOptions options() {
  return MultiHeadAttentionOptions(12, 3);
}

// N = 2, L = 4, S = 5, E = 12.
struct Inputs {
  at::Tensor query = at::randn({2, 4, 12}), key = at::randn({2, 5, 12}),
             value = at::randn({2, 5, 12});
};
Inputs transposed(const Inputs& in) {
  return {in.query.transpose(0, 1), in.key.transpose(0, 1), in.value.transpose(0, 1)};
}

void expect_oracle(MultiHeadAttention& module, const Inputs& in, const Mask& mask = {}) {
  const auto expected = test::oracle_module(module, in.query, in.key, in.value, mask);
  const auto [output, weights] = module->forward(in.query, in.key, in.value, mask);
  EXPECT_TRUE(is_close(output, expected.output, rounding));
  EXPECT_TRUE(is_close(weights, expected.weights, rounding));
}

TEST(MultiHeadAttentionTest, EqualsTheOracleWithEveryOptionOfItsSizes) {
  auto plain = module_with(options());
  expect_oracle(plain, Inputs());
  auto head_dim = module_with(options().head_dim(7));
  expect_oracle(head_dim, Inputs(), Mask::causal());
  auto no_bias = module_with(options().bias(false));
  expect_oracle(no_bias, Inputs());
  auto scaled = module_with(options().scale(1.7));
  expect_oracle(scaled, Inputs());
  auto kdim = module_with(options().kdim(5));
  expect_oracle(kdim, {at::randn({2, 4, 12}), at::randn({2, 5, 5}), at::randn({2, 5, 12})});
  auto vdim = module_with(options().vdim(7));
  expect_oracle(vdim, {at::randn({2, 4, 12}), at::randn({2, 5, 12}), at::randn({2, 5, 7})});
  auto both = module_with(options().kdim(5).vdim(7));
  expect_oracle(both, {at::randn({2, 4, 12}), at::randn({2, 5, 5}), at::randn({2, 5, 7})});
}

TEST(MultiHeadAttentionTest, AppendedKeysAreOpenToEveryQueryWhateverTheMaskSays) {
  for (const bool bias_kv : {false, true}) {
    for (const bool zero_attn : {false, true}) {
      auto module = module_with(options().add_bias_kv(bias_kv).add_zero_attn(zero_attn));
      const Inputs in;
      const Mask mask = Mask::lengths(torch::tensor({3, 0})) & Mask::add(at::randn({4, 5}));
      expect_oracle(module, in, mask);
      const auto weights = module(in.query, in.key, in.value, mask).weights;
      EXPECT_EQ(weights.size(-1), 5 + bias_kv + zero_attn);
      EXPECT_TRUE(all_zero(weights.slice(3, 3, 5)[0]));
      EXPECT_TRUE(all_zero(weights.slice(3, 0, 5)[1]));
      EXPECT_EQ(weights.slice(3, 5).gt(0).all().item<bool>(), true);
    }
  }
}

// A head size of 16 lays the heads out in another way than other sizes.
TEST(MultiHeadAttentionTest, GroupedHeadsEqualTheOracleWithEveryOptionOfItsSizes) {
  for (const int64_t head_dim : {3, 16}) {
    for (const int64_t kv_heads : {1, 2, 3, 6}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
        for (const bool recorded : {false, true}) {
          auto module = module_with(MultiHeadAttentionOptions(12, 6)
                                        .head_dim(head_dim)
                                        .num_kv_heads(kv_heads)
                                        .kdim(5)
                                        .add_bias_kv(true)
                                        .add_zero_attn(true)
                                        .dtype(dtype));
          EXPECT_EQ(module->W_k->weight.sizes(),
                    at::IntArrayRef({kv_heads * head_dim, int64_t{5}}));
          EXPECT_EQ(module->W_v->weight.sizes(),
                    at::IntArrayRef({kv_heads * head_dim, int64_t{12}}));
          EXPECT_EQ(module->bias_k.size(2), kv_heads * head_dim);
          const at::AutoGradMode mode(recorded);
          const Inputs in{at::randn({2, 4, 12}, dtype), at::randn({2, 5, 5}, dtype),
                          at::randn({2, 5, 12}, dtype)};
          expect_oracle(module, in, Mask::causal());
        }
      }
    }
  }
}

// Head by head, what a module with a pair for each head would have.
TEST(MultiHeadAttentionTest, GroupedHeadsEqualRepeatedOnes) {
  auto grouped = module_with(MultiHeadAttentionOptions(12, 6).num_kv_heads(2));
  auto repeated = module_with(MultiHeadAttentionOptions(12, 6));
  {
    const torch::NoGradGuard no_grad;
    const auto repeat = [](const at::Tensor& rows) {  // (2 heads of size 2, ...) to 6 heads
      return rows.unflatten(0, {2, 2}).repeat_interleave(3, 0).flatten(0, 1);
    };
    for (const auto& [to, from] :
         {std::pair{repeated->W_k, grouped->W_k}, std::pair{repeated->W_v, grouped->W_v}}) {
      to->weight.copy_(repeat(from->weight));
      to->bias.copy_(repeat(from->bias));
    }
    repeated->W_q = torch::nn::Linear(repeated->replace_module("W_q", grouped->W_q));
    repeated->W_o = torch::nn::Linear(repeated->replace_module("W_o", grouped->W_o));
  }
  const auto x = at::randn({2, 7, 12});
  const auto expected = repeated(x, at::Tensor(), at::Tensor(), Mask::causal());
  const auto actual = grouped(x, at::Tensor(), at::Tensor(), Mask::causal());
  EXPECT_TRUE(is_close(actual.output, expected.output, rounding));
  EXPECT_TRUE(is_close(actual.weights, expected.weights, rounding));
}

TEST(MultiHeadAttentionTest, SelfAttentionIsACallWithOneTensor) {
  auto module = module_with(options());
  const auto x = at::randn({2, 4, 12});
  const auto one = module(x), three = module(x, x, x);
  EXPECT_TRUE(is_same_result(one.output, three.output));
  EXPECT_TRUE(is_same_result(one.weights, three.weights));
}

TEST(MultiHeadAttentionTest, SequenceFirstTransposesInputsAndOutputButNotTheWeights) {
  auto batch_first = module_with(options()),
       sequence_first = module_with(options().batch_first(false));
  const Inputs in, across = transposed(in);
  for (const Mask& mask : {Mask(), Mask::lengths(torch::tensor({5, 2}))}) {
    const auto a = batch_first(in.query, in.key, in.value, mask);
    const auto b = sequence_first(across.query, across.key, across.value, mask);
    EXPECT_TRUE(is_close(b.output, a.output.transpose(0, 1), 1e-6));
    EXPECT_TRUE(is_close(b.weights, a.weights, 1e-6));
  }
}

TEST(MultiHeadAttentionTest, AnUnbatchedCallDropsTheBatchDimensionEverywhere) {
  for (const bool batch_first : {true, false}) {
    auto module = module_with(options().batch_first(batch_first));
    const auto q = at::randn({4, 12}), k = at::randn({5, 12});
    const int64_t n = batch_first ? 0 : 1;
    for (const Mask& mask :
         {Mask(), Mask::causal(), Mask::keep_keys(torch::tensor({1, 1, 0, 1, 0})),
          Mask::keep(at::rand({3, 4, 5}).gt(0.3))}) {
      for (const auto kind : {Weights::averaged, Weights::per_head}) {
        const auto one = module(q, k, k, mask, kind);
        const auto batch = module(q.unsqueeze(n), k.unsqueeze(n), k.unsqueeze(n), mask, kind);
        EXPECT_TRUE(is_same_result(one.output, batch.output.squeeze(n)));
        EXPECT_TRUE(is_same_result(one.weights, batch.weights.squeeze(0)));
      }
    }
  }
}

TEST(MultiHeadAttentionTest, WeightsComeAsTheOptionSaysUnlessTheCallDoes) {
  const Inputs in;
  auto module = module_with(options());
  const auto per_head = module(in.query, in.key, in.value);
  EXPECT_EQ(per_head.weights.sizes(), (std::vector<int64_t>{2, 3, 4, 5}));
  for (const auto option : {Weights::none, Weights::averaged, Weights::per_head}) {
    module->options.weights(option);
    for (const auto argument :
         {std::optional<Weights>(), std::optional(Weights::none),
          std::optional(Weights::averaged), std::optional(Weights::per_head)}) {
      const auto result = module(in.query, in.key, in.value, Mask(), argument);
      EXPECT_TRUE(is_same_result(result.output, per_head.output));
      switch (argument.value_or(option)) {
        case Weights::none:
          EXPECT_FALSE(result.weights.defined());
          break;
        case Weights::averaged:
          EXPECT_TRUE(is_close(result.weights, per_head.weights.mean(1), 1e-7));
          break;
        case Weights::per_head:
          EXPECT_TRUE(is_same_result(result.weights, per_head.weights));
          break;
      }
    }
  }
}

TEST(MultiHeadAttentionTest, EmptyBatchQueriesOrKeysGiveDefinedResultsAndGradients) {
  for (const bool appended : {false, true}) {
    for (const auto& [n, l, s] :
         {std::array<int64_t, 3>{0, 4, 5}, {2, 0, 5}, {2, 4, 0}, {0, 0, 0}}) {
      auto module = module_with(options().add_bias_kv(appended));
      const auto q = leaf(at::randn({n, l, 12})), k = leaf(at::randn({n, s, 12})),
                 v = leaf(at::randn({n, s, 12}));
      const auto result = module(q, k, v, Mask::causal());
      EXPECT_EQ(result.weights.sizes(), (std::vector<int64_t>{n, 3, l, s + appended}));
      EXPECT_EQ(result.output.sizes(), (std::vector<int64_t>{n, l, 12}));
      if (s == 0 && !appended) {
        EXPECT_TRUE(is_bit_equal(result.output, module->W_o->bias.expand({n, l, 12})));
      }
      result.output.sum().backward();
      EXPECT_TRUE(all_zero(q.grad()));
      EXPECT_TRUE(all_zero(k.grad()));
      EXPECT_TRUE(all_zero(v.grad()));
      for (const auto& parameter : module->named_parameters()) {
        EXPECT_TRUE(is_finite(parameter->grad())) << parameter.key();
      }
    }
  }
}

TEST(MultiHeadAttentionTest, ADeadRowGivesTheBiasOfTheOutputProjection) {
  for (const bool bias : {true, false}) {
    auto module = module_with(options().bias(bias));
    const auto x = leaf(at::randn({2, 4, 12}));
    auto rows = at::ones({4, 4});
    rows[1].fill_(0);
    const auto [output, weights] = module->forward(x, x, x, Mask::keep(rows));
    const auto expected = bias ? module->W_o->bias.expand({2, 12}) : at::zeros({2, 12});
    EXPECT_TRUE(is_bit_equal(output.select(1, 1), expected));
    EXPECT_TRUE(all_zero(weights.select(2, 1)));
    output.select(1, 1).sum().backward();
    EXPECT_TRUE(all_zero(x.grad()));
    for (const auto& parameter : module->named_parameters()) {
      if (parameter.key() == "W_o.bias") continue;
      EXPECT_TRUE(all_zero(parameter->grad())) << parameter.key();
    }
  }
}

// The gradients of every input and parameter for the loss that sums output and weights,
// weighted.
std::vector<at::Tensor> results_and_gradients(const MultiHeadAttentionOptions& with,
                                              const Inputs& in, const Mask& mask) {
  auto module = module_with(with);
  const auto q = leaf(in.query), k = leaf(in.key), v = leaf(in.value);
  const auto [output, weights] = module->forward(q, k, v, mask);
  torch::manual_seed(42);
  at::Tensor((output * at::randn_like(output)).sum() +
             (weights * at::randn_like(weights)).sum())
      .backward();
  std::vector<at::Tensor> all{output, weights, q.grad(), k.grad(), v.grad()};
  for (const auto& parameter : module->parameters()) all.push_back(parameter.grad());
  return all;
}

TEST(MultiHeadAttentionTest, NanInWhatNoQuerySeesReachesNoResultAndNoGradient) {
  auto maps = at::ones({2, 3, 4, 5});
  maps.slice(3, 3).fill_(0);
  const std::vector<Mask> masks = {
      Mask::lengths(torch::tensor({3, 3})),
      Mask::lengths(torch::tensor({3, 3})) & Mask::causal(),
      Mask::block_keys(torch::tensor({0, 0, 0, 1, 1}).to(at::kBool)),
      Mask::keep(maps),
      Mask::add(maps.log()),
      Mask::causal(Mask::Alignment::top_left) & Mask::lengths(torch::tensor({3, 3}))};
  for (const auto& with :
       {options(), options().add_bias_kv(true), options().add_zero_attn(true),
        options().bias(false).batch_first(false)}) {
    for (const Mask& mask : masks) {
      const Inputs in;
      for (const double poison : {nan, 1.0 / 0.0}) {
        Inputs zeros{in.query, in.key.clone(), in.value.clone()};
        zeros.key.slice(1, 3).fill_(0);
        zeros.value.slice(1, 3).fill_(0);
        Inputs poisoned{in.query, in.key.clone(), in.value.clone()};
        poisoned.key.slice(1, 3).fill_(poison);
        poisoned.value.slice(1, 3).fill_(poison);
        const bool across = !with.batch_first();
        const auto expected =
            results_and_gradients(with, across ? transposed(zeros) : zeros, mask);
        const auto actual =
            results_and_gradients(with, across ? transposed(poisoned) : poisoned, mask);
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(is_same_but_for_blas(actual[i], expected[i])) << i << " with " << mask;
          EXPECT_TRUE(is_finite(actual[i])) << i << " with " << mask;
        }
      }
    }
  }
}

TEST(MultiHeadAttentionTest, NanInADeadQueryReachesNoResultAndNoGradient) {
  auto rows = at::ones({4, 5});
  rows[2].fill_(0);
  for (const Mask& mask : {Mask::keep(rows), Mask::add(rows.log())}) {
    Inputs zeros, poisoned;
    poisoned = {zeros.query.clone(), zeros.key, zeros.value};
    zeros.query.select(1, 2).fill_(0);
    poisoned.query.select(1, 2).fill_(nan);
    const auto expected = results_and_gradients(options(), zeros, mask);
    const auto actual = results_and_gradients(options(), poisoned, mask);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(is_same_but_for_blas(actual[i], expected[i])) << i << " with " << mask;
    }
  }
}

TEST(MultiHeadAttentionTest, NanInASeenKeyReachesExactlyTheQueriesThatSeeIt) {
  Inputs zeros, poisoned;
  poisoned = {zeros.query, zeros.key.clone(), zeros.value};
  zeros.key[0][3].fill_(0);
  poisoned.key[0][3].fill_(nan);
  auto module = module_with(options());
  // Bottom-right: query 0 of 4 sees keys 0 and 1 of 5, query 2 is the first to see key 3.
  const auto expected = module(zeros.query, zeros.key, zeros.value, Mask::causal());
  const auto actual = module(poisoned.query, poisoned.key, poisoned.value, Mask::causal());
  EXPECT_TRUE(
      is_same_result(actual.output[0].slice(0, 0, 2), expected.output[0].slice(0, 0, 2)));
  EXPECT_TRUE(actual.output[0].slice(0, 2).isnan().all().item<bool>());
  EXPECT_TRUE(is_same_result(actual.output[1], expected.output[1]));
}

TEST(MultiHeadAttentionTest, AnyStridesGiveTheResultOfContiguousCopies) {
  auto module = module_with(options());
  const auto packed = at::randn({2, 5, 3, 12});
  const std::vector<at::Tensor> strided = {
      packed.select(2, 0),
      packed.select(2, 2),
      at::randn({5, 2, 12}).transpose(0, 1),
      at::randn({12, 5, 2}).permute({2, 1, 0}),
      at::randn({1, 5, 12}).expand({2, 5, 12}),
      at::randn({2, 10, 24}).slice(1, 0, 10, 2).slice(2, 1, 24, 2)};
  for (const auto& q : strided) {
    for (const auto& k : strided) {
      const auto a = module(q, k, k, Mask::causal());
      const auto b = module(q.contiguous(), k.contiguous(), k.contiguous(), Mask::causal());
      EXPECT_TRUE(is_close(a.output, b.output, 1e-6));
      EXPECT_TRUE(is_close(a.weights, b.weights, 1e-6));
    }
  }
}

TEST(MultiHeadAttentionTest, InferenceModeAndNoGradGiveTheRecordedResult) {
  auto module = module_with(options());
  const Inputs in;
  const auto recorded = module(in.query, in.key, in.value, Mask::causal()).output.detach();
  {
    torch::NoGradGuard no_grad;
    EXPECT_TRUE(
        is_same_result(module(in.query, in.key, in.value, Mask::causal()).output, recorded));
  }
  torch::InferenceMode inference;
  const auto output = module(in.query, in.key, in.value, Mask::causal()).output;
  EXPECT_TRUE(is_same_result(output, recorded));
  EXPECT_TRUE(output.is_inference());
}

TEST(MultiHeadAttentionTest, ANewDtypeBringsTheResultWithIt) {
  const Inputs in;
  for (const auto& [dtype, tolerance] :
       {std::pair{at::kDouble, 1e-12}, {at::kBFloat16, 2e-2}, {at::kHalf, 2e-3}}) {
    auto module = module_with(options());
    module->to(dtype);
    const auto q = in.query.to(dtype), k = in.key.to(dtype), v = in.value.to(dtype);
    const auto expected = test::oracle_module(module, q, k, v, Mask::causal());
    const auto [output, weights] = module->forward(q, k, v, Mask::causal());
    EXPECT_EQ(output.scalar_type(), dtype);
    EXPECT_EQ(weights.scalar_type(), dtype);
    EXPECT_TRUE(is_close(output, expected.output, tolerance)) << dtype;
  }
}

}  // namespace
}  // namespace mha
