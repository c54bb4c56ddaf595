// Guards that from_torch and to_torch carry everything both ways: options, weights, frozen
// flags, training mode, dtype. Copies are bit-equal; results of the two modules, which multiply
// in other orders, agree to 2e-6 in float32 and 1e-12 in float64 for data of unit scale.
#include <mha/torch_conversion.h>

#include <functional>
#include <string>
#include <vector>

#include "support/expect.h"

namespace mha {
namespace {

using test::is_bit_equal;
using test::is_close;
using test::refuses;

using TorchOptions = torch::nn::MultiheadAttentionOptions;

// Every option that torch's module has, crossed: 2^3 x 4 widths.
std::vector<TorchOptions> every_torch_option() {
  std::vector<TorchOptions> all;
  for (const auto& [kdim, vdim] : {std::pair{12, 12}, {5, 5}, {5, 12}, {12, 7}}) {
    for (const int flags : {0, 1, 2, 3, 4, 5, 6, 7}) {
      all.push_back(TorchOptions(12, 3)
                        .kdim(kdim)
                        .vdim(vdim)
                        .bias((flags & 1) != 0)
                        .add_bias_kv((flags & 2) != 0)
                        .add_zero_attn((flags & 4) != 0)
                        .dropout(0.25));
    }
  }
  return all;
}

MultiHeadAttentionOptions mirrored(const TorchOptions& theirs) {
  return MultiHeadAttentionOptions(theirs.embed_dim(), theirs.num_heads())
      .kdim(theirs.kdim())
      .vdim(theirs.vdim())
      .bias(theirs.bias())
      .add_bias_kv(theirs.add_bias_kv())
      .add_zero_attn(theirs.add_zero_attn())
      .dropout(theirs.dropout())
      .batch_first(false);
}

// Torch starts biases at 0, which would hide a lost one.
template <typename Module>
Module with_random_parameters(Module module) {
  torch::NoGradGuard no_grad;
  for (auto& parameter : module->parameters()) parameter.normal_(0, 0.3);
  return module;
}

bool torch_computes(const TorchOptions& options) {
  return options.kdim() == options.vdim();
}

void expect_same_results(MultiHeadAttention ours, torch::nn::MultiheadAttention theirs,
                         at::ScalarType dtype, double tolerance) {
  ours->eval();
  theirs->eval();
  const auto options = theirs->options;
  const auto query = at::randn({4, 2, 12}, dtype),
             key = at::randn({5, 2, options.kdim()}, dtype),
             value = at::randn({5, 2, options.vdim()}, dtype);
  const auto [output, weights] = ours->forward(query, key, value, Mask(), Weights::averaged);
  const auto [expected, map] = theirs->forward(query, key, value);
  EXPECT_TRUE(is_close(output, expected, tolerance));
  EXPECT_TRUE(is_close(weights, map, tolerance));
}

TEST(TorchConversionTest, FromTorchGivesTheResultsOfTorchWithEveryOption) {
  torch::manual_seed(81);
  for (const auto& options : every_torch_option()) {
    if (!torch_computes(options)) continue;
    for (const auto& [dtype, tolerance] : {std::pair{at::kFloat, 2e-6}, {at::kDouble, 1e-12}}) {
      auto theirs = with_random_parameters(torch::nn::MultiheadAttention(options));
      theirs->to(dtype);
      expect_same_results(from_torch(theirs), theirs, dtype, tolerance);
    }
  }
}

TEST(TorchConversionTest, ToTorchGivesTheResultsOfTheModuleWithEveryOption) {
  torch::manual_seed(82);
  for (const auto& options : every_torch_option()) {
    if (!torch_computes(options)) continue;
    for (const auto& [dtype, tolerance] : {std::pair{at::kFloat, 2e-6}, {at::kDouble, 1e-12}}) {
      const auto ours =
          with_random_parameters(MultiHeadAttention(mirrored(options).dtype(dtype)));
      expect_same_results(ours, to_torch(ours), dtype, tolerance);
    }
  }
}

TEST(TorchConversionTest, ARoundTripKeepsEveryParameterAndOption) {
  torch::manual_seed(83);
  for (const auto& options : every_torch_option()) {
    const auto ours = with_random_parameters(MultiHeadAttention(mirrored(options)));
    const auto theirs = to_torch(ours);
    EXPECT_EQ(theirs->options.kdim(), options.kdim());
    EXPECT_EQ(theirs->options.vdim(), options.vdim());
    EXPECT_EQ(theirs->options.bias(), options.bias());
    EXPECT_EQ(theirs->options.dropout(), options.dropout());
    EXPECT_EQ(theirs->options.add_bias_kv(), options.add_bias_kv());
    EXPECT_EQ(theirs->options.add_zero_attn(), options.add_zero_attn());
    const auto back = from_torch(theirs);
    EXPECT_EQ(back->named_parameters().keys(), ours->named_parameters().keys());
    for (const auto& parameter : ours->named_parameters()) {
      EXPECT_TRUE(is_bit_equal(back->named_parameters()[parameter.key()], parameter.value()))
          << parameter.key();
    }
    EXPECT_EQ(back->options.kdim().value_or(12), options.kdim());
    EXPECT_EQ(back->options.vdim().value_or(12), options.vdim());
    EXPECT_EQ(back->options.bias(), options.bias());
    EXPECT_EQ(back->options.dropout(), options.dropout());
    EXPECT_EQ(back->options.add_bias_kv(), options.add_bias_kv());
    EXPECT_EQ(back->options.add_zero_attn(), options.add_zero_attn());
  }
}

TEST(TorchConversionTest, AConvertedModuleIsSequenceFirstAndReturnsAveragedWeights) {
  const auto ours = from_torch(torch::nn::MultiheadAttention(TorchOptions(12, 3)));
  EXPECT_FALSE(ours->options.batch_first());
  EXPECT_EQ(ours->options.weights(), Weights::averaged);
}

TEST(TorchConversionTest, TheLayoutOfTheModuleDoesNotMatterToTorch) {
  torch::manual_seed(84);
  auto ours = with_random_parameters(MultiHeadAttention(12, 3));  // batch first
  auto theirs = to_torch(ours);
  const auto x = at::randn({2, 4, 12}), across = x.transpose(0, 1);
  EXPECT_TRUE(is_close(std::get<0>(theirs->forward(across, across, across)).transpose(0, 1),
                       ours->forward(x).output, 2e-6));
}

TEST(TorchConversionTest, FrozenFlagsTrainingModeAndDtypeAreCarriedBothWays) {
  for (const bool frozen : {true, false}) {
    torch::nn::MultiheadAttention theirs(TorchOptions(12, 3).add_bias_kv(true));
    theirs->to(at::kDouble);
    theirs->train(frozen);
    theirs->in_proj_weight.set_requires_grad(!frozen);
    theirs->out_proj->bias.set_requires_grad(frozen);
    theirs->bias_k.set_requires_grad(!frozen);
    const auto ours = from_torch(theirs);
    EXPECT_EQ(ours->is_training(), frozen);
    EXPECT_EQ(ours->W_o->is_training(), frozen);
    for (const auto& parameter : ours->named_parameters()) {
      EXPECT_EQ(parameter->scalar_type(), at::kDouble) << parameter.key();
      EXPECT_TRUE(parameter->is_leaf()) << parameter.key();
    }
    for (const auto& linear : {ours->W_q, ours->W_k, ours->W_v}) {
      EXPECT_EQ(linear->weight.requires_grad(), !frozen);
      EXPECT_TRUE(linear->bias.requires_grad());
    }
    EXPECT_TRUE(ours->W_o->weight.requires_grad());
    EXPECT_EQ(ours->W_o->bias.requires_grad(), frozen);
    EXPECT_EQ(ours->bias_k.requires_grad(), !frozen);
    EXPECT_TRUE(ours->bias_v.requires_grad());
    const auto back = to_torch(ours);
    EXPECT_EQ(back->is_training(), frozen);
    const auto carried_parameters = back->named_parameters();
    for (const auto& parameter : theirs->named_parameters()) {
      const auto& carried = carried_parameters[parameter.key()];
      EXPECT_EQ(carried.requires_grad(), parameter->requires_grad()) << parameter.key();
      EXPECT_EQ(carried.scalar_type(), at::kDouble) << parameter.key();
    }
  }
}

TEST(TorchConversionTest, ConversionsCopyAndDrawNoRandomNumbers) {
  torch::manual_seed(85);
  const auto theirs =
      with_random_parameters(torch::nn::MultiheadAttention(TorchOptions(12, 3)));
  const auto weight = theirs->in_proj_weight.detach().clone();
  const auto generator = at::detail::getDefaultCPUGenerator();
  const auto state = generator.get_state();
  const auto ours = from_torch(theirs);
  EXPECT_TRUE(is_bit_equal(generator.get_state(), state));
  const auto back = to_torch(ours);
  EXPECT_TRUE(is_bit_equal(generator.get_state(), state));
  torch::NoGradGuard no_grad;
  for (auto& parameter : ours->parameters()) parameter.zero_();
  EXPECT_TRUE(is_bit_equal(theirs->in_proj_weight, weight));
  EXPECT_TRUE(is_bit_equal(back->in_proj_weight, weight));
}

TEST(TorchConversionTest, AnOptionThatTorchLacksIsRefused) {
  const MultiHeadAttentionOptions options(12, 3);
  const auto refused = [](const MultiHeadAttentionOptions& with,
                          std::initializer_list<std::string> words) {
    const MultiHeadAttention module(with);
    return refuses([&] { to_torch(module); }, words);
  };
  EXPECT_TRUE(
      refused(MultiHeadAttentionOptions(options).head_dim(5), {"head_dim", "12", "3", "5"}));
  EXPECT_TRUE(
      refused(MultiHeadAttentionOptions(options).scale(0.25), {"scale", "0.5", "0.25"}));
  EXPECT_TRUE(
      refused(MultiHeadAttentionOptions(options).num_kv_heads(1), {"num_kv_heads", "3", "1"}));
  EXPECT_TRUE(refused(MultiHeadAttentionOptions(options).softcap(20), {"softcap", "0", "20"}));
  EXPECT_TRUE(refused(MultiHeadAttentionOptions(options).sinks(true), {"sinks", "true"}));
  EXPECT_TRUE(
      refused(MultiHeadAttentionOptions(options).output_bias(false), {"output_bias", "bias"}));
  EXPECT_NO_THROW(
      to_torch(MultiHeadAttention(MultiHeadAttentionOptions(options).num_kv_heads(3))));
  EXPECT_NO_THROW(to_torch(MultiHeadAttention(MultiHeadAttentionOptions(options).scale(0.5))));
  EXPECT_NO_THROW(to_torch(MultiHeadAttention(MultiHeadAttentionOptions(options).head_dim(4))));
}

TEST(TorchConversionTest, AModuleOfTorchsWhoseParametersDoNotFitItsOptionsIsRefused) {
  using Theirs = torch::nn::MultiheadAttention;
  struct Change {
    std::function<void(torch::nn::MultiheadAttentionImpl&)> make;
    std::vector<std::string> words;
  };
  const std::vector<Change> changes{
      {[](auto& m) {
         m.in_proj_weight.set_data(at::zeros({7, 12}));
       },
       {"in_proj_weight", "[36, 12]", "[7, 12]"}},
      {[](auto& m) {
         m.in_proj_weight.set_data(at::zeros({36, 11}));
       },
       {"in_proj_weight", "[36, 12]", "[36, 11]"}},
      {[](auto& m) { m.in_proj_bias.set_data(at::zeros({7})); },
       {"in_proj_bias", "[36]", "[7]"}},
      {[](auto& m) { m.in_proj_bias = at::Tensor(); }, {"in_proj_bias", "[36]", "none"}},
      {[](auto& m) {
         m.out_proj->weight.set_data(at::zeros({12, 9}));
       },
       {"out_proj.weight", "[12, 12]", "[12, 9]"}},
      {[](auto& m) { m.out_proj->bias.set_data(at::zeros({1})); },
       {"out_proj.bias", "[12]", "[1]"}},
      {[](auto& m) { m.bias_k.set_data(at::zeros({12})); }, {"bias_k", "[1, 1, 12]", "[12]"}},
      {[](auto& m) {
         m.bias_v.set_data(at::zeros({1, 1, 12}, at::kDouble));
       },
       {"bias_v", "Float", "Double"}},
      {[](auto& m) {
         m.out_proj->weight.set_data(at::zeros({12, 12}, at::kHalf));
       },
       {"out_proj.weight", "Float", "Half"}},
      {[](auto& m) { m.options.bias(false); }, {"in_proj_bias", "none", "[36]"}},
      {[](auto& m) { m.options.add_bias_kv(false); }, {"bias_k", "none", "[1, 1, 12]"}},
      {[](auto& m) { m.options.num_heads(5); }, {"num_heads", "12", "5"}},
      {[](auto& m) { m.options.embed_dim(24); }, {"in_proj_weight", "[72, 24]", "[36, 12]"}},
  };
  for (const auto& [make, words] : changes) {
    Theirs theirs(TorchOptions(12, 3).add_bias_kv(true));
    make(*theirs);
    for (const auto& word : words) EXPECT_TRUE(refuses([&] { from_torch(theirs); }, {word}));
  }
  Theirs apart(TorchOptions(12, 3).kdim(5).vdim(7));
  apart->k_proj_weight.set_data(at::zeros({12, 12}));
  EXPECT_TRUE(refuses([&] { from_torch(apart); }, {"k_proj_weight", "[12, 5]", "[12, 12]"}));
  EXPECT_TRUE(refuses([] { from_torch(Theirs(nullptr)); }, {"from_torch", "module", "empty"}));
  EXPECT_TRUE(
      refuses([] { to_torch(MultiHeadAttention(nullptr)); }, {"to_torch", "module", "empty"}));
}

}  // namespace
}  // namespace mha
