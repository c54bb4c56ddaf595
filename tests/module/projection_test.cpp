// Guards the gradients of recorded projections on every instruction set: of inputs, weights and
// biases, for sizes around those of panels and of running sums, whatever the strides of input
// and upstream gradient, for several layers on one input. Against loops in float64; the
// tolerance is the bound on the rounding of such sums: a unit roundoff of the sum of the terms'
// sizes for each sum that a term passes through.
#include "module/projection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "runtime/uncomputed.h"
#include "support/every_isa_test.h"
#include "support/support.h"
#include "support/thread_count.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

using Tensors = std::vector<at::Tensor>;

struct Sizes4 {
  int64_t n, t, inner, columns;
};

// Around vectors, panels, `few_rows` and the lengths of sums.
const std::vector<Sizes4> kSizes = {{1, 1, 1, 1},     {2, 3, 5, 7},     {3, 43, 48, 20},
                                    {1, 128, 65, 50}, {3, 43, 64, 96},  {1, 1030, 33, 32},
                                    {2, 5, 32, 1056}, {1, 4100, 17, 16}};

torch::nn::Linear draw_layer(Random& random, int64_t inner, int64_t columns, bool bias) {
  torch::nn::Linear layer(torch::nn::LinearOptions(inner, columns).bias(bias));
  layer->weight.set_data(random.normal({columns, inner}));
  if (bias) layer->bias.set_data(random.normal({columns}));
  return layer;
}

at::Tensor project_one(const torch::nn::Linear& layer, const at::Tensor& input,
                       detail::PackedWeights& cache) {
  const auto output = detail::uncomputed({input.size(0), input.size(1), layer->weight.size(0)},
                                         input.options().requires_grad(false));
  return detail::project_recorded({{input, layer->weight, layer->bias, 0, output}}, cache)[0];
}

/// A product of two matrices in float64, and the largest sum of the sizes of its terms.
struct Product {
  at::Tensor sums;
  double largest;
};

Product product(const at::Tensor& given_a, const at::Tensor& given_b) {
  const auto a = given_a.detach().to(at::kDouble).contiguous();
  const auto b = given_b.detach().to(at::kDouble).contiguous();
  Product found{at::zeros({a.size(0), b.size(1)}, at::kDouble), 0};
  std::vector<double> sizes(b.size(1));
  for (int64_t i = 0; i < a.size(0); ++i) {
    double* row = found.sums.data_ptr<double>() + i * b.size(1);
    std::fill(sizes.begin(), sizes.end(), 0);
    for (int64_t k = 0; k < a.size(1); ++k) {
      const double factor = a.data_ptr<double>()[i * a.size(1) + k];
      const double* terms = b.data_ptr<double>() + k * b.size(1);
      for (int64_t j = 0; j < b.size(1); ++j) {
        row[j] += factor * terms[j];
        sizes[j] += std::abs(factor * terms[j]);
      }
    }
    found.largest = std::max(found.largest, *std::max_element(sizes.begin(), sizes.end()));
  }
  return found;
}

// A term passes through a running sum of at most 1024 and through one for each of those.
double rounding(int64_t terms) {
  const int64_t sums = std::min<int64_t>(terms, 1024) + terms / 1024 + 4;
  return static_cast<double>(sums) * unit_roundoff(at::kFloat);
}

::testing::AssertionResult is_product(const at::Tensor& actual, const at::Tensor& a,
                                      const at::Tensor& b) {
  const auto expected = product(a, b);
  return is_close(actual.reshape(expected.sums.sizes()), expected.sums,
                  rounding(a.size(1)) * expected.largest);
}

at::Tensor rows_of(const at::Tensor& tensor) {
  return tensor.reshape({tensor.size(0) * tensor.size(1), -1});
}

