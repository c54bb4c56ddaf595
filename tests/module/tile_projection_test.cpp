// Guards linear layers in bfloat16 on matrix tiles: outputs and inputs of any layout, the three
// gradients and those of gradients, and bits that depend on neither threads nor other samples.
//
// Against products in double of the same bfloat16 numbers. A float32 sum of `depth` products is
// within depth * 2^-24 * sum |a b| of theirs, and the one rounding to bfloat16 adds 2^-8 of the
// result at most (half a unit is 2^-9 to 2^-8 of it).
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <vector>

#include "module/projection.h"
#include "runtime/cpu_kernels.h"
#include "support/every_isa_test.h"
#include "support/support.h"
#include "support/thread_count.h"

namespace mha::test {
namespace {

using detail::PackedWeights;
using detail::Projection;

at::Tensor numbers(at::IntArrayRef sizes) {
  return at::randn(sizes).to(at::kBFloat16);
}

torch::nn::Linear layer_of(int64_t inner, int64_t columns, bool bias) {
  torch::nn::Linear layer(torch::nn::LinearOptions(inner, columns).bias(bias));
  layer->to(at::kBFloat16);
  return layer;
}

// Whether `found` is left * right + bias, matrices, up to the roundings that are due.
::testing::AssertionResult is_product(const at::Tensor& found, const at::Tensor& left,
                                      const at::Tensor& right, const at::Tensor& bias = {}) {
  const auto a = left.detach().to(at::kDouble), b = right.detach().to(at::kDouble);
  auto expected = a.matmul(b), magnitude = a.abs().matmul(b.abs());
  if (bias.defined()) {
    expected = expected + bias.detach().to(at::kDouble);
    magnitude = magnitude + bias.detach().to(at::kDouble).abs();
  }
  const auto depth = static_cast<double>(a.size(1) + 1);
  const auto bound = magnitude * (depth * 0x1p-24) + expected.abs() * 0x1p-8;
  const auto over = (found.detach().to(at::kDouble) - expected).abs() - bound;
  if (found.scalar_type() != at::kBFloat16) {
    return ::testing::AssertionFailure() << "found " << found.scalar_type();
  }
  const double most = over.max().item<double>();
  if (most <= 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "over the bound by " << most;
}

// Of (N, T, ...) a row each.
at::Tensor rows_of(const at::Tensor& tokens) {
  return tokens.reshape({tokens.size(0) * tokens.size(1), -1});
}

at::Tensor recorded(const at::Tensor& input, const torch::nn::Linear& layer,
                    const at::Tensor& output, PackedWeights& cache) {
  return detail::project_recorded({{input, layer->weight, layer->bias, 0, output}}, cache)[0];
}

class TileProjectionTest : public EveryIsaTest {
 protected:
  // Runs check() on each set that has tiles.
  template <typename Check>
  static void on_each_set(const Check& check) {
    bool ran = false;
    for (const CpuIsa isa : available_cpu_isas()) {
      set_cpu_isa(isa);
      if (!detail::tile_kernels()) continue;
      SCOPED_TRACE(isa);
      torch::manual_seed(61);
      check();
      ran = true;
    }
    if (!ran) GTEST_SKIP() << "no instruction set here has tiles";
  }
};

TEST_F(TileProjectionTest, AnyLayoutOfInputAndOutputIsRead) {
  on_each_set([] {
    const at::NoGradGuard no_grad;
    constexpr int64_t n = 3, t = 29, inner = 72, heads = 6, d = 16;
    const auto layer = layer_of(inner, heads * d, true);
    const std::vector<at::Tensor> inputs{
        numbers({n, t, inner}), numbers({t, n, inner}).transpose(0, 1),
        numbers({n, t, inner + 5}).narrow(2, 3, inner), numbers({n, inner, t}).transpose(1, 2),
        numbers({n, 1, inner}).expand({n, t, inner})};
    const auto options = at::TensorOptions(at::kBFloat16);
    const std::vector<at::Tensor> outputs{
        at::empty({n, t, heads * d}, options),
        at::empty({n, heads, t, d}, options).transpose(1, 2),
        at::empty({t, n, heads, d}, options).transpose(0, 1),
        at::empty({n, heads, t + 2, d}, options).transpose(1, 2).narrow(1, 0, t)};
    PackedWeights cache;
    for (const auto& input : inputs) {
      for (const auto& output : outputs) {
        detail::project({{input, layer->weight, layer->bias, 0, output}}, cache);
        EXPECT_TRUE(is_product(rows_of(output), rows_of(input), layer->weight.t(), layer->bias))
            << input.strides() << " to " << output.strides();
      }
    }
  });
}

TEST_F(TileProjectionTest, ProjectionsOfOneCallMayShareTheirInput) {
  on_each_set([] {
    const at::NoGradGuard no_grad;
    const auto x = numbers({2, 70, 40}), y = numbers({2, 5, 33});
    const auto q = layer_of(40, 64, true), k = layer_of(33, 96, false),
               v = layer_of(40, 7, true);
    const auto options = at::TensorOptions(at::kBFloat16);
    const auto to_q = at::empty({2, 70, 64}, options), to_k = at::empty({2, 5, 96}, options),
               to_v = at::empty({2, 70, 7}, options);
    PackedWeights cache;
    detail::project({{x, q->weight, q->bias, 0, to_q},
                     {y, k->weight, k->bias, 1, to_k},
                     {x, v->weight, v->bias, 2, to_v}},
                    cache);
    EXPECT_TRUE(is_product(rows_of(to_q), rows_of(x), q->weight.t(), q->bias));
    EXPECT_TRUE(is_product(rows_of(to_k), rows_of(y), k->weight.t()));
    EXPECT_TRUE(is_product(rows_of(to_v), rows_of(x), v->weight.t(), v->bias));
  });
}

TEST_F(TileProjectionTest, GradientsAreProductsOfAnyLayout) {
  on_each_set([] {
    constexpr int64_t n = 2, t = 37, inner = 72, heads = 4;
    for (const int64_t d : {16, 24}) {
      const auto layer = layer_of(inner, heads * d, true);
      const auto x = numbers({n, t, inner}).set_requires_grad(true);
      const auto outside = d % 16 == 0
                               ? at::empty({n, heads, t, d}, x.options()).transpose(1, 2)
                               : at::empty({n, t, heads, d}, x.options()).flatten(2);
      const std::vector<at::Tensor> given{
          numbers({n, t, heads, d}), numbers({n, heads, t, d}).transpose(1, 2),
          numbers({t, n, heads, d}).transpose(0, 1), numbers({1, 1, 1, 1})};
      for (const auto& each : given) {
        PackedWeights cache;
        const auto output = recorded(x, layer, outside.detach().clone(), cache);
        EXPECT_TRUE(is_product(rows_of(output), rows_of(x), layer->weight.t(), layer->bias));
        const auto grad = each.expand({n, t, heads, d});
        const auto grads = torch::autograd::grad({output.reshape({n, t, heads, d})},
                                                 {x, layer->weight, layer->bias}, {grad});
        const auto rows = rows_of(grad);
        EXPECT_TRUE(is_product(rows_of(grads[0]), rows, layer->weight));
        EXPECT_TRUE(is_product(grads[1], rows.t(), rows_of(x)));
        const auto ones = at::ones({1, n * t}, rows.options());
        EXPECT_TRUE(is_product(grads[2].unsqueeze(0), ones, rows));
      }
    }
  });
}

TEST_F(TileProjectionTest, WhatLayersGiveToOneInputIsRoundedOnce) {
  on_each_set([] {
    const auto x = numbers({2, 45, 50}).set_requires_grad(true), y = numbers({2, 45, 20});
    const auto q = layer_of(50, 64, true), k = layer_of(50, 40, false),
               v = layer_of(20, 33, true);
    const auto to = [](int64_t columns) {
      return at::empty({2, 45, columns}, at::TensorOptions(at::kBFloat16));
    };
    PackedWeights cache;
    const auto outputs = detail::project_recorded({{x, q->weight, q->bias, 0, to(64)},
                                                   {x, k->weight, k->bias, 1, to(40)},
                                                   {y, v->weight, v->bias, 2, to(33)}},
                                                  cache);
    const auto grad_q = numbers({2, 45, 64}), grad_k = numbers({2, 45, 40}),
               grad_v = numbers({2, 45, 33});
    const auto grads =
        torch::autograd::grad({outputs[0], outputs[1], outputs[2]},
                              {x, q->weight, k->weight, v->weight}, {grad_q, grad_k, grad_v});
    EXPECT_TRUE(is_product(rows_of(grads[0]), at::cat({rows_of(grad_q), rows_of(grad_k)}, 1),
                           at::cat({q->weight, k->weight}, 0)));
    EXPECT_TRUE(is_product(grads[1], rows_of(grad_q).t(), rows_of(x)));
    EXPECT_TRUE(is_product(grads[2], rows_of(grad_k).t(), rows_of(x)));
    EXPECT_TRUE(is_product(grads[3], rows_of(grad_v).t(), rows_of(y)));
  });
}

TEST_F(TileProjectionTest, OnlyWantedGradientsAreComputed) {
  on_each_set([] {
    const auto layer = layer_of(40, 48, true);
    layer->weight.set_requires_grad(false);
    const auto x = numbers({2, 3, 40});
    PackedWeights cache;
    const auto output = recorded(x, layer, at::empty({2, 3, 48}, x.options()), cache);
    output.sum().backward();
    EXPECT_FALSE(x.grad().defined());
    EXPECT_FALSE(layer->weight.grad().defined());
    EXPECT_EQ(layer->bias.grad().sum().item<double>(), 6 * 48);
  });
}

// The gradient of sum(dX * v) is, of dY, v W^T, and of W, dY^T v; by LibTorch's own products,
// which may sum in another order and round twice.
TEST_F(TileProjectionTest, GradientsHaveGradients) {
  on_each_set([] {
    const auto layer = layer_of(40, 48, false);
    const auto x = numbers({2, 9, 40}).set_requires_grad(true), v = numbers({2, 9, 40});
    PackedWeights cache;
    const auto output = recorded(x, layer, at::empty({2, 9, 48}, x.options()), cache);
    const auto grad = numbers({2, 9, 48}).set_requires_grad(true);
    const auto first = torch::autograd::grad({output}, {x}, {grad}, /*retain_graph=*/true,
                                             /*create_graph=*/true)[0];
    const auto second = torch::autograd::grad({(first * v).sum()}, {grad, layer->weight});
    const auto expected_grad = rows_of(v).matmul(layer->weight.t()).view({2, 9, 48});
    EXPECT_TRUE(at::allclose(second[0], expected_grad, 0.02, 0.02));
    EXPECT_TRUE(at::allclose(second[1], rows_of(grad).t().matmul(rows_of(v)), 0.02, 0.1));
  });
}

TEST_F(TileProjectionTest, BitsDependOnNeitherThreadsNorOtherSamples) {
  on_each_set([] {
    constexpr int64_t n = 5, t = 61, inner = 200, columns = 330;
    const auto layer = layer_of(inner, columns, true);
    const auto x = numbers({n, t, inner}).set_requires_grad(true);
    const auto grad = numbers({n, t, columns});
    PackedWeights cache;
    const auto all_of = [&](const at::Tensor& input, const at::Tensor& grad_output) {
      const auto output =
          recorded(input, layer, at::empty(grad_output.sizes(), input.options()), cache);
      auto results =
          torch::autograd::grad({output}, {input, layer->weight, layer->bias}, {grad_output});
      results.push_back(output.detach());
      return results;
    };
    const auto whole = all_of(x, grad);
    for (const int threads : {1, 3}) {
      const ThreadCount count(threads);
      const auto again = all_of(x, grad);
      for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(at::equal(again[i], whole[i])) << i;
    }
    for (int64_t i = 0; i < n; ++i) {
      const auto part = all_of(x.narrow(0, i, 1), grad.narrow(0, i, 1));
      EXPECT_TRUE(at::equal(part[0], whole[0].narrow(0, i, 1)));
      EXPECT_TRUE(at::equal(part[3], whole[3].narrow(0, i, 1)));
    }
  });
}

}  // namespace
}  // namespace mha::test
