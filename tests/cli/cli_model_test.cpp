// Guards `--model FOLDER --layer N`: the layer, its options and its mask from a model's folder,
// run as a user would. What the library makes of config.json is proven elsewhere.

#include <files/safetensors.h>
#include <gtest/gtest.h>
#include <mha/model_config.h>
#include <mha/weight_file.h>
#include <sys/resource.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/cli_program.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

using nlohmann::json;

class CliModelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(1);
    const MultiHeadAttention module(
        MultiHeadAttentionOptions(16, 4).num_kv_heads(2).bias(false));
    std::filesystem::create_directory(folder_);
    save(module, folder_ + "/model.safetensors",
         WeightFileOptions().prefix("model.layers.0.self_attn").layout(Layout::llama));
    auto file = detail::read_safetensors(folder_ + "/model.safetensors");
    file.metadata.clear();
    detail::write_safetensors(folder_ + "/model.safetensors", file);
    write_bytes(folder_ + "/config.json",
                R"({"model_type": "mistral", "hidden_size": 16, "num_attention_heads": 4,
                    "num_key_value_heads": 2, "num_hidden_layers": 3, "sliding_window": 3})");
    detail::write_safetensors(input_, {{{"x", torch::randn({2, 6, 16})}}, {}});
  }

  at::Tensor expected() const {
    ModelLayer layer = load_layer(folder_, 0);
    const at::Tensor x = detail::read_safetensors(input_).tensors.at("x");
    return layer.attention->forward(x, {}, {}, layer.mask(6, 6)).output;
  }

  const TemporaryDirectory directory_;
  const std::string folder_ = directory_.file("model"), input_ = directory_.file("x"),
                    output_ = directory_.file("y");
  const std::vector<std::string> where_ = {"--model", folder_, "--layer", "0"};
};

std::vector<std::string> joined(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST_F(CliModelTest, RunAndCompareTakeTheLayersOptionsAndMask) {
  const ProgramResult run =
      run_mha(joined({"run", "--input", input_, "--output", output_, "--json"}, where_));
  ASSERT_EQ(run.exit_code, 0) << run.error;
  const auto written = detail::read_safetensors(output_).tensors;
  EXPECT_TRUE(is_bit_equal(written.at("output"), expected()));
  // Position 0 is outside of the window of position 3.
  EXPECT_EQ(written.at("weights")[0][0][3][0].item<float>(), 0);
  const json report = json::parse(run.output);
  EXPECT_EQ(report["mask"], "window(2, 0, bottom_right)");
  EXPECT_EQ(report["layer"]["model_type"], "mistral");
  EXPECT_EQ(report["layer"]["kind"], "sliding_attention");
  EXPECT_EQ(report["layer"]["prefix"], "model.layers.0.self_attn");
  EXPECT_EQ(
      run_mha(joined({"compare", "--input", input_, "--expected", output_}, where_)).exit_code,
      0);
  EXPECT_EQ(
      run_mha(joined({"map", "--input", input_, "--output", directory_.file("m.png")}, where_))
          .exit_code,
      0);
}

TEST_F(CliModelTest, ConvertKeepsTheOptions) {
  const ProgramResult result = run_mha(joined({"convert", "--output", output_}, where_));
  ASSERT_EQ(result.exit_code, 0) << result.error;
  const auto module = load(output_);
  EXPECT_EQ(module->num_kv_heads(), 2);
  EXPECT_TRUE(module->options.rotary().has_value());
}

TEST_F(CliModelTest, ALayoutOfOnesOwnIsAFile) {
  const std::string layout = directory_.file("mine.json");
  write_bytes(layout, R"({"name": "mine", "tensors": [
    {"name": "in", "holds": ["W_q", "W_k", "W_v"]}, {"name": "out", "holds": "W_o"}]})");
  const MultiHeadAttention module(16, 4);
  save(module, output_, WeightFileOptions().layout(Layout::from_file(layout)));
  const std::string converted = directory_.file("z");
  const ProgramResult result =
      run_mha({"convert", "--model", output_, "--layout-file", layout, "--output", converted});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_TRUE(
      is_bit_equal(load(converted)->W_k->weight.detach(), module->W_k->weight.detach()));
  EXPECT_NE(run_mha({"convert", "--model", output_, "--output", converted}).exit_code, 0);
}