/// The same numbers (N, T, C) in other memory.
std::vector<std::pair<const char*, at::Tensor>> layouts(const at::Tensor& tensor) {
  const auto wide = at::full({tensor.size(0), tensor.size(1), tensor.size(2) + 3}, NAN);
  wide.narrow(2, 1, tensor.size(2)).copy_(tensor);
  return {{"contiguous", tensor},
          {"tokens outside", tensor.transpose(0, 1).contiguous().transpose(0, 1)},
          {"columns outside", tensor.transpose(1, 2).contiguous().transpose(1, 2)},
          {"part of rows", wide.narrow(2, 1, tensor.size(2))}};
}

class ProjectionTest : public EveryIsaTest {};

TEST_F(ProjectionTest, GradientsAreTheProductsOfFloat64) {
  for (const CpuIsa isa : available_cpu_isas()) {
    set_cpu_isa(isa);
    for (const auto& [n, t, inner, columns] : kSizes) {
      Random random(1);
      const auto layer = draw_layer(random, inner, columns, true);
      const auto input = random.normal({n, t, inner}).requires_grad_();
      const auto upstream = random.normal({n, t, columns});
      detail::PackedWeights cache;
      const auto grads = torch::autograd::grad({project_one(layer, input, cache)},
                                               {input, layer->weight, layer->bias}, {upstream});
      const auto rows = rows_of(upstream);
      std::ostringstream about;
      about << isa << ' ' << n << 'x' << t << 'x' << inner << 'x' << columns;
      EXPECT_EQ(grads[0].sizes(), input.sizes());
      EXPECT_TRUE(is_product(grads[0], rows, layer->weight)) << about.str();
      EXPECT_TRUE(is_product(grads[1], rows.t(), rows_of(input))) << about.str();
      EXPECT_TRUE(is_product(grads[2], at::ones({1, n * t}), rows)) << about.str();
    }
  }
}

TEST_F(ProjectionTest, GradientsAreTheSameWhateverTheStrides) {
  Random random(2);
  const auto layer = draw_layer(random, 20, 48, true);
  const auto numbers = random.normal({3, 50, 20}), upstream = random.normal({3, 50, 48});
  for (const CpuIsa isa : available_cpu_isas()) {
    set_cpu_isa(isa);
    detail::PackedWeights cache;
    const auto gradients = [&](const at::Tensor& input, const at::Tensor& gradient) {
      const auto leaf = input.detach().requires_grad_();
      return torch::autograd::grad({project_one(layer, leaf, cache)},
                                   {leaf, layer->weight, layer->bias}, {gradient});
    };
    const auto expected = gradients(numbers, upstream);
    for (const auto& [of_input, input] : layouts(numbers)) {
      for (const auto& [of_gradient, gradient] : layouts(upstream)) {
        const auto actual = gradients(input, gradient);
        for (size_t i = 0; i < 3; ++i) {
          EXPECT_TRUE(is_bit_equal(actual[i], expected[i]))
              << isa << ", input: " << of_input << ", gradient: " << of_gradient << ", " << i;
        }
      }
    }
    for (const auto& expanded :
         {upstream.narrow(0, 0, 1).expand({3, 50, 48}),
          upstream.narrow(1, 0, 1).expand({3, 50, 48}), at::ones({1}).expand({3, 50, 48})}) {
      const auto actual = gradients(numbers, expanded);
      const auto same = gradients(numbers, expanded.contiguous());
      for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(is_bit_equal(actual[i], same[i])) << isa;
    }
  }
}

