// Guards the contract's section "Numbers" for scaled_dot_product_attention: repeatability,
// threads, batch, strides, second-order gradients. Bits are those of the kernels; what
// LibTorch's BLAS is part of is held to `blas_tolerance`.

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <mha/multi_head_attention.h>
#include <mha/scaled_dot_product_attention.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "numerics/numerics_call.h"
#include "runtime/attention_path.h"
#include "support/oracle.h"
#include "support/support.h"
#include "support/thread_count.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

struct NamedPair {
  std::string name;
  at::Tensor actual, expected;
};
std::vector<NamedPair> gradients(const Results& actual, const Results& expected) {
  std::vector<NamedPair> pairs{{"query gradient", actual.query, expected.query},
                               {"key gradient", actual.key, expected.key},
                               {"value gradient", actual.value, expected.value}};
  if (expected.added.defined())
    pairs.push_back({"mask gradient", actual.added, expected.added});
  return pairs;
}

void expect_same(const Results& actual, const Results& expected, const std::string& where) {
  EXPECT_TRUE(is_same_result(actual.output, expected.output)) << "output, " << where;
  EXPECT_TRUE(is_same_result(actual.weights, expected.weights)) << "weights, " << where;
  for (const auto& pair : gradients(actual, expected))
    EXPECT_TRUE(is_same_result(pair.actual, pair.expected)) << pair.name << ", " << where;
}

class RepeatabilityTest : public ::testing::TestWithParam<at::ScalarType> {
  const ThreadCount restored_{at::get_num_threads()};
};

TEST_P(RepeatabilityTest, TheSameCallRepeatedIsBitEqual) {
  Random random(5);
  for (const auto kind : {MaskKind::none, MaskKind::add, MaskKind::keep, MaskKind::padding}) {
    const auto call = draw(random, {2, 4, 2, 65, 70, 32, 24}, kind, GetParam());
    const auto first = run_library(call);
    for (int repeat = 0; repeat < 3; ++repeat) expect_same(run_library(call), first, call.name);
  }
}

TEST_P(RepeatabilityTest, AnyNumberOfThreadsGivesTheSameBits) {
  Random random(6);
  for (const Sizes sizes :
       {Sizes{2, 4, 4, 33, 33, 16, 16}, Sizes{2, 4, 4, 128, 128, 64, 64},
        Sizes{1, 2, 1, 300, 257, 64, 48}, Sizes{1, 1, 1, 1, 1000, 64, 64}}) {
    for (const auto kind : {MaskKind::none, MaskKind::add, MaskKind::keep}) {
      const auto call = draw(random, sizes, kind, GetParam());
      at::set_num_threads(1);
      const auto alone = run_library(call);
      for (const int threads : {2, 4, 8}) {
        at::set_num_threads(threads);
        expect_same(run_library(call), alone,
                    std::to_string(threads) + " threads, " + call.name);
      }
    }
  }
}

// What a call under `options` gives, with the gradients of all that asks for one.
std::vector<at::Tensor> run_kernels(const at::Tensor& query, const at::Tensor& key,
                                    const at::Tensor& value, const Mask& mask,
                                    const AttentionOptions& options) {
  torch::manual_seed(12);  // one pattern of dropout
  std::vector<at::Tensor> leaves{query, key, value};
  for (const auto& term : mask.terms()) {
    if (term.tensor.defined() && term.tensor.requires_grad()) leaves.push_back(term.tensor);
  }
  if (options.sinks().defined()) leaves.push_back(options.sinks());
  const auto [output, weights] = scaled_dot_product_attention(query, key, value, mask, options);
  auto results = torch::autograd::grad({output}, leaves, {output.detach().cos()});
  results.push_back(output);
  if (weights.defined()) results.push_back(weights);
  return results;
}