TEST_F(CliModelTest, InfoShowsEachLayer) {
  const ProgramResult result = run_mha({"info", "--model", folder_});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_NE(result.output.find("layer 0: sliding_attention, llama layout, mask window(2, 0"),
            std::string::npos)
      << result.output;
  EXPECT_NE(result.output.find("layer 2: the same"), std::string::npos) << result.output;
  const json info = json::parse(run_mha({"info", "--model", folder_, "--json"}).output);
  EXPECT_EQ(info["layers"].size(), 3U);
}

// Of some models the first layers are no attention, and a file may claim any number of layers.
TEST_F(CliModelTest, InfoShowsTheLayersThatAreComputedAndWhyOthersAreNot) {
  const auto write = [&](const std::string& layers) {
    write_bytes(folder_ + "/config.json",
                R"({"model_type": "lfm2", "hidden_size": 16, "num_attention_heads": 4,
                    "norm_eps": 1e-5, "layer_types": ["conv", "full_attention", "conv"],
                    "num_hidden_layers": )" +
                    layers + "}");
  };
  write("3");
  const json info = json::parse(run_mha({"info", "--model", folder_, "--json"}).output);
  ASSERT_EQ(info["layers"].size(), 3U);
  EXPECT_TRUE(info["layers"][0].contains("problem"));
  EXPECT_EQ(info["layers"][1]["kind"], "full_attention");
  EXPECT_TRUE(info["layers"][2].contains("problem"));
  write("2147483648");
  const json refused = json::parse(run_mha({"info", "--model", folder_, "--json"}).output);
  ASSERT_EQ(refused["layers"].size(), 1U);
  EXPECT_EQ(refused["layers"][0]["problem"],
            "num_hidden_layers: expected at most 4096, found 2147483648");
}

// Read once for all layers: each of them would cost as much as all the rest of the first call.
TEST_F(CliModelTest, InfoReadsALargeConfigurationOnce) {
  const auto seconds_of = [&](const std::string& layers) {
    std::string text = R"({"model_type": "mistral", "hidden_size": 16, "num_attention_heads": 4,
                           "num_key_value_heads": 2, "num_hidden_layers": )" +
                       layers + R"(, "more": [0)";
    while (text.size() < (1 << 20) - 8) text += ",0";
    write_bytes(folder_ + "/config.json", text + "]}");
    const auto so_far = [] {
      rusage usage{};
      getrusage(RUSAGE_CHILDREN, &usage);
      return static_cast<double>(usage.ru_utime.tv_sec) +
             1e-6 * static_cast<double>(usage.ru_utime.tv_usec);
    };
    const double before = so_far();
    const ProgramResult result = run_mha({"info", "--model", folder_, "--json"});
    EXPECT_EQ(result.exit_code, 0) << result.error;
    EXPECT_EQ(std::to_string(json::parse(result.output)["layers"].size()), layers);
    return so_far() - before;
  };
  const double one = seconds_of("1");
  EXPECT_LT(seconds_of("1000"), 20 * one);
}

TEST_F(CliModelTest, WhatDoesNotFitIsNamed) {
  const auto error = [&](const std::vector<std::string>& arguments) {
    const ProgramResult result =
        run_mha(joined({"run", "--input", input_, "--output", output_}, arguments));
    EXPECT_NE(result.exit_code, 0);
    EXPECT_FALSE(std::filesystem::exists(output_));
    return result.error;
  };
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos ? ::testing::AssertionSuccess()
                                                : ::testing::AssertionFailure() << text;
  };
  EXPECT_TRUE(has(error({"--model", folder_}), "--layer: expected the number of a layer"));
  EXPECT_TRUE(
      has(error({"--model", folder_, "--layer", "3"}), "expected one from 0 to 2, found 3"));
  EXPECT_TRUE(has(error({"--model", folder_, "--layer", "1"}), "found none"));
  EXPECT_TRUE(
      has(error(joined(where_, {"--num-heads", "4"})), "--num-heads: expected it with a file"));
  EXPECT_TRUE(has(error(joined(where_, {"--part", "decoder"})), "part: expected none"));
  EXPECT_TRUE(has(error({"--model", folder_ + "/model.safetensors", "--layer", "0"}),
                  "--layer: expected it with a model's folder"));
}

}  // namespace
}  // namespace mha::test
