// Gradients of a recorder: that they are those of autograd through the same formulas in
// float64, summed over backwards, and that nobody else notices.
//
// Tolerance: 1e-12 for a chain of products and a softmax in float64 over numbers of order 1.

#include <gtest/gtest.h>
#include <mha/map_recorder.h>
#include <mha/multi_head_attention.h>

#include <cmath>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/attention_path.h"
#include "support/expect.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

constexpr double tolerance = 1e-12;

MapRecorderOptions with_gradients() {
  return MapRecorderOptions().gradients(true);
}

// Two layers and a head, which is called twice.
struct Stack : torch::nn::Module {
  explicit Stack(at::ScalarType dtype) {
    first = register_module("first", MultiHeadAttention(options(4).num_kv_heads(2)));
    second = register_module("second", MultiHeadAttention(options(2)));
    to(dtype);
  }
  static MultiHeadAttentionOptions options(int64_t heads) { return {16, heads}; }
  at::Tensor forward(const at::Tensor& x, const Mask& mask = {}) {
    const auto y = x + first->forward(x, x, x, mask).output;
    return second->forward(second->forward(y, y, y, mask).output).output.tanh().sum();
  }
  MultiHeadAttention first{nullptr}, second{nullptr};
};

// The layer's formula by LibTorch's operators, and its weights for `retain_grad`.
AttentionOutput composed(MultiHeadAttentionImpl& layer, const at::Tensor& x,
                         const at::Tensor& later) {
  const auto split = [&](torch::nn::Linear& linear, int64_t heads) {
    return linear->forward(x).view({x.size(0), x.size(1), heads, -1}).transpose(1, 2);
  };
  const int64_t heads = layer.options.num_heads();
  const auto q = split(layer.W_q, heads);
  const auto shared = [&](torch::nn::Linear& linear) {
    const int64_t kv_heads = layer.num_kv_heads();
    return split(linear, kv_heads).repeat_interleave(heads / kv_heads, 1);
  };
  const auto scores = at::matmul(q, shared(layer.W_k).transpose(-2, -1)) /
                      std::sqrt(16.0 / static_cast<double>(heads));
  const auto weights =
      at::softmax(later.defined() ? scores.masked_fill(later, -HUGE_VAL) : scores, -1);
  const auto merged = at::matmul(weights, shared(layer.W_v)).transpose(1, 2).reshape(x.sizes());
  return {layer.W_o->forward(merged), weights};
}

TEST(RecordedAttributionTest, IsTheGradientThatAutogradFindsThroughTheFormulas) {
  const auto model = std::make_shared<Stack>(at::kDouble);
  const auto x = Random(1).normal({2, 7, 16}, at::kDouble);
  const auto later = at::ones({7, 7}, at::kBool).triu(1);
  std::vector<at::Tensor> weights;
  const auto layer = [&](MultiHeadAttention& attention, const at::Tensor& input,
                         const at::Tensor& blocked) {
    const auto result = composed(*attention, input, blocked);
    weights.push_back(result.weights);
    weights.back().retain_grad();
    return result.output;
  };
  const auto y = x + layer(model->first, x, later);
  const auto loss = layer(model->second, layer(model->second, y, later), {}).tanh().sum();
  loss.backward();
  model->zero_grad();

  const MapRecorder recorder(*model, with_gradients());
  const auto recorded_loss = model->forward(x, Mask::causal());
  EXPECT_TRUE(is_close(recorded_loss.detach(), loss.detach(), tolerance));
  EXPECT_FALSE(recorder.records().at(0).has_gradient());
  recorded_loss.backward();
  auto found = recorder.attributions("first");
  for (auto& more : recorder.attributions("second")) found.push_back(more);
  ASSERT_EQ(found.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    const auto open = weights[i].detach() > 0;
    EXPECT_TRUE(is_close(found[i].dense(Attribution::gradient),
                         weights[i].grad().masked_fill(open.logical_not(), 0), tolerance));
    EXPECT_TRUE(is_close(found[i].dense(Attribution::relevance),
                         weights[i].grad() * weights[i].detach(), tolerance));
    EXPECT_GT(weights[i].grad().abs().max().item<double>(), 1e-3);
  }
  EXPECT_EQ(attention_relevance(found).sizes(), (std::vector<int64_t>{2, 7, 7}));
}

