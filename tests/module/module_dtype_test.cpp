// Guards the dtypes and devices of a module: what it returns has those of its parameters on
// every path, and parameters that do not go together are refused by their names before anything
// is computed. Everything here is exact.
#include <mha/multi_head_attention.h>
#include <mha/torch_conversion.h>
#include <mha/weight_file.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/expect.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/values.h"

namespace mha::test {
namespace {

TEST(ModuleDtypeTest, ReturnedWeightsHaveTheDtypeOfTheOutputWithAndWithoutGradients) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const bool zero_attn : {false, true}) {
      MultiHeadAttention module(
          MultiHeadAttentionOptions(32, 2).dtype(dtype).add_zero_attn(zero_attn));
      module->options.dropout(0.5).weights_after_dropout(zero_attn);
      const auto x = at::randn({2, 40, 32}).to(dtype);
      for (const bool records : {false, true}) {
        const at::AutoGradMode mode(records);
        for (const auto weights : {Weights::per_head, Weights::averaged}) {
          for (const auto& mask : {Mask(), Mask::causal()}) {
            const auto result = module->forward(x, x, x, mask, weights);
            EXPECT_EQ(result.output.scalar_type(), dtype);
            EXPECT_EQ(result.weights.scalar_type(), dtype) << records;
          }
          if (records) continue;
          for (const int64_t tokens : {40, 1}) {
            const KVCache cache, wide(KVCacheOptions().dtype(at::kFloat));
            for (const auto& held : {cache, wide}) {
              const auto call = CallOptions(Mask::causal()).weights(weights).cache(held);
              const auto step = module->attend(x.narrow(1, 0, tokens), call);
              EXPECT_EQ(step.weights.scalar_type(), dtype);
              EXPECT_EQ(step.output.scalar_type(), dtype);
            }
          }
          const auto memory = module->project_keys(x);
          const auto read = module->attend(x, CallOptions().weights(weights).memory(memory));
          EXPECT_EQ(read.weights.scalar_type(), dtype);
        }
      }
    }
  }
}

// Whatever computes them: some CPUs multiply half types, on others the kernels do so in
// float32. Each of the four layers may round once on the way there and once back, and weights
// and their gradients too: a dozen roundings of the largest number, or of one, of which the key
// bias's gradient, 0, is a sum.
TEST(ModuleDtypeTest, GradientsOfHalfModulesAreThoseOfDoubleButForRoundings) {
  Random random(31);
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const bool gate : {false, true}) {
      const auto options = MultiHeadAttentionOptions(64, 4).num_kv_heads(2).output_gate(
          gate ? OutputGate::elementwise : OutputGate::none);
      MultiHeadAttention module(MultiHeadAttentionOptions(options).dtype(dtype));
      MultiHeadAttention wide(MultiHeadAttentionOptions(options).dtype(at::kDouble));
      const auto x = random.normal({3, 20, 64}, dtype).requires_grad_();
      const auto wide_x = x.detach().to(at::kDouble).requires_grad_();
      const auto upstream = random.normal({3, 20, 64}, dtype);
      std::vector<at::Tensor> leaves{x}, wide_leaves{wide_x};
      for (auto& item : module->named_parameters()) {
        auto twin = wide->named_parameters()[item.key()];
        const at::NoGradGuard no_grad;
        twin.copy_(item.value());
        leaves.push_back(item.value());
        wide_leaves.push_back(twin);
      }
      const auto output = module->attend(x, CallOptions(Mask::causal())).output;
      const auto exact = wide->attend(wide_x, CallOptions(Mask::causal())).output;
      EXPECT_EQ(output.scalar_type(), dtype);
      const auto actual = torch::autograd::grad({output}, leaves, {upstream});
      const auto expected =
          torch::autograd::grad({exact}, wide_leaves, {upstream.to(at::kDouble)});
      for (size_t i = 0; i < leaves.size(); ++i) {
        EXPECT_EQ(actual[i].scalar_type(), dtype);
        const double largest = expected[i].abs().max().item<double>();
        EXPECT_TRUE(is_close(actual[i], expected[i], 12 * unit_roundoff(dtype) * (1 + largest)))
            << dtype << ", leaf " << i << ", gate " << gate;
      }
    }
  }
}

TEST(ModuleDtypeTest, AParameterOfAnotherDtypeOrDeviceIsRefusedByItsName) {
  using ModuleChange = std::function<void(MultiHeadAttentionImpl&)>;
  const std::vector<std::pair<std::vector<std::string>, ModuleChange>> changes{
      {{"W_k.weight", "Float", "Double"}, [](auto& m) { m.W_k->to(at::kDouble); }},
      {{"W_v.weight", "Float", "Half"}, [](auto& m) { m.W_v->to(at::kHalf); }},
      {{"W_o.weight", "Float", "Double"}, [](auto& m) { m.W_o->to(at::kDouble); }},
      {{"W_g.weight", "Float", "BFloat16"}, [](auto& m) { m.W_g->to(at::kBFloat16); }},
      {{"W_o.bias", "Float", "Double"},
       [](auto& m) { m.W_o->bias.set_data(m.W_o->bias.to(at::kDouble)); }},
      {{"sinks", "float32", "Int"},
       [](auto& m) { m.sinks.set_data(at::zeros({2}, at::kInt)); }},
  };
  const auto x = at::randn({2, 3, 16});
  for (const auto& [words, change] : changes) {
    MultiHeadAttention module(
        MultiHeadAttentionOptions(16, 2).sinks(true).output_gate(OutputGate::per_head));
    for (auto& parameter : module->parameters()) parameter.set_requires_grad(false);
    change(*module);
    for (const auto& word : words) EXPECT_TRUE(refuses([&] { module->forward(x); }, {word}));
  }
}

