// Guards torch::load into a module: an archive goes in whole or not at all. One that lacks a
// parameter, has one that the module lacks, or one of another shape or dtype is refused with
// every problem named, and the module stays as it was. Everything here is exact.
#include <mha/multi_head_attention.h>
#include <mha/relative_position_bias.h>

#include <sstream>
#include <string>
#include <vector>

#include "support/expect.h"
#include "support/support.h"

namespace mha::test {
namespace {

MultiHeadAttentionOptions eight() {
  return MultiHeadAttentionOptions(8, 2);
}

// Whether loading what `saved` writes is refused by these words, and changes nothing.
template <typename Module>
::testing::AssertionResult refuses_archive(Module& module, const Module& saved,
                                           std::initializer_list<std::string> words) {
  std::stringstream file;
  torch::save(saved, file);
  std::vector<at::Tensor> before;
  for (const auto& parameter : module->parameters()) before.push_back(parameter.clone());
  const auto result = refuses([&] { torch::load(module, file); }, words);
  size_t i = 0;
  for (const auto& parameter : module->parameters()) {
    const auto same = is_bit_equal(parameter, before[i++]);
    if (!same) return ::testing::AssertionFailure() << "changed: " << same.message();
  }
  return result;
}

TEST(ArchiveTest, OfAnotherModuleIsRefusedAndTheModuleStaysAsItWas) {
  MultiHeadAttention module(eight());
  EXPECT_TRUE(refuses_archive(module, MultiHeadAttention(4, 2),
                              {"torch::load", "W_q.weight", "[8, 8]", "[4, 4]", "W_o.bias"}));
  EXPECT_TRUE(refuses_archive(module, MultiHeadAttention(eight().num_kv_heads(1)),
                              {"W_k.weight", "[8, 8]", "[4, 8]", "W_v.bias"}));
  EXPECT_TRUE(refuses_archive(module, MultiHeadAttention(eight().bias(false)),
                              {"missing", "W_q.bias", "W_o.bias"}));
  EXPECT_TRUE(refuses_archive(module, MultiHeadAttention(eight().sinks(true)),
                              {"unexpected", "sinks"}));
  EXPECT_TRUE(refuses_archive(module,
                              MultiHeadAttention(eight().output_gate(OutputGate::per_head)),
                              {"unexpected", "W_g"}));
  EXPECT_TRUE(refuses_archive(module, MultiHeadAttention(eight().dtype(at::kDouble)),
                              {"dtype", "W_q.weight", "Float", "Double"}));
  MultiHeadAttention with_all(
      eight().sinks(true).qk_norm(QKNorm::rms).add_bias_kv(true).kdim(3));
  EXPECT_TRUE(refuses_archive(with_all, module,
                              {"missing", "sinks", "q_norm", "k_norm", "bias_k", "bias_v",
                               "W_k.weight", "[8, 3]", "[8, 8]"}));
}

TEST(ArchiveTest, OfTheSameParametersIsTakenWithFrozenFlagsAsTheyWere) {
  const auto options = eight().sinks(true).num_kv_heads(1).output_gate(OutputGate::per_head);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    MultiHeadAttention saved(MultiHeadAttentionOptions(options).dtype(dtype)),
        loaded(MultiHeadAttentionOptions(options).dtype(dtype));
    loaded->W_k->weight.set_requires_grad(false);
    std::stringstream file;
    torch::save(saved, file);
    torch::load(loaded, file, at::kCPU);
    const auto expected = saved->named_parameters();
    for (const auto& parameter : loaded->named_parameters()) {
      EXPECT_TRUE(is_bit_equal(parameter.value(), expected[parameter.key()]));
    }
    EXPECT_FALSE(loaded->W_k->weight.requires_grad());
    const auto x = at::randn({2, 3, 8}).to(dtype);
    EXPECT_TRUE(is_same_but_for_blas(loaded->forward(x).output, saved->forward(x).output));
  }
}

TEST(ArchiveTest, MaySayMoreOfAModuleThanItsTensorsAndLayers) {
  const auto saved = std::make_shared<MultiHeadAttentionImpl>(eight());
  torch::serialize::OutputArchive archive;
  saved->save(archive);
  archive.write("_is_full_backward_hook", c10::IValue(true));
  std::stringstream file;
  archive.save_to(file);
  MultiHeadAttention loaded(eight());
  torch::load(loaded, file);
  EXPECT_TRUE(is_bit_equal(loaded->W_q->weight, saved->W_q->weight));
}

// A user's own module around it.
struct HolderImpl : torch::nn::Module {
  explicit HolderImpl(int64_t width)
      : attention(register_module("attention", MultiHeadAttention(width, 2))) {}
  MultiHeadAttention attention;
};
TORCH_MODULE(Holder);

TEST(ArchiveTest, IsCheckedForAChildOfAnotherModuleToo) {
  Holder eight_wide(8), same(8), other(4);
  EXPECT_TRUE(refuses_archive(eight_wide, other, {"W_q.weight", "[8, 8]", "[4, 4]"}));
  std::stringstream file;
  torch::save(same, file);
  torch::load(eight_wide, file);
  EXPECT_TRUE(is_bit_equal(eight_wide->attention->W_v->weight, same->attention->W_v->weight));
}

TEST(ArchiveTest, OfATableOfAnotherShapeIsRefused) {
  RelativePositionBias bias(RelativePositionBiasOptions(2)),
      good(RelativePositionBiasOptions(2));
  EXPECT_TRUE(refuses_archive(bias, RelativePositionBias(RelativePositionBiasOptions(4)),
                              {"torch::load", "weight", "[32, 2]", "[32, 4]"}));
  std::stringstream file;
  torch::save(good, file);
  torch::load(bias, file);
  EXPECT_TRUE(is_bit_equal(bias->weight, good->weight));
}

}  // namespace
}  // namespace mha::test