/// Three layers on one input, the last without a bias, and one on another.
struct FourLayers {
  explicit FourLayers(Random& random)
      : layers{draw_layer(random, 40, 64, true), draw_layer(random, 40, 24, true),
               draw_layer(random, 40, 24, false), draw_layer(random, 30, 50, true)},
        shared(random.normal({2, 70, 40}).requires_grad_()),
        other(random.normal({2, 9, 30}).requires_grad_()) {
    for (const auto& layer : layers) {
      leaves.push_back(layer->weight);
      if (layer->bias.defined()) leaves.push_back(layer->bias);
    }
    leaves.push_back(shared);
    leaves.push_back(other);
  }
  Tensors outputs() {
    std::vector<detail::Projection> projections;
    for (size_t i = 0; i < layers.size(); ++i) {
      const auto& input = i < 3 ? shared : other;
      projections.push_back({input, layers[i]->weight, layers[i]->bias, i,
                             at::empty({2, input.size(1), layers[i]->weight.size(0)})});
    }
    return detail::project_recorded(projections, cache);
  }
  std::vector<torch::nn::Linear> layers;
  at::Tensor shared, other;
  Tensors leaves;
  detail::PackedWeights cache;
};

TEST_F(ProjectionTest, OneInputGetsTheSumOfWhatItsLayersGive) {
  for (const CpuIsa isa : available_cpu_isas()) {
    set_cpu_isa(isa);
    Random random(3);
    FourLayers together(random);
    const auto outputs = together.outputs();
    Tensors upstream, weights;
    for (size_t i = 0; i < outputs.size(); ++i) {
      upstream.push_back(random.normal(outputs[i].sizes()));
      if (i < 3) weights.push_back(together.layers[i]->weight);
    }
    const auto grads =
        torch::autograd::grad(outputs, {together.shared, together.other}, upstream);
    const auto side_by_side = at::cat({upstream[0], upstream[1], upstream[2]}, 2);
    EXPECT_TRUE(is_product(grads[0], rows_of(side_by_side), at::cat(weights))) << isa;
    EXPECT_TRUE(is_product(grads[1], rows_of(upstream[3]), together.layers[3]->weight)) << isa;
  }
}

TEST_F(ProjectionTest, AnOutputWithoutUpstreamGradientGivesNone) {
  Random random(4);
  FourLayers together(random);
  const auto outputs = together.outputs();
  const auto upstream = random.normal(outputs[1].sizes());
  const auto grads = torch::autograd::grad({outputs[1]}, together.leaves, {upstream},
                                           std::nullopt, false, /*allow_unused=*/true);
  const std::vector<size_t> used{2, 3, together.leaves.size() - 2};
  for (size_t i = 0; i < grads.size(); ++i) {
    EXPECT_EQ(grads[i].defined(), std::count(used.begin(), used.end(), i) > 0) << i;
  }
  EXPECT_TRUE(is_product(grads[2], rows_of(upstream).t(), rows_of(together.shared)));
  EXPECT_TRUE(is_product(grads[7], rows_of(upstream), together.layers[1]->weight));
}

TEST_F(ProjectionTest, FrozenTensorsGetNoGradientAndChangeNoOther) {
  Random random(5);
  FourLayers together(random);
  const auto gradients = [&](const at::Tensor& frozen) {
    Tensors found;
    for (auto& leaf : together.leaves) leaf.mutable_grad() = at::Tensor();
    if (frozen.defined()) at::Tensor(frozen).set_requires_grad(false);
    const auto outputs = together.outputs();
    Tensors upstream;
    for (const auto& output : outputs) upstream.push_back(at::full_like(output, 0.5));
    torch::autograd::backward(outputs, upstream);
    for (const auto& leaf : together.leaves) found.push_back(leaf.grad());
    if (frozen.defined()) at::Tensor(frozen).set_requires_grad(true);
    return found;
  };
  const auto all = gradients({});
  for (const auto& frozen : together.leaves) {
    const auto found = gradients(frozen);
    for (size_t i = 0; i < found.size(); ++i) {
      if (together.leaves[i].is_same(frozen)) {
        EXPECT_FALSE(found[i].defined()) << i;
      } else {
        EXPECT_TRUE(is_bit_equal(found[i], all[i])) << i;
      }
    }
  }
}

