// Guards that a layer in the layout of another model family computes what that family's Python
// code computes with the same file. float32 of unit scale: two orders of summation differ by a
// few 1e-7.
#include <gtest/gtest.h>
#include <mha/weight_file.h>

#include "files/safetensors.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"
#include "support/weight_file_support.h"

namespace mha {
namespace {

using test::is_close;

void expect_output_of_python(const std::string& layout, const std::string& prefix,
                             int64_t heads, int64_t kv_heads) {
  if (std::string(MHA_TEST_PYTHON).empty()) {
    GTEST_SKIP() << "no Python with torch, numpy and safetensors was found at configure time";
  }
  const std::string path =
      MHA_PYTHON_OUTPUT_DIR "/weight_files/" + layout + ".layer.safetensors";
  MultiHeadAttention module = load(path, heads, WeightFileOptions().prefix(prefix));
  EXPECT_EQ(module->num_kv_heads(), kv_heads);
  detail::SafetensorsFile file(path);
  EXPECT_TRUE(is_close(module(file.read("input")).output, file.read("output"), 5e-6));
}

TEST(LayoutPythonTest, Gpt2) {
  expect_output_of_python("gpt2", "transformer.h.0.attn", 3, 3);
}

TEST(LayoutPythonTest, Vit) {
  expect_output_of_python("vit", "blocks.0.attn", 3, 3);
}

TEST(LayoutPythonTest, LlamaWithGroupedHeadsAndAFreeHeadSize) {
  expect_output_of_python("llama", "model.layers.0.self_attn", 6, 2);
}

// Causal, of a file of numpy's float64 and the same in float32.
void expect_output_of_numpy(const std::string& model, const std::string& prefix, int64_t heads,
                            const std::optional<RotaryOptions>& rotary, QKNorm norm) {
  if (std::string(MHA_TEST_PYTHON).empty()) {
    GTEST_SKIP() << "no Python with torch, numpy and safetensors was found at configure time";
  }
  const auto where = WeightFileOptions().prefix(prefix);
  const std::string start = MHA_PYTHON_OUTPUT_DIR "/weight_files/" + model;
  const auto expected = detail::SafetensorsFile(start + ".float64.safetensors").read("output");
  for (const auto& [dtype, tolerance] :
       {std::pair{"float64", 1e-13}, std::pair{"float32", 5e-6}}) {
    const std::string path = start + "." + dtype + ".safetensors";
    auto options = options_from_file(path, heads, where);
    EXPECT_EQ(options.qk_norm(), norm);
    MultiHeadAttention module(options.rotary(rotary));
    load(module, path, where);
    const auto x = detail::SafetensorsFile(path).read("input");
    for (const bool records : {true, false}) {
      torch::AutoGradMode mode(records);
      const auto output = module->attend(x, CallOptions(Mask::causal())).output;
      EXPECT_TRUE(is_close(output, expected, tolerance)) << dtype;
    }
  }
}

TEST(LayoutPythonTest, ALayerOfLlamaWithItsScaledRotaryPositions) {
  const auto rotary = RotaryOptions().base(500000).scaling(Llama3Scaling(4, 16));
  expect_output_of_numpy("llama_model", "model.layers.1.self_attn", 6, rotary, QKNorm::none);
  expect_output_of_numpy("qwen_model", "model.layers.1.self_attn", 6, rotary, QKNorm::rms);
}

// Its inputs have biases and its output has none, in the file that it is saved to as well.
TEST(LayoutPythonTest, ALayerOfQwen2WithBiasesButOfTheOutput) {
  const auto rotary = RotaryOptions().base(500000).scaling(Llama3Scaling(4, 16));
  expect_output_of_numpy("qwen2_model", "model.layers.1.self_attn", 6, rotary, QKNorm::none);
  const auto where = WeightFileOptions().prefix("model.layers.1.self_attn");
  const std::string path =
      MHA_PYTHON_OUTPUT_DIR "/weight_files/qwen2_model.float32.safetensors";
  const auto module = load(path, 6, where);
  EXPECT_EQ(module->options.output_bias(), false);
  const test::TemporaryDirectory directory;
  save(module, directory.file("again"), WeightFileOptions(where).layout(Layout::llama));
  auto expected = detail::read_safetensors(path).tensors;
  expected.erase("input");
  expected.erase("output");
  EXPECT_EQ(expected.size(), 7u);
  EXPECT_TRUE(
      test::are_bit_equal(detail::read_safetensors(directory.file("again")).tensors, expected));
}

TEST(LayoutPythonTest, ALayerOfGpt2UnderItsCausalMask) {
  expect_output_of_numpy("gpt2_model", "h.1.attn", 4, std::nullopt, QKNorm::none);
}

}  // namespace
}  // namespace mha