// What LibTorch itself offers, where the output is computed from the returned weights: on the
// plain path, in one block. Elsewhere `weights.grad()` stays undefined, and this is the way.
TEST(RecordedAttributionTest, IsWhatReturnedWeightsRetainOnThePlainPath) {
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    MultiHeadAttention module(MultiHeadAttentionOptions(16, 4).dtype(dtype));
    const auto x = Random(6).normal({2, 7, 16}, dtype);
    const MapRecorder recorder(*module, with_gradients());
    const auto [output, weights] = module->forward(x, x, x, Mask::causal());
    weights.retain_grad();
    output.tanh().sum().backward();
    const bool plain = dtype == at::kDouble || detail::kernels_are_off();
    EXPECT_EQ(weights.grad().defined(), plain);
    if (!plain) continue;
    const auto open = at::ones({7, 7}, at::kBool).tril();
    EXPECT_TRUE(is_close(recorder.attributions("").at(0).dense(Attribution::gradient),
                         weights.grad().masked_fill(open.logical_not(), 0),
                         dtype == at::kDouble ? tolerance : 1e-6));
  }
}

// A gate and a head mask stand after the heads' output, appended keys among its keys.
TEST(RecordedAttributionTest, StandsBeforeGateHeadMaskAndOutputProjection) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    MultiHeadAttention module(MultiHeadAttentionOptions(16, 4)
                                  .add_bias_kv(true)
                                  .add_zero_attn(true)
                                  .output_gate(OutputGate::elementwise)
                                  .dtype(dtype));
    const auto x = Random(2).normal({5, 16}, dtype);  // unbatched
    const auto factors = torch::tensor({1.0, 0.5, 0.0, 2.0});
    const MapRecorder recorder(*module, with_gradients());
    const auto output = module->attend(x, CallOptions().head_mask(factors)).output;
    const auto upstream = Random(3).normal(output.sizes(), dtype);
    output.backward(upstream);
    const auto attribution = recorder.attributions("").at(0);
    EXPECT_EQ(attribution.value().sizes(), (std::vector<int64_t>{4, 7, 4}));
    EXPECT_TRUE(all_zero(attribution.value().select(1, 6)));
    const auto gate = module->W_g->forward(x).sigmoid().view({5, 4, 4}).transpose(0, 1);
    const auto expected = upstream.matmul(module->W_o->weight).view({5, 4, 4}).transpose(0, 1) *
                          gate * factors.to(dtype).view({4, 1, 1});
    const double close = dtype == at::kDouble ? tolerance : 1e-5;
    EXPECT_TRUE(is_close(attribution.grad_output(), expected.detach(), close));
    EXPECT_TRUE(is_close(attribution.dense(Attribution::gradient),
                         at::matmul(expected, attribution.value().transpose(-2, -1)).detach(),
                         10 * close));
  }
}

TEST(RecordedAttributionTest, ObservingChangesNeitherOutputNorGradients) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto model = std::make_shared<Stack>(dtype);
    const auto x = Random(4).normal({2, 40, 16}, dtype);
    const auto run = [&] {
      model->zero_grad();
      const auto input = leaf(x);
      const auto loss = model->forward(input, Mask::causal());
      loss.backward();
      std::vector<at::Tensor> results{loss.detach(), input.grad()};
      for (const auto& p : model->parameters()) results.push_back(p.grad().clone());
      return results;
    };
    const auto alone = run();
    const MapRecorder recorder(*model, with_gradients()), other(with_gradients());
    const auto seen = run();
    for (size_t i = 0; i < seen.size(); ++i) {
      EXPECT_TRUE(is_same_but_for_blas(seen[i], alone[i])) << "result " << i << ", " << dtype;
    }
    EXPECT_TRUE(at::equal(other.records().at(2).attribution().grad_output(),
                          recorder.attributions("second").at(1).grad_output()));
  }
}

TEST(RecordedAttributionTest, TwoBackwardsAreTheirSumUntilTheyAreForgotten) {
  const auto model = std::make_shared<Stack>(at::kDouble);
  MapRecorder recorder(*model, with_gradients());
  const auto loss = model->forward(Random(5).normal({1, 4, 16}, at::kDouble));
  loss.backward({}, /*retain_graph=*/true);
  const auto first = recorder.attributions("first").at(0);
  const auto once = first.dense(Attribution::gradient);
  (2 * loss).backward({}, /*retain_graph=*/true);
  EXPECT_TRUE(is_close(recorder.attributions("first").at(0).dense(Attribution::gradient),
                       3 * once, tolerance));
  EXPECT_TRUE(is_same_but_for_blas(first.dense(Attribution::gradient), once));
  recorder.zero_grad();
  EXPECT_FALSE(recorder.records().at(0).has_gradient());
  // Only `grad` is asked for, with a graph of its own and in another thread.
  std::thread([&] {
    const auto q = model->first->W_q->weight;
    torch::autograd::grad({loss}, {q}, {}, /*retain_graph=*/true, /*create_graph=*/true);
  }).join();
  const auto later = recorder.attributions("first").at(0);
  EXPECT_TRUE(is_close(later.dense(Attribution::gradient), once, tolerance));
  EXPECT_FALSE(later.grad_output().requires_grad());
}