TEST_F(ProjectionTest, AnyNumberOfThreadsGivesTheSameBits) {
  for (const auto& [n, t, inner, columns] : kSizes) {
    std::vector<Tensors> found;
    for (const int count : {1, 2, 5}) {
      const ThreadCount threads(count);
      Random random(6);
      const auto layer = draw_layer(random, inner, columns, true);
      const auto input = random.normal({n, t, inner}).requires_grad_();
      detail::PackedWeights cache;
      const auto output = project_one(layer, input, cache);
      found.push_back(torch::autograd::grad({output}, {input, layer->weight, layer->bias},
                                            {random.normal(output.sizes())}));
      found.back().push_back(output.detach());
    }
    for (size_t i = 0; i < found[0].size(); ++i) {
      EXPECT_TRUE(is_bit_equal(found[1][i], found[0][i])) << t << ", " << i;
      EXPECT_TRUE(is_bit_equal(found[2][i], found[0][i])) << t << ", " << i;
    }
  }
}

TEST_F(ProjectionTest, RecordedGradientsAreTheSameButForRounding) {
  Random random(7);
  FourLayers together(random);
  const auto outputs = together.outputs();
  Tensors upstream;
  for (const auto& output : outputs) upstream.push_back(random.normal(output.sizes()));
  const auto recorded =
      torch::autograd::grad(outputs, together.leaves, upstream, true, /*create_graph=*/true);
  const auto plain = torch::autograd::grad(outputs, together.leaves, upstream);
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_TRUE(recorded[i].requires_grad() || together.leaves[i].dim() == 1) << i;
    // Sums of at most 140 terms of order 1 on either side.
    EXPECT_TRUE(is_close(recorded[i].detach(), plain[i], 1e-4)) << i;
  }
}

TEST_F(ProjectionTest, WhatIsNotFiniteStaysInItsProducts) {
  Random random(8);
  const auto layer = draw_layer(random, 20, 48, true);
  const auto input = random.normal({1, 30, 20});
  const auto upstream = random.normal({1, 30, 48});
  upstream[0][7][3] = INFINITY;
  const auto leaf = input.clone();
  leaf[0][11][5] = NAN;
  leaf.requires_grad_();
  for (const CpuIsa isa : available_cpu_isas()) {
    set_cpu_isa(isa);
    detail::PackedWeights cache;
    const auto grads = torch::autograd::grad({project_one(layer, leaf, cache)},
                                             {leaf, layer->weight, layer->bias}, {upstream});
    for (int64_t i = 0; i < 30; ++i) {
      EXPECT_EQ(at::isfinite(grads[0][0][i]).all().item<bool>(), i != 7) << isa;
    }
    for (int64_t m = 0; m < 48; ++m) {
      for (int64_t k = 0; k < 20; ++k) {
        EXPECT_EQ(std::isfinite(grads[1][m][k].item<float>()), m != 3 && k != 5) << isa;
      }
      EXPECT_EQ(std::isfinite(grads[2][m].item<float>()), m != 3) << isa;
    }
  }
}

TEST_F(ProjectionTest, AWeightThatStepsIsReadAsItIs) {
  Random random(9);
  const auto layer = draw_layer(random, 40, 50, true);
  const auto input = random.normal({2, 9, 40});
  detail::PackedWeights cache;
  for (const bool steps : {true, true, false, false, true, false}) {
    if (steps) {
      const at::NoGradGuard no_grad;
      layer->weight.mul_(0.75);
    }
    detail::PackedWeights fresh;
    EXPECT_TRUE(is_bit_equal(project_one(layer, input, cache).detach(),
                             project_one(layer, input, fresh).detach()));
    const auto expected = product(rows_of(input), layer->weight.t());
    EXPECT_TRUE(is_close(rows_of(project_one(layer, input, cache).detach()) - layer->bias,
                         expected.sums, 2 * rounding(41) * (expected.largest + 4)));
  }
}

}  // namespace
}  // namespace mha::test
