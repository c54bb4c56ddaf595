// Guards that a layer in the layout of another model family computes what that family's Python
// code computes with the same file. float32 of unit scale: two orders of summation differ by a
// few 1e-7.
#include <gtest/gtest.h>
#include <mha/weight_file.h>

#include "support.h"
#include "torch_headers.h"
#include "weights/safetensors.h"

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

}  // namespace
}  // namespace mha
