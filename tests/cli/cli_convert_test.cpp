// Guards `mha convert`, `mha compare` and `mha info --model`, run as a user would: what is
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

#include "cli/cli_program.h"
#include "files/safetensors.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"

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
    Strings arguments = {command, "--model", model_, "--num-heads", "6"};
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
  expect_error(run_mha({"convert", "--model", model_, "--output", output_}),
               "--num-heads: expected");
  EXPECT_FALSE(std::filesystem::exists(output_));
}

TEST_F(CliConvertTest, NoFileOfAnIndexIsWrittenOver) {
  const std::string index = directory_.file("index.json"),
                    first = directory_.file("1.safetensors"),
                    second = directory_.file("2.safetensors");
  save(module_, first, WeightFileOptions().prefix("a"));
  save(module_, second, WeightFileOptions().prefix("b"));
  std::string names;
  for (const auto& [prefix, file] : {std::pair("a", "1"), std::pair("b", "2")}) {
    for (const auto& parameter : module_->named_parameters()) {
      names += names.empty() ? "" : ", ";
      names += std::string("\"") + prefix + "." + parameter.key() + "\": \"" + file +
               ".safetensors\"";
    }
  }
  write_bytes(index, "{\"weight_map\": {" + names + "}}");
  const auto convert = [&](const std::string& output) {
    return run_mha(
        {"convert", "--model", index, "--prefix", "a", "--num-heads", "6", "--output", output});
  };
  // The second file holds nothing of this layer, and all of another.
  for (const std::string& read : {index, first, second}) {
    const std::string before = read_bytes(read);
    expect_error(convert(read), "--output: expected another file than " + read);
    EXPECT_EQ(read_bytes(read), before);
  }
  EXPECT_EQ(convert(output_).exit_code, 0);
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

TEST_F(CliConvertTest, RotaryPositionsThatNoFileTellsAreGiven) {
  const auto rotary = RotaryOptions().base(500000).scaling(Llama3Scaling(8, 16));
  module_ = MultiHeadAttention(MultiHeadAttentionOptions(32, 4).rotary(rotary).bias(false));
  module_->eval();
  const auto where = WeightFileOptions().prefix("self_attn").layout(Layout::llama);
  save(module_, model_, where);
  const detail::TensorFile ours = detail::read_safetensors(model_);
  detail::write_safetensors(model_, {ours.tensors, {}});  // as other programs write it
  const at::Tensor x = random_.normal({2, 40, 32});
  detail::write_safetensors(input_, {{{"x", x}}, {}});
  detail::write_safetensors(expected_, {{{"output", module_->forward(x).output}}, {}});
  const auto compared = [&](const Strings& more) {
    Strings arguments = {"compare", "--model", model_, "--prefix",   "self_attn", "--num-heads",
                         "4",       "--input", input_, "--expected", expected_};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_mha(arguments);
  };
  const std::string given =
      "base=500000,scaling=llama3,factor=8,original-max-position=16,low-freq-factor=1";

  const ProgramResult unrotated = compared({});
  EXPECT_EQ(unrotated.exit_code, 1);
  EXPECT_NE(unrotated.output.find("see --rotary"), std::string::npos) << unrotated.output;
  EXPECT_EQ(compared({"--rotary"}).exit_code, 1);  // the defaults are another model's
  EXPECT_EQ(compared({"--rotary", given + ",pairing=interleaved"}).exit_code, 1);
  const ProgramResult rotated = compared({"--json", "--rotary", given});
  EXPECT_EQ(rotated.exit_code, 0) << rotated.output << rotated.error;
  EXPECT_EQ(json::parse(rotated.output)["layer"]["layout"], "llama");
  EXPECT_EQ(json::parse(rotated.output)["layer"]["rotary"],
            "(base=500000, pairing=half_split, scaling=llama3(8, original_max_position=16, "
            "low_freq_factor=1, high_freq_factor=4))");

  // A file that was converted says it.
  const ProgramResult converted =
      run_mha({"convert", "--model", model_, "--prefix", "self_attn", "--num-heads", "4",
               "--rotary", given, "--output", output_});
  EXPECT_EQ(converted.exit_code, 0) << converted.error;
  const Strings by_the_file = {"compare", "--model",    output_,  "--input",
                               input_,    "--expected", expected_};
  EXPECT_EQ(run_mha(by_the_file).exit_code, 0);
  Strings against_it = by_the_file;
  against_it.insert(against_it.end(), {"--rotary", "pairing=interleaved"});
  expect_error(run_mha(against_it), "rotary: expected pairs interleaved");
}

TEST_F(CliConvertTest, EveryScalingIsTheLibrarys) {
  auto options = MultiHeadAttentionOptions(32, 4);
  const at::Tensor x = random_.normal({2, 40, 32});
  detail::write_safetensors(input_, {{{"x", x}}, {}});
  save(MultiHeadAttention(options), model_);
  struct Given {
    std::string text;
    RotaryScaling scaling;
  };
  for (const auto& [text, scaling] : std::vector<Given>{
           {"scaling=linear,factor=2.5", LinearScaling(2.5)},
           {"scaling=ntk,factor=4", NtkScaling(4)},
           {"scaling=yarn,factor=4,original-max-position=16", YarnScaling(4, 16)},
           {"scaling=yarn,factor=4,original-max-position=16,beta-fast=9,beta-slow=0.5,"
            "attention-factor=1.5,truncate=false",
            YarnScaling(4, 16).beta_fast(9).beta_slow(0.5).attention_factor(1.5).truncate(
                false)},
           {"scaling=llama3,factor=4,original-max-position=16,low-freq-factor=2,"
            "high-freq-factor=5",
            Llama3Scaling(4, 16).low_freq_factor(2).high_freq_factor(5)}}) {
    const auto rotary =
        RotaryOptions().pairing(RotaryPairing::interleaved).rotary_dim(6).scaling(scaling);
    module_ = MultiHeadAttention(MultiHeadAttentionOptions(options).rotary(rotary));
    module_->eval();
    load(module_, model_);
    detail::write_safetensors(expected_, {{{"output", module_->forward(x).output}}, {}});
    const ProgramResult result =
        run_mha({"compare", "--model", model_, "--input", input_, "--expected", expected_,
                 "--tolerance", "0", "--rotary", "pairing=interleaved,rotary-dim=6," + text});
    EXPECT_EQ(result.exit_code, 0) << text << result.output << result.error;
  }
}

TEST_F(CliConvertTest, ARotarySettingThatMeansNothingIsAnError) {
  const auto error = [&](const std::string& setting, const std::string& text) {
    expect_error(run("convert", {"--output", output_, "--rotary", setting}), text);
  };
  error("500000", "--rotary: expected NAME=VALUE, found '500000'");
  error("base=ten", "--rotary: base: expected a number, found 'ten'");
  error("base=2,base=3", "--rotary: expected each setting once, found 'base' twice");
  error("bas=2", "expected settings of base, pairing, rotary-dim, scaling, found 'bas'");
  error("pairing=odd", "--rotary: pairing: expected one of half-split, interleaved");
  error("rotary-dim=4.5", "--rotary: rotary-dim: expected an integer, found '4.5'");
  error("scaling=longrope", "--rotary: scaling: expected one of none, linear, ntk, yarn");
  error("scaling=yarn", "--rotary: factor: expected it beside this scaling, found none");
  error("scaling=yarn,factor=2", "--rotary: original-max-position: expected it beside");
  error("scaling=linear,factor=2,beta-fast=3", "found 'beta-fast'");
  error("base=0.5", "RotaryOptions: base: expected a finite number above 1, found 0.5");
  error("rotary-dim=100", "RotaryOptions: rotary_dim");
}

TEST_F(CliConvertTest, InfoListsTheLayersOfAFile) {
  const ProgramResult result = run_mha({"info", "--model", model_});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_NE(
      result.output.find("(no prefix): native layout, d_model 12, of keys 4, no biases, F32"),
      std::string::npos)
      << result.output;
  save(MultiHeadAttention(8, 2), output_,
       WeightFileOptions().prefix("a.b").layout(Layout::vit));
  const json info = json::parse(run_mha({"info", "--model", output_, "--json"}).output);
  EXPECT_EQ(info["format"], "safetensors");
  EXPECT_EQ(info["num_heads"], 2);
  EXPECT_EQ(info["layers"][0]["prefix"], "a.b");
  EXPECT_EQ(info["layers"][0]["layout"], "vit");
  expect_error(run_mha({"info", "--model", output_, "--explain"}),
               "--model excludes --explain");
  expect_error(run_mha({"info", "--model", directory_.file("none")}), "cannot be opened");
}

}  // namespace
}  // namespace mha::test
