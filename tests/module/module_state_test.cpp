// Guards what the module is apart from its call: its parameters, how they are drawn, copied and
// saved, and how it describes itself. Everything here is exact: draws and copies are bit-equal.
#include <mha/multi_head_attention.h>

#include <sstream>

#include "support/expect.h"

namespace mha {
namespace {

using test::is_bit_equal;
using test::is_same_result;

MultiHeadAttentionOptions options() {
  return MultiHeadAttentionOptions(12, 3);
}

at::Tensor generator_state() {
  return at::detail::getDefaultCPUGenerator().get_state();
}

::testing::AssertionResult equal_parameters(const torch::nn::Module& a,
                                            const torch::nn::Module& b) {
  const auto left = a.named_parameters(), right = b.named_parameters();
  if (left.keys() != right.keys()) return ::testing::AssertionFailure() << "other names";
  for (const auto& parameter : left) {
    if (auto equal = is_bit_equal(parameter.value(), right[parameter.key()]); !equal) {
      return equal << "in " << parameter.key();
    }
  }
  return ::testing::AssertionSuccess();
}

TEST(ModuleStateTest, ParametersHaveTheirDocumentedNamesShapesAndOrder) {
  MultiHeadAttention module(options().head_dim(5).kdim(7).vdim(8).add_bias_kv(true));
  std::vector<std::string> found;
  for (const auto& parameter : module->named_parameters()) {
    found.push_back((std::ostringstream() << parameter.key() << parameter->sizes()).str());
  }
  EXPECT_EQ(found, (std::vector<std::string>{
                       "bias_k[1, 1, 15]", "bias_v[1, 1, 15]", "W_q.weight[15, 12]",
                       "W_q.bias[15]", "W_k.weight[15, 7]", "W_k.bias[15]", "W_v.weight[15, 8]",
                       "W_v.bias[15]", "W_o.weight[12, 15]", "W_o.bias[12]"}));
}

TEST(ModuleStateTest, SinksAreAParameterOfZerosThatDrawsNothing) {
  torch::manual_seed(58);
  MultiHeadAttention without(options());
  torch::manual_seed(58);
  MultiHeadAttention with(options().sinks(true));
  EXPECT_TRUE(is_bit_equal(with->named_parameters()["sinks"], at::zeros({3})));
  EXPECT_TRUE(with->sinks.requires_grad());
  EXPECT_TRUE(is_bit_equal(with->W_o->weight, without->W_o->weight));
  EXPECT_FALSE(without->sinks.defined());
  EXPECT_EQ(without->named_parameters().find("sinks"), nullptr);
  const auto x = at::randn({2, 4, 12});
  with(x).output.sum().backward();
  EXPECT_GT(with->sinks.grad().abs().max().item<double>(), 0);
}

TEST(ModuleStateTest, WithoutBiasNoProjectionHasOne) {
  MultiHeadAttention module(options().bias(false));
  EXPECT_EQ(module->named_parameters().keys(),
            (std::vector<std::string>{"W_q.weight", "W_k.weight", "W_v.weight", "W_o.weight"}));
}

TEST(ModuleStateTest, OneSeedDrawsWhatFourLinearsInSequenceDraw) {
  for (const bool bias : {true, false}) {
    torch::manual_seed(51);
    const auto linear = [bias](int64_t in, int64_t out) {
      return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
    };
    const std::vector<torch::nn::Linear> linears{linear(12, 15), linear(7, 15), linear(8, 15),
                                                 linear(15, 12)};
    const auto bias_k = torch::nn::init::xavier_normal_(at::empty({1, 1, 15}));
    const auto bias_v = torch::nn::init::xavier_normal_(at::empty({1, 1, 15}));
    const auto after = generator_state();
    torch::manual_seed(51);
    MultiHeadAttention module(
        options().head_dim(5).kdim(7).vdim(8).bias(bias).add_bias_kv(true));
    EXPECT_TRUE(equal_parameters(*module->W_q, *linears[0]));
    EXPECT_TRUE(equal_parameters(*module->W_k, *linears[1]));
    EXPECT_TRUE(equal_parameters(*module->W_v, *linears[2]));
    EXPECT_TRUE(equal_parameters(*module->W_o, *linears[3]));
    EXPECT_TRUE(is_bit_equal(module->bias_k, bias_k));
    EXPECT_TRUE(is_bit_equal(module->bias_v, bias_v));
    EXPECT_TRUE(is_bit_equal(generator_state(), after));
  }
}

TEST(ModuleStateTest, ResettingTheParametersRepeatsTheDrawOfTheConstructor) {
  torch::manual_seed(52);
  MultiHeadAttention module(options().add_bias_kv(true));
  const auto first = std::dynamic_pointer_cast<MultiHeadAttentionImpl>(module->clone());
  module->reset_parameters();
  EXPECT_FALSE(equal_parameters(*module, *first));
  torch::manual_seed(52);
  module->reset_parameters();
  EXPECT_TRUE(equal_parameters(*module, *first));
}

TEST(ModuleStateTest, TheProjectionsKnowTheirOwnSizes) {
  MultiHeadAttention module(options().kdim(7).bias(false));
  EXPECT_EQ(module->W_k->options.in_features(), 7);
  EXPECT_EQ(module->W_k->options.out_features(), 12);
  EXPECT_FALSE(module->W_k->options.bias());
  EXPECT_EQ(module->head_dim(), 4);
}

// The CPU, and a GPU where there is one.
std::vector<at::Device> devices() {
  std::vector<at::Device> found{at::Device(at::kCPU)};
  if (torch::cuda::is_available()) found.emplace_back(at::kCUDA, 0);
  return found;
}

TEST(ModuleStateTest, ParametersAreMadeInTheDtypeAndOnTheDeviceOfTheOptions) {
  EXPECT_EQ(MultiHeadAttention(options())->W_q->weight.scalar_type(), at::kFloat);
  for (const auto device : devices()) {
    MultiHeadAttention module(options().add_bias_kv(true).dtype(at::kBFloat16).device(device));
    for (const auto& parameter : module->named_parameters()) {
      EXPECT_EQ(parameter->scalar_type(), at::kBFloat16) << parameter.key();
      EXPECT_EQ(parameter->device(), device) << parameter.key();
      EXPECT_TRUE(parameter->requires_grad()) << parameter.key();
    }
    const auto x = at::ones({2, 4, 12}, at::TensorOptions(device).dtype(at::kBFloat16));
    EXPECT_EQ(module(x).output.device(), device);
  }
}

TEST(ModuleStateTest, ParametersTakeTheDefaultDtypeOfTorch) {
  const auto before = c10::get_default_dtype();
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  MultiHeadAttention module(options());
  torch::set_default_dtype(before);
  for (const auto& parameter : module->parameters()) {
    EXPECT_EQ(parameter.scalar_type(), at::kDouble);
  }
}

TEST(ModuleStateTest, ACloneIsEqualAndIndependentAndDrawsNothing) {
  MultiHeadAttention module(
      options().add_bias_kv(true).dropout(0.25).weights(Weights::averaged));
  module->eval();
  const auto state = generator_state();
  const auto copy = std::dynamic_pointer_cast<MultiHeadAttentionImpl>(module->clone());
  EXPECT_TRUE(is_bit_equal(generator_state(), state));
  ASSERT_TRUE(copy);
  EXPECT_FALSE(copy->is_training());
  EXPECT_TRUE(equal_parameters(*module, *copy));
  const auto x = at::randn({2, 4, 12});
  EXPECT_TRUE(is_same_result(copy->forward(x).output, module->forward(x).output));
  EXPECT_TRUE(is_same_result(copy->forward(x).weights, module->forward(x).weights));
  {
    torch::NoGradGuard no_grad;
    const auto before = module->forward(x).output;
    for (auto& parameter : copy->parameters()) parameter.add_(1);
    EXPECT_TRUE(is_same_result(module->forward(x).output, before));
    EXPECT_FALSE(at::equal(copy->forward(x).output, before));
  }
}

TEST(ModuleStateTest, ACloneKeepsTheDtypeAndGoesToTheDeviceAskedFor) {
  MultiHeadAttention module(options());
  module->to(at::kDouble);
  for (const auto device : devices()) {
    const auto copy = std::dynamic_pointer_cast<MultiHeadAttentionImpl>(module->clone(device));
    for (const auto& parameter : copy->named_parameters()) {
      EXPECT_EQ(parameter->scalar_type(), at::kDouble) << parameter.key();
      EXPECT_EQ(parameter->device(), device) << parameter.key();
      EXPECT_NE(parameter->data_ptr(), module->named_parameters()[parameter.key()].data_ptr());
    }
  }
}

// A user's own module, whose clone() is torch's: it copies its children in place.
struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
  BlockImpl() { reset(); }
  void reset() override {
    attention = register_module("attention", MultiHeadAttention(options().add_bias_kv(true)));
  }
  MultiHeadAttention attention{nullptr};
};

TEST(ModuleStateTest, AChildOfAClonedModuleStaysFrozenEqualAndIndependent) {
  BlockImpl block;
  block.eval();
  block.attention->W_k->weight.set_requires_grad(false);
  block.attention->bias_v.set_requires_grad(false);
  const auto copy = std::dynamic_pointer_cast<BlockImpl>(block.clone());
  EXPECT_TRUE(equal_parameters(block, *copy));
  for (const auto& parameter : block.named_parameters()) {
    EXPECT_EQ(copy->named_parameters()[parameter.key()].requires_grad(),
              parameter->requires_grad())
        << parameter.key();
    EXPECT_NE(copy->named_parameters()[parameter.key()].data_ptr(), parameter->data_ptr());
  }
  EXPECT_FALSE(copy->attention->is_training());
  const auto x = at::randn({2, 4, 12});
  EXPECT_TRUE(is_same_result(copy->attention(x).output, block.attention(x).output));
  // What the copy computes with is what it registered.
  torch::NoGradGuard no_grad;
  copy->named_parameters()["attention.W_q.weight"].zero_();
  copy->named_parameters()["attention.bias_k"].zero_();
  EXPECT_TRUE(test::all_zero(copy->attention->W_q->weight));
  EXPECT_TRUE(test::all_zero(copy->attention->bias_k));
}

TEST(ModuleStateTest, TorchSaveAndLoadCarryEveryParameter) {
  MultiHeadAttention saved(options().kdim(7).add_bias_kv(true).sinks(true)),
      loaded(options().kdim(7).add_bias_kv(true).sinks(true));
  saved->sinks.detach().normal_();
  std::stringstream file;
  torch::save(saved, file);
  torch::load(loaded, file);
  EXPECT_TRUE(equal_parameters(*saved, *loaded));
  const auto q = at::randn({2, 4, 12}), k = at::randn({2, 5, 7}), v = at::randn({2, 5, 12});
  EXPECT_TRUE(is_same_result(loaded(q, k, v).output, saved(q, k, v).output));
}

TEST(ModuleStateTest, AnAnyModuleTakesTheDefaultArgumentsAndAllOfThem) {
  MultiHeadAttention module(options());
  torch::nn::AnyModule any(module);
  const auto x = at::randn({2, 4, 12}), y = at::randn({2, 5, 12});
  const Mask mask = Mask::causal();
  const auto short_call = any.forward<AttentionOutput>(x);
  EXPECT_TRUE(is_same_result(short_call.output, module(x).output));
  EXPECT_TRUE(is_same_result(short_call.weights, module(x).weights));
  EXPECT_TRUE(
      is_same_result(any.forward<AttentionOutput>(x, y, y).output, module(x, y, y).output));
  EXPECT_TRUE(is_same_result(any.forward<AttentionOutput>(x, y, y, mask).output,
                             module(x, y, y, mask).output));
  const auto full =
      any.forward<AttentionOutput>(x, y, y, mask, std::optional<Weights>(Weights::averaged));
  EXPECT_TRUE(is_same_result(full.weights, module(x, y, y, mask, Weights::averaged).weights));
}

TEST(ModuleStateTest, PrettyPrintShowsEveryOption) {
  const auto text = [](const MultiHeadAttentionOptions& with) {
    MultiHeadAttention module(with);
    return (std::ostringstream() << *module).str();
  };
  const auto defaults = text(options());
  for (const char* part :
       {"mha::MultiHeadAttention(", "d_model=12", "num_heads=3", "num_kv_heads=3", "head_dim=4",
        "kdim=12", "vdim=12", "bias=true", "dropout=0", "add_bias_kv=false",
        "add_zero_attn=false", "batch_first=true", "scale=0.5", "softcap=0", "sinks=false",
        "weights=per_head", "weights_after_dropout=false", "dtype=Float", "device=cpu"}) {
    EXPECT_TRUE(test::has_word(defaults, part)) << part << " in " << defaults;
  }
  const auto others = text(options()
                               .head_dim(5)
                               .kdim(7)
                               .vdim(8)
                               .bias(false)
                               .dropout(0.25)
                               .add_bias_kv(true)
                               .add_zero_attn(true)
                               .batch_first(false)
                               .scale(0.125)
                               .softcap(30)
                               .sinks(true)
                               .weights(Weights::none)
                               .weights_after_dropout(true)
                               .dtype(at::kDouble));
  for (const char* part :
       {"head_dim=5", "kdim=7", "vdim=8", "bias=false", "dropout=0.25", "add_bias_kv=true",
        "add_zero_attn=true", "batch_first=false", "scale=0.125", "softcap=30", "sinks=true",
        "weights=none", "weights_after_dropout=true", "dtype=Double"}) {
    EXPECT_TRUE(test::has_word(others, part)) << part << " in " << others;
  }
}

}  // namespace
}  // namespace mha