TEST_P(RepeatabilityTest, EveryMaskAndOptionGivesTheSameBitsAtAnyNumberOfThreads) {
  const auto dtype = GetParam();
  if (dtype == at::kDouble || detail::kernels_are_off()) {
    GTEST_SKIP() << "the plain path's gradients are the BLAS's";
  }
  Random random(11);
  for (const auto& [l, s] : {std::pair<int64_t, int64_t>{150, 150}, {40, 1300}, {2, 2500}}) {
    const auto leaf = [&](at::IntArrayRef shape) {
      return random.normal(shape, dtype).requires_grad_();
    };
    const auto query = leaf({2, 4, l, 16}), key = leaf({2, 2, s, 16}),
               value = leaf({2, 2, s, 24});
    const auto ids = [&](int64_t places) {
      return at::arange(places).mul(3).div(places, "floor");
    };
    const auto offsets = at::tensor({s - l, int64_t{3}});
    const std::vector<Mask> masks{
        Mask(),
        Mask::causal(),
        Mask::causal(offsets) & Mask::lengths(at::tensor({s, s / 2})),
        Mask::window(30, 4) & Mask::alibi(at::tensor({1.0f, 0.5f, 0.1f, 0.01f})),
        Mask::window(20, -1, offsets) & Mask::block(random.coins({2, 4, l, s}, 0.2)),
        Mask::documents(ids(l), ids(s)) & Mask::keep_keys(random.coins({2, s}, 0.9)),
        Mask::relative(leaf({4, l + s - 1})) & Mask::causal(),
        Mask::relative(leaf({1, l + s - 1})),
        Mask::add(leaf({l, s})) & Mask::add(leaf({2, 1, l, s})),
        Mask::add(leaf({8, l, s})) & Mask::window(100, 100)};
    const std::vector<AttentionOptions> all{
        AttentionOptions().weights(Weights::none),
        AttentionOptions().weights(Weights::averaged).softcap(3).sinks(leaf({4})),
        AttentionOptions().weights(Weights::per_head).dropout(0.2)};
    for (size_t i = 0; i < masks.size(); ++i) {
      const auto& options = all[i % all.size()];
      at::set_num_threads(1);
      const auto alone = run_kernels(query, key, value, masks[i], options);
      for (const int threads : {2, 4, 8}) {
        at::set_num_threads(threads);
        const auto results = run_kernels(query, key, value, masks[i], options);
        for (size_t r = 0; r < alone.size(); ++r) {
          EXPECT_TRUE(is_bit_equal(results[r], alone[r]))
              << "result " << r << ", " << masks[i] << ", L=" << l << ", S=" << s << ", "
              << threads << " threads";
        }
      }
    }
  }
}

TEST_P(RepeatabilityTest, StepsOverACacheGiveTheSameBitsAtAnyNumberOfThreads) {
  if (GetParam() == at::kDouble || detail::kernels_are_off()) {
    GTEST_SKIP() << "the plain path's products are the BLAS's";
  }
  at::NoGradGuard no_grad;
  Random random(13);
  const auto x = random.normal({2, 1200, 32}, GetParam());
  torch::manual_seed(14);
  MultiHeadAttention module(MultiHeadAttentionOptions(32, 4)
                                .num_kv_heads(2)
                                .dtype(GetParam())
                                .rotary(RotaryOptions()));
  const auto run = [&](int threads) {
    at::set_num_threads(threads);
    const auto call = CallOptions(Mask::causal()).weights(Weights::none).cache(KVCache());
    std::vector<at::Tensor> outputs;
    const auto step = [&](int64_t first, int64_t count, const at::Tensor& lengths) {
      outputs.push_back(
          module->attend(x.narrow(1, first, count), CallOptions(call).new_lengths(lengths))
              .output);
    };
    step(0, 1150, {});
    for (int64_t t = 1150; t < 1160; ++t) step(t, 1, {});
    step(1160, 30, at::tensor({30, 11}));
    for (int64_t t = 1190; t < 1200; ++t) step(t, 1, {});
    return at::cat(outputs, 1);
  };
  const auto alone = run(1);
  for (const int threads : {2, 4, 8}) EXPECT_TRUE(is_bit_equal(run(threads), alone)) << threads;
}