TEST(RecordedAttributionTest, ACallWithoutABackwardIsAnErrorThatNamesItsModule) {
  const auto model = std::make_shared<Stack>(at::kFloat);
  const auto x = torch::randn({1, 4, 16});
  const MapRecorder recorder(*model, with_gradients()), plain(*model);
  const auto loss = model->forward(x);
  EXPECT_TRUE(recorder.attributions("third").empty());
  EXPECT_TRUE(refuses([&] { recorder.attributions("second"); }, {"second", "backward"}));
  loss.backward();
  EXPECT_EQ(recorder.attributions("second").size(), 2u);
  EXPECT_TRUE(refuses([&] { plain.attributions("first"); }, {"first", "gradients"}));
  const MapRecorder blind(*model, with_gradients());
  {
    const at::NoGradGuard no_grad;
    model->forward(x);
  }
  EXPECT_TRUE(refuses([&] { blind.attributions("first"); }, {"first", "requires"}));
  EXPECT_EQ(blind.maps("first").size(), 1u);
}

TEST(RecordedAttributionTest, ValuesAndGradientsCountAgainstTheBudget) {
  const auto model = std::make_shared<Stack>(at::kFloat);
  const auto x = torch::randn({2, 7, 16});
  const MapRecorder maps(*model), all(*model, with_gradients());
  model->forward(x);
  // Values of 2 of 4 heads, then of all; and gradients of all.
  const int64_t row = 2 * 7 * 4, added = row * (8 + 16) + 2 * row * (16 + 16);
  EXPECT_EQ(all.nbytes(), maps.nbytes() + added);
  testing::internal::CaptureStderr();
  const MapRecorder little(*model, with_gradients().budget_bytes(maps.nbytes() / 3 + 1));
  model->forward(x).backward();
  EXPECT_EQ(little.dropped(), 3);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("budget"), std::string::npos);
}

TEST(RecordedAttributionTest, TheGraphAndTheRecorderDoNotKeepEachOther) {
  const auto model = std::make_shared<Stack>(at::kFloat);
  auto recorder = std::make_unique<MapRecorder>(*model, with_gradients());
  auto loss = model->forward(torch::randn({1, 4, 16}));
  auto token = std::make_shared<int>();  // lives as long as the graph
  const std::weak_ptr<int> graph = token;
  loss.register_hook([kept = std::move(token)](const at::Tensor&) {});
  loss.backward({}, /*retain_graph=*/true);
  const auto kept = recorder->attributions("second").at(1);
  recorder.reset();
  loss.backward();  // tells nobody
  EXPECT_TRUE(is_finite(kept.dense(Attribution::relevance)));
  loss = at::Tensor();
  EXPECT_TRUE(graph.expired());

  MapRecorder cleared(*model, with_gradients());
  loss = model->forward(torch::randn({1, 4, 16}));
  cleared.clear();
  loss.backward();
  EXPECT_TRUE(cleared.attributions("first").empty());
  EXPECT_EQ(cleared.nbytes(), 0);
}

TEST(RecordedAttributionTest, ValuesThatChangedSinceTheCallAreAnError) {
  MultiHeadAttention module(MultiHeadAttentionOptions(16, 2).add_zero_attn(true));
  const MapRecorder recorder(*module, with_gradients());
  module->forward(torch::randn({1, 4, 16})).output.sum().backward();
  const auto value = recorder.attributions("").at(0).value();
  value.mul_(2);
  EXPECT_TRUE(refuses([&] { recorder.attributions(""); }, {"value", "modified"}));
}

TEST(RecordedAttributionTest, WithDropoutTheGradientIsThatOfTheWeightsThatWereUsed) {
  MultiHeadAttention module(MultiHeadAttentionOptions(16, 2).dropout(0.5));
  const MapRecorder recorder(*module, with_gradients());
  const auto x = torch::randn({1, 6, 16});
  module->forward(x).output.sum().backward();
  const auto attribution = recorder.attributions("").at(0);
  const auto gradient =
      at::matmul(attribution.grad_output(), attribution.value().transpose(-2, -1));
  EXPECT_TRUE(is_close(attribution.dense(Attribution::gradient), gradient, 1e-5));
  EXPECT_TRUE(is_close(attribution.map().dense().sum(-1), at::ones({1, 2, 6}), 1e-5));
}

}  // namespace
}  // namespace mha::test
