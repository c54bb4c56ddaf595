// Guards `mha convert`, `mha compare` and `mha info --file`, run as a user would: what is
// written is the layer bit by bit, a comparison's exit code is its result, and each error is
// one line. That layouts and formats are read rightly is proven elsewhere.

#include <gtest/gtest.h>
#include <mha/weight_file.h>

#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli_program.h"
#include "file_support.h"
#include "support.h"
#include "torch_headers.h"
#include "weights/safetensors.h"

namespace mha::test {
namespace {

using nlohmann::json;
using Strings = std::vector<std::string>;

class CliConvertTest : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(1);
    module_ = MultiHeadAttention(MultiHeadAttentionOptions(12, 6).num_kv_heads(2).bias(false));
    module_->eval();
    torch::save(module_, model_);
  }

  ProgramResult run(const std::string& command, const Strings& more) const {
    Strings arguments = {command, "--weights", model_, "--heads", "6"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_mha(arguments);
  }

  // Runs `mha compare` on self-attention over x, with `change` added to one expected output.
  ProgramResult compare(double change, const Strings& more = {}) {
    const at::Tensor x = random_.normal({2, 5, 12});
    const AttentionOutput result = module_->forward(x);
    at::Tensor output = result.output.clone();
    output[1][3][7] += change;
    detail::write_safetensors(input_, {{{"x", x}}, {}});
    detail::write_safetensors(expected_,
                              {{{"output", output}, {"weights", result.weights}}, {}});
    Strings arguments = {"--input", input_, "--expected", expected_};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run("compare", arguments);
  }

  TemporaryDirectory directory_;
  const std::string model_ = directory_.file("model.pt");
  const std::string output_ = directory_.file("layer.safetensors");
  const std::string input_ = directory_.file("x.safetensors");
  const std::string expected_ = directory_.file("y.safetensors");
  torch::NoGradGuard no_grad_;
  MultiHeadAttention module_{nullptr};
  Random random_{7};
};

TEST_F(CliConvertTest, ALayerOfTorchSaveBecomesOneOfSafetensorsInAnotherLayout) {
  const ProgramResult result = run("convert", {"--output", output_, "--to-layout", "llama",
                                               "--to-prefix", "model.0", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  const MultiHeadAttention written =
      load(output_, std::nullopt, WeightFileOptions().prefix("model.0"));
  EXPECT_EQ(written->options.num_kv_heads(), 2);
  for (const auto& parameter : module_->named_parameters()) {
    EXPECT_TRUE(is_bit_equal(written->named_parameters()[parameter.key()], parameter.value()));
  }
  const json report = json::parse(result.output);
  EXPECT_EQ(report["layer"]["kv_heads"], 2);
  EXPECT_EQ(report["tensors"]["model.0.k_proj.weight"]["shape"], json({4, 12}));
}

TEST_F(CliConvertTest, TheDtypeIsConvertedWhenAsked) {
  ASSERT_EQ(run("convert", {"--output", output_, "--dtype", "bfloat16"}).exit_code, 0);
  EXPECT_TRUE(is_bit_equal(detail::read_safetensors(output_).tensors.at("W_q.weight"),
                           module_->W_q->weight.to(at::kBFloat16)));
}

TEST_F(CliConvertTest, AnErrorLeavesNoFile) {
  expect_error(run("convert", {"--output", output_, "--to-layout", "gpt2"}), "num_kv_heads");
  expect_error(run("convert", {"--output", output_, "--prefix", "nowhere"}), "nowhere");
  expect_error(run("convert", {"--output", output_, "--dtype", "int8"}), "expected one of");
  expect_error(run("convert", {"--output", model_}), "--output: expected another file");
  expect_error(run_mha({"convert", "--weights", model_, "--output", output_}), "num_heads");
  EXPECT_FALSE(std::filesystem::exists(output_));
}

TEST_F(CliConvertTest, EqualOutputsPass) {
  const ProgramResult result = compare(0);
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_NE(result.output.find("PASS: tolerance 1e-05"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("6 heads of size 2 sharing 2 of keys, float32"),
            std::string::npos)
      << result.output;
}

TEST_F(CliConvertTest, ADifferenceAboveTheToleranceFailsAndIsShownWithItsPlace) {
  const ProgramResult result = compare(0.25, {"--json"});
  EXPECT_EQ(result.exit_code, 1) << result.error;
  const json report = json::parse(result.output), output = report["compared"]["output"];
  EXPECT_NEAR(output["largest_difference"].get<double>(), 0.25, 1e-6);
  EXPECT_EQ(output["at"], json({1, 3, 7}));
  EXPECT_EQ(output["passed"], false);
  EXPECT_EQ(report["compared"]["weights"]["passed"], true);
  EXPECT_EQ(report["passed"], false);
  EXPECT_EQ(compare(0.25, {"--tolerance", "0.3"}).exit_code, 0);
  EXPECT_EQ(compare(0.25, {"--tolerance", "0.2"}).exit_code, 1);
}

TEST_F(CliConvertTest, ANumberThatIsNoneNeverPasses) {
  const ProgramResult result =
      compare(std::numeric_limits<double>::quiet_NaN(), {"--tolerance", "1000"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.output.find("largest difference inf at (1, 3, 7)"), std::string::npos)
      << result.output;
}

TEST_F(CliConvertTest, AComparisonThatCannotBeMadeIsAnError) {
  expect_error(compare(0, {"--causal", "--tolerance", "-1"}), "expected a number >= 0");
  expect_error(compare(0, {"--tolerance", "small"}), "expected a number >= 0");
  detail::write_safetensors(expected_, {{{"output", torch::zeros({2, 4, 12})}}, {}});
  expect_error(run("compare", {"--input", input_, "--expected", expected_}), "(2, 5, 12)");
  detail::write_safetensors(expected_,
                            {{{"a", torch::zeros({1})}, {"b", torch::zeros({1})}}, {}});
  expect_error(run("compare", {"--input", input_, "--expected", expected_}),
               "expected a tensor 'output'");
}

TEST_F(CliConvertTest, InfoListsTheLayersOfAFile) {
  const ProgramResult result = run_mha({"info", "--file", model_});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_NE(
      result.output.find("(no prefix): native layout, d_model 12, of keys 4, no biases, F32"),
      std::string::npos)
      << result.output;
  save(MultiHeadAttention(8, 2), output_,
       WeightFileOptions().prefix("a.b").layout(Layout::vit));
  const json info = json::parse(run_mha({"info", "--file", output_, "--json"}).output);
  EXPECT_EQ(info["format"], "safetensors");
  EXPECT_EQ(info["num_heads"], 2);
  EXPECT_EQ(info["layers"][0]["prefix"], "a.b");
  EXPECT_EQ(info["layers"][0]["layout"], "vit");
  expect_error(run_mha({"info", "--file", directory_.file("none")}), "cannot be opened");
}

}  // namespace
}  // namespace mha::test