TEST_P(RepeatabilityTest, BatchSizeAndPlaceInTheBatchChangeNoBit) {
  Random random(7);
  for (const Sizes sizes : {Sizes{5, 3, 3, 7, 7, 8, 8}, Sizes{5, 4, 4, 33, 65, 16, 24},
                            Sizes{3, 4, 4, 128, 128, 64, 64}, Sizes{6, 4, 2, 1, 129, 64, 64}}) {
    for (const auto kind : {MaskKind::none, MaskKind::padding, MaskKind::window_and_add}) {
      const auto call = draw(random, sizes, kind, GetParam());
      const auto together = run_library(call);
      for (int64_t n = 0; n < sizes.N; ++n) {
        const auto sample = [n](const at::Tensor& tensor) {
          return tensor.detach().narrow(0, n, 1).clone().requires_grad_(tensor.requires_grad());
        };
        Call single;
        single.query = sample(call.query);
        single.key = sample(call.key);
        single.value = sample(call.value);
        single.grad_output = sample(call.grad_output);
        for (const auto& term : call.mask.terms()) {
          if (term.kind == Mask::Term::Kind::keep_keys)
            single.mask = Mask::keep_keys(sample(term.tensor));
          if (term.kind == Mask::Term::Kind::window)
            single.mask = single.mask & Mask::window(term.left, term.right, term.alignment);
          if (term.kind == Mask::Term::Kind::add)
            single.mask = single.mask & Mask::add(single.added = sample(term.tensor));
        }
        const auto one = run_library(single);
        Results expected;
        expected.output = sample(together.output);
        expected.weights = sample(together.weights);
        expected.query = sample(together.query);
        expected.key = sample(together.key);
        expected.value = sample(together.value);
        if (call.added.defined()) expected.added = sample(together.added);
        expect_same(one, expected, "sample " + std::to_string(n) + " of " + call.name);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, RepeatabilityTest,
                         ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf),
                         [](const ::testing::TestParamInfo<at::ScalarType>& dtype) {
                           return std::string(c10::toString(dtype.param));
                         });

// Views whose elements do not lie where those of a contiguous tensor do.
struct View {
  std::string name;
  at::Tensor query, key, value;
};

std::vector<View> draw_views(Random& random, at::ScalarType dtype) {
  constexpr int64_t N = 3, H = 4, L = 9, D = 16;
  const auto normal = [&](at::IntArrayRef shape) { return random.normal(shape, dtype); };
  std::vector<View> views;
  views.push_back({"heads behind the sequence", normal({N, L, H, D}).transpose(1, 2),
                   normal({N, L, H, D}).transpose(1, 2), normal({N, L, H, D}).transpose(1, 2)});
  views.push_back({"head size not innermost", normal({N, H, D, L}).transpose(2, 3),
                   normal({N, H, D, L}).transpose(2, 3), normal({N, H, D, L}).transpose(2, 3)});
  const auto every_second = [&] {
    return normal({N, H, 2 * L + 1, 2 * D}).slice(2, 1, 2 * L + 1, 2).slice(3, 0, 2 * D, 2);
  };
  views.push_back({"every second element", every_second(), every_second(), every_second()});
  views.push_back({"expanded over batch and heads", normal({1, H, L, D}).expand({N, H, L, D}),
                   normal({N, 1, L, D}).expand({N, H, L, D}),
                   normal({1, 1, L, D}).expand({N, H, L, D})});
  views.push_back({"one row for all", normal({N, H, 1, D}).expand({N, H, L, D}),
                   normal({N, H, 1, 1}).expand({N, H, L, D}),
                   normal({N, H, 1, D}).expand({N, H, L, D})});
  const auto packed = normal({N, L, 3, H, D}).permute({2, 0, 3, 1, 4});
  views.push_back({"packed qkv", packed[0], packed[1], packed[2]});
  const auto same = normal({N, L, H, D}).transpose(1, 2);
  views.push_back({"one tensor three times", same, same, same});
  return views;
}

class StridesTest : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(StridesTest, ViewsGiveWhatContiguousCopiesGiveAndAreNotModified) {
  const auto dtype = GetParam();
  Random random(8);
  for (auto& view : draw_views(random, dtype)) {
    const auto L = view.query.size(2), S = view.key.size(2);
    // The mask too is a view: the transpose of a contiguous tensor.
    const auto mask_values = random.normal({S, L}, dtype).t();
    const auto run = [&](const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const at::Tensor& mask) {
      Call call;
      // A leaf of autograd may be a view of any strides.
      call.query = query.detach().requires_grad_();
      call.key = key.detach().requires_grad_();
      call.value = value.detach().requires_grad_();
      call.added = mask.detach().requires_grad_();
      call.mask = Mask::add(call.added) & Mask::causal();
      call.grad_output = at::ones_like(value).cumsum(2) / 10;
      return run_library(call);
    };
    // Where elements share memory a write through one of them would show in the others.
    const auto copy = [](const at::Tensor& tensor) {
      return tensor.clone(at::MemoryFormat::Contiguous);
    };
    const auto query = copy(view.query), key = copy(view.key), value = copy(view.value),
               mask = copy(mask_values);
    const auto expected = run(query, key, value, mask);
    const auto actual = run(view.query, view.key, view.value, mask_values);
    expect_same(actual, expected, view.name);
    EXPECT_TRUE(is_bit_equal(view.query, query)) << view.name;
    EXPECT_TRUE(is_bit_equal(view.key, key)) << view.name;
    EXPECT_TRUE(is_bit_equal(view.value, value)) << view.name;
    EXPECT_TRUE(is_bit_equal(mask_values, mask)) << view.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, StridesTest,
                         ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf),
                         [](const ::testing::TestParamInfo<at::ScalarType>& dtype) {
                           return std::string(c10::toString(dtype.param));
                         });

TEST(InputsTest, NoCallModifiesItsInputsWhateverTheMaskAndTheWeights) {
  Random random(9);
  for (const auto kind : {MaskKind::none, MaskKind::add, MaskKind::keep, MaskKind::causal,
                          MaskKind::padding, MaskKind::window_and_add}) {
    for (const auto weights : {Weights::none, Weights::averaged, Weights::per_head}) {
      const auto call = draw(random, {2, 4, 2, 5, 7, 8, 3}, kind, at::kFloat);
      std::vector<at::Tensor> inputs{call.query, call.key, call.value, call.grad_output};
      for (const auto& term : call.mask.terms())
        if (term.tensor.defined()) inputs.push_back(term.tensor);
      std::vector<at::Tensor> copies;
      for (const auto& input : inputs) copies.push_back(input.detach().clone());
      run_library(call, weights);
      for (size_t i = 0; i < inputs.size(); ++i)
        EXPECT_TRUE(is_bit_equal(inputs[i], copies[i])) << "tensor " << i << ", " << call.name;
    }
  }
}

TEST(SecondOrderTest, GradientsOfGradientsAreTheDerivativesOfTheOraclesGradients) {
  // g(t) = sum(gradients(x + t direction) * probe); its derivative at 0 is taken by autograd's
  // double backward and by central differences of the oracle's analytic gradients. The step's
  // cube and rounding over the step both come to 1e-10.
  constexpr double step = 1e-5;
  Random random(10);
  for (const auto kind : {MaskKind::none, MaskKind::add, MaskKind::keep, MaskKind::causal,
                          MaskKind::padding, MaskKind::window_and_add}) {
    const auto call = draw(random, {2, 4, 2, 5, 7, 8, 3}, kind, at::kDouble);
    const std::vector<at::Tensor> inputs{call.query, call.key, call.value};
    std::vector<at::Tensor> directions, probes;
    for (const auto& input : inputs) {
      directions.push_back(random.normal(input.sizes(), at::kDouble));
      probes.push_back(random.normal(input.sizes(), at::kDouble));
    }

    const auto output =
        mha::scaled_dot_product_attention(call.query, call.key, call.value, call.mask).output;
    const auto gradients = torch::autograd::grad({output}, inputs, {call.grad_output}, true,
                                                 /*create_graph=*/true);
    auto g = at::zeros({}, at::kDouble);
    for (size_t i = 0; i < inputs.size(); ++i) g = g + (gradients[i] * probes[i]).sum();
    const auto second = torch::autograd::grad({g}, inputs);
    double actual = 0;
    for (size_t i = 0; i < inputs.size(); ++i)
      actual += (second[i] * directions[i]).sum().item<double>();

    const auto g_at = [&](double t) {
      const auto at_t = oracle_attention_backward(
          call.query.detach() + t * directions[0], call.key.detach() + t * directions[1],
          call.value.detach() + t * directions[2], call.dense(), call.scale(), call.grad_output,
          {});
      return ((at_t.query * probes[0]).sum() + (at_t.key * probes[1]).sum() +
              (at_t.value * probes[2]).sum())
          .item<double>();
    };
    const double expected = (g_at(step) - g_at(-step)) / (2 * step);
    EXPECT_NEAR(actual, expected, 1e-7 * std::max(1.0, std::abs(expected))) << call.name;
  }
}

}  // namespace
}  // namespace mha::test
