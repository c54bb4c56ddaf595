// Guards that what `save` writes in a model's layout is read back by the model's own library:
// one or two models of each layout are loaded layer by layer, saved, and put in the place of
// the layers that transformers had saved (python/check_saved_models.py). All numbers that the
// models then return are compared, with the tolerance of a gain's sum 1 + g, which is rounded.
#include <gtest/gtest.h>
#include <mha/model_config.h>
#include <mha/weight_file.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "files/safetensors.h"
#include "support/file_support.h"
#include "support/torch_headers.h"

namespace mha {
namespace {

namespace fs = std::filesystem;

const std::vector<std::string>& saved_models() {
  static const std::vector<std::string> models = {"afmoe",
                                                  "albert",
                                                  "bart",
                                                  "beit",
                                                  "bert",
                                                  "codegen",
                                                  "ctrl",
                                                  "falcon",
                                                  "falcon-new_decoder",
                                                  "distilbert",
                                                  "gemma3_text",
                                                  "gpt2",
                                                  "gpt_bigcode",
                                                  "gpt_neo",
                                                  "gpt_neox",
                                                  "hunyuan_v1_dense",
                                                  "llama",
                                                  "mimo_v2_flash",
                                                  "modernbert",
                                                  "modernbert-decoder",
                                                  "mpt",
                                                  "phi-qk_layernorm",
                                                  "phi3",
                                                  "qwen3_next",
                                                  "stablelm-qk_layernorm",
                                                  "t5",
                                                  "videomae",
                                                  "vit",
                                                  "whisper",
                                                  "yolos"};
  return models;
}

TEST(SavedModelsTest, TransformersReadsBackWhatIsSavedInEachLayout) {
  const fs::path folder = MHA_PYTHON_OUTPUT_DIR "/models";
  if (!fs::exists(folder)) GTEST_SKIP() << "no Python with transformers";
  const test::TemporaryDirectory directory;
  std::set<std::string> layouts;
  for (const std::string& name : saved_models()) {
    SCOPED_TRACE(name);
    size_t layers = 0;
    fs::create_directory(directory.file(name));
    for (const auto& entry : fs::directory_iterator(folder / name)) {
      if (entry.path().extension() != ".call") continue;
      const auto call = detail::read_safetensors(entry.path().string()).metadata;
      const ModelLayer layer =
          load_layer((folder / name).string(), std::stoll(call.at("layer")),
                     ModelLayerLoadOptions().part(call.at("part")));
      save(layer.attention,
           (fs::path(directory.file(name)) / (entry.path().stem().string() + ".safetensors"))
               .string(),
           WeightFileOptions()
               .layout(layer.options.layout)
               .prefix(layer.options.prefixes.front()));
      layouts.insert(layer.options.layout.name());
      ++layers;
    }
    EXPECT_GE(layers, 2U);
  }
  const std::set<std::string> of_others = {"native", "torch", "vit"};  // vit is timm's
  for (const Layout& layout : Layout::built_in()) {
    EXPECT_NE(layouts.count(layout.name()), of_others.count(layout.name())) << layout;
  }
  const std::string command = "\"" MHA_TEST_PYTHON "\" \"" MHA_PYTHON_SOURCE_DIR
                              "/check_saved_models.py\" \"" +
                              folder.string() + "\" \"" + directory.file("") + "\"";
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
}

}  // namespace
}  // namespace mha