TEST(ModuleDtypeTest, AParameterWhoseMemoryIsNotItsNumbersIsRefused) {
  const at::NoGradGuard no_grad;
  const auto x = at::randn({2, 3, 8});
  MultiHeadAttention module(MultiHeadAttentionOptions(8, 2).sinks(true));
  const auto weight = module->W_v->weight.clone();
  module->W_v->weight.set_data(at::_neg_view(weight));
  EXPECT_TRUE(test::refuses([&] { module->forward(x); }, {"W_v", "negatives"}));
  module->W_v->weight.set_data(weight);
  module->forward(x);
  module->sinks.set_data(test::with_freed_memory(at::zeros({2})));
  EXPECT_TRUE(test::refuses([&] { module->forward(x); }, {"sinks", "memory"}));
}

TEST(ModuleDtypeTest, GainsAndSinksMayBeWiderThanTheProjections) {
  at::NoGradGuard no_grad;
  MultiHeadAttention module(
      MultiHeadAttentionOptions(16, 2).sinks(true).qk_norm(QKNorm::rms).dtype(at::kBFloat16));
  for (auto* parameter : {&module->sinks, &module->q_norm, &module->k_norm}) {
    parameter->set_data(parameter->to(at::kFloat));
  }
  const auto x = at::randn({2, 3, 16}).to(at::kBFloat16);
  EXPECT_EQ(module->forward(x).output.scalar_type(), at::kBFloat16);
}

TEST(ModuleDtypeTest, ModulesOfOtherDtypesThanTheFourAreRefused) {
  for (const auto dtype : {at::kInt, at::kLong, at::kComplexFloat, at::kComplexDouble}) {
    MultiHeadAttention module(MultiHeadAttentionOptions(16, 2));
    for (auto& parameter : module->parameters()) parameter.set_requires_grad(false);
    module->to(dtype);
    const auto x = at::ones({2, 3, 16}, dtype);
    EXPECT_TRUE(refuses([&] { module->forward(x); },
                        {"W_q.weight", "float32", "bfloat16", c10::toString(dtype)}));
    EXPECT_TRUE(refuses([&] { module->project_keys(x); }, {"W_q.weight", "float32"}));
  }
  EXPECT_TRUE(refuses(
      [] { MultiHeadAttention(MultiHeadAttentionOptions(16, 2).dtype(at::kFloat8_e5m2)); },
      {"dtype", "float32", "Float8_e5m2"}));
}

TEST(ModuleDtypeTest, AModuleOnMetaHasItsShapesAndIsRefusedWhereNumbersAreWanted) {
  MultiHeadAttention module(MultiHeadAttentionOptions(16, 2)
                                .num_kv_heads(1)
                                .sinks(true)
                                .output_gate(OutputGate::elementwise)
                                .device(at::kMeta));
  const auto shapes =
      MultiHeadAttention(
          MultiHeadAttentionOptions(16, 2).num_kv_heads(1).sinks(true).output_gate(
              OutputGate::elementwise))
          ->named_parameters();
  ASSERT_EQ(module->named_parameters().keys(), shapes.keys());
  for (const auto& parameter : module->named_parameters()) {
    EXPECT_TRUE(parameter->is_meta()) << parameter.key();
    EXPECT_TRUE(parameter->requires_grad()) << parameter.key();
    EXPECT_EQ(parameter->sizes(), shapes[parameter.key()].sizes()) << parameter.key();
  }
  const auto meta = at::TensorOptions(at::kMeta);
  EXPECT_TRUE(
      refuses([&] { module->forward(at::empty({2, 3, 15}, meta)); }, {"query", "16", "15"}));
  EXPECT_TRUE(
      refuses([&] { module->forward(at::empty({2, 3, 16})); }, {"query", "meta", "cpu"}));
  const auto x = at::empty({2, 3, 16}, meta);
  EXPECT_EQ(module->forward(x, x, x, Mask::causal()).output.sizes(), x.sizes());
  EXPECT_TRUE(refuses([&] { module->clone(at::Device(at::kCPU)); }, {"clone", "meta", "cpu"}));
  const MultiHeadAttention values(16, 2);
  const auto shapes_only = values->clone(at::Device(at::kMeta));
  for (const auto& parameter : shapes_only->parameters()) EXPECT_TRUE(parameter.is_meta());
}

TEST(ModuleDtypeTest, AModuleOnMetaIsRefusedByFilesAndConversions) {
  const TemporaryDirectory directory;
  const auto path = directory.file("weights");
  MultiHeadAttention meta(MultiHeadAttentionOptions(16, 2).device(at::kMeta)), real(16, 2);
  EXPECT_TRUE(refuses([&] { save(meta, path); }, {"memory", "meta"}));
  save(real, path);
  EXPECT_TRUE(refuses([&] { load(meta, path); }, {"memory", "meta"}));
  std::stringstream file;
  torch::save(real, file);
  EXPECT_TRUE(
      refuses([&] { torch::load(meta, file); }, {"device", "W_q.weight", "meta", "cpu"}));
  EXPECT_TRUE(refuses([&] { to_torch(meta); }, {"to_torch", "memory", "meta"}));
}

TEST(ModuleDtypeTest, AnOutputProjectionOnMetaIsRefused) {
  MultiHeadAttention module(16, 2), other(MultiHeadAttentionOptions(16, 2).device(at::kMeta));
  module->W_o = torch::nn::Linear(module->replace_module("W_o", other->W_o));
  EXPECT_TRUE(
      refuses([&] { module->forward(at::randn({2, 3, 16})); }, {"W_o.weight", "cpu", "meta"}));
}

}  // namespace
}  // namespace mha::test
