// Guards `mha run`: a layer from a file over input from a file, run as a user would. What it
// writes must be bit for bit what the library gives for the same module, input and mask; that
// the library is right is proven elsewhere, so a difference here is one in the plumbing.

#include <files/safetensors.h>
#include <gtest/gtest.h>
#include <mha/multi_head_attention.h>
#include <mha/weight_file.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/cli_program.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

using nlohmann::json;
using Tensors = std::map<std::string, at::Tensor>;

class CliRunTest : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(1);
    // With a dropout, which the file remembers and a run must not apply.
    module_ = MultiHeadAttention(MultiHeadAttentionOptions(12, 3).dropout(0.5));
    module_->eval();
    save(module_, weights_);
  }

  void write_input(const Tensors& tensors) { detail::write_safetensors(input_, {tensors, {}}); }

  // `mha run` on the files of this test, with more arguments.
  ProgramResult run(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"run",  "--model",  weights_, "--input",
                                          input_, "--output", output_};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_mha(arguments);
  }

  // Checks that the run wrote what `expected` says, and nothing else.
  void expect_written(const ProgramResult& result, const AttentionOutput& expected) const {
    ASSERT_EQ(result.exit_code, 0) << result.error;
    EXPECT_EQ(result.error, "");
    const Tensors written = detail::read_safetensors(output_).tensors;
    ASSERT_EQ(written.count("output"), 1u);
    EXPECT_TRUE(is_bit_equal(written.at("output"), expected.output));
    ASSERT_EQ(written.size(), expected.weights.defined() ? 2u : 1u);
    if (expected.weights.defined()) {
      EXPECT_TRUE(is_bit_equal(written.at("weights"), expected.weights));
    }
  }

  // An error, and no trace of an output file, nor of a half-written one.
  void expect_error_and_no_file(const ProgramResult& result, const std::string& text) const {
    expect_error(result, text);
    EXPECT_FALSE(std::filesystem::exists(output_));
    EXPECT_LE(directory_.count(), 2);  // weights and input
  }

  TemporaryDirectory directory_;
  const std::string weights_ = directory_.file("model.safetensors");
  const std::string input_ = directory_.file("x.safetensors");
  const std::string output_ = directory_.file("y.safetensors");
  torch::NoGradGuard no_grad_;
  MultiHeadAttention module_{nullptr};
  Random random_{7};
};

// --- the layer ---

TEST_F(CliRunTest, WritesOutputAndWeightsPerHead) {
  const at::Tensor x = random_.normal({2, 5, 12});
  write_input({{"x", x}});
  expect_written(run(), module_->forward(x));
}

TEST_F(CliRunTest, TheLayerIsTheOneAtThePrefix) {
  const at::Tensor x = random_.normal({2, 5, 12});
  write_input({{"x", x}});
  save(module_, weights_,
       WeightFileOptions().prefix("encoder.layer.3.attention").layout(Layout::bert));
  expect_written(run({"--prefix", "encoder.layer.3.attention"}), module_->forward(x));
  std::filesystem::remove(output_);
  expect_error_and_no_file(run({"--prefix", "encoder.layer.4.attention"}),
                           "encoder.layer.4.attention");
}

TEST_F(CliRunTest, TheLayoutCanBeNamed) {
  const at::Tensor x = random_.normal({2, 5, 12});
  write_input({{"x", x}});
  save(module_, weights_, WeightFileOptions().layout(Layout::torch));
  expect_written(run({"--layout", "torch"}), module_->forward(x));
  std::filesystem::remove(output_);
  expect_error_and_no_file(run({"--layout", "bert"}), "bert");
}

TEST_F(CliRunTest, TheNumberOfHeadsIsAskedForWhereTheFileDoesNotSayIt) {
  const at::Tensor x = random_.normal({2, 5, 12});
  write_input({{"x", x}});
  detail::TensorFile file = detail::read_safetensors(weights_);
  file.metadata.clear();  // as other programs write it
  detail::write_safetensors(weights_, file);
  expect_error_and_no_file(run(), "--num-heads: expected a number, which " + weights_);
  expect_error_and_no_file(run({"--num-heads", "5"}), "5");
  expect_written(run({"--num-heads", "3"}), module_->forward(x));
}

TEST_F(CliRunTest, ALayerInFloat64TakesInputInFloat64) {
  module_->to(at::kDouble);
  save(module_, weights_);
  const at::Tensor x = random_.normal({2, 5, 12}, at::kDouble);
  write_input({{"x", x}});
  expect_written(run(), module_->forward(x));
}

// --- the input ---

TEST_F(CliRunTest, QueryKeyAndValueAreTakenByTheirNames) {
  module_ = MultiHeadAttention(MultiHeadAttentionOptions(12, 3).kdim(7).vdim(9));
  module_->eval();
  save(module_, weights_);
  const at::Tensor query = random_.normal({2, 5, 12}), key = random_.normal({2, 4, 7}),
                   value = random_.normal({2, 4, 9});
  write_input({{"query", query}, {"key", key}, {"value", value}});
  expect_written(run(), module_->forward(query, key, value));
}

TEST_F(CliRunTest, AQueryAloneOrTheOnlyTensorIsSelfAttention) {
  const at::Tensor x = random_.normal({5, 12});  // unbatched
  for (const char* name : {"query", "hidden_states"}) {
    write_input({{name, x}});
    expect_written(run(), module_->forward(x));
  }
}

TEST_F(CliRunTest, TensorsOfMaskOptionsAreNoInput) {
  const at::Tensor x = random_.normal({2, 5, 12});
  const at::Tensor real = at::tensor({3, 5});
  write_input({{"hidden_states", x}, {"real", real}});
  expect_written(run({"--lengths", "real"}), module_->forward(x, x, x, Mask::lengths(real)));
}

TEST_F(CliRunTest, AnUnclearInputIsAnError) {
  const at::Tensor x = random_.normal({2, 5, 12});
  write_input({{"a", x}, {"b", x}});
  expect_error_and_no_file(run(), "expected a tensor 'query' or 'x'");
  write_input({{"query", x}, {"x", x}});
  expect_error_and_no_file(run(), "expected 'query' or 'x', found both");
  write_input({{"query", x}, {"key", x}});
  expect_error_and_no_file(run(),
                           "expected both 'key' and 'value' or neither, found only 'key'");
  write_input({});
  expect_error_and_no_file(run(), "found none");
}

TEST_F(CliRunTest, AnInputOfAnotherDtypeThanTheWeightsIsAnError) {
  write_input({{"x", random_.normal({2, 5, 12}, at::kDouble)}});
  expect_error_and_no_file(run(), "x: expected float32 like the weights, found float64");
}

TEST_F(CliRunTest, AnInputOfAnotherWidthIsAnError) {
  write_input({{"x", random_.normal({2, 5, 11})}});
  expect_error_and_no_file(run(), "11");
}

// --- masks ---

TEST_F(CliRunTest, EveryMaskOptionIsTheConstructorOfItsName) {
  const int64_t N = 2, H = 3, L = 4, S = 6;
  const at::Tensor query = random_.normal({N, L, 12}), keys = random_.normal({N, S, 12});
  const at::Tensor keep = random_.coins({L, S}, 0.7).to(at::kLong);
  const at::Tensor block = random_.coins({N, H, L, S}, 0.3);
  const at::Tensor bias = random_.normal({N, L, S});
  const at::Tensor real = random_.coins({N, S}, 0.7).to(at::kLong);
  const at::Tensor padding = random_.coins({N, S}, 0.3);
  const at::Tensor lengths = at::tensor({6, 2});
  write_input({{"query", query},
               {"key", keys},
               {"value", keys},
               {"keep", keep},
               {"block", block},
               {"bias", bias},
               {"real", real},
               {"padding", padding},
               {"lengths", lengths}});

  const auto top_left = Mask::Alignment::top_left;
  const std::vector<std::pair<std::vector<std::string>, Mask>> cases = {
      {{"--keep", "keep"}, Mask::keep(keep)},
      {{"--block", "block"}, Mask::block(block)},
      {{"--add", "bias"}, Mask::add(bias)},
      {{"--keep-keys", "real"}, Mask::keep_keys(real)},
      {{"--block-keys", "padding"}, Mask::block_keys(padding)},
      {{"--lengths", "lengths"}, Mask::lengths(lengths)},
      {{"--causal"}, Mask::causal()},
      {{"--causal", "bottom-right"}, Mask::causal()},
      {{"--causal", "top-left"}, Mask::causal(top_left)},
      {{"--window", "1,0"}, Mask::window(1, 0)},
      {{"--window", "-1,1"}, Mask::window(-1, 1)},
      {{"--window=2,-1,top-left"}, Mask::window(2, -1, top_left)},
      {{"--add", "bias", "--add", "bias"}, Mask::add(bias) & Mask::add(bias)},
      {{"--causal", "--keep", "keep", "--lengths", "lengths"},
       Mask::keep(keep) & Mask::lengths(lengths) & Mask::causal()},
  };
  const at::Tensor open = module_->forward(query, keys, keys).weights;
  for (const auto& [arguments, mask] : cases) {
    SCOPED_TRACE(::testing::PrintToString(arguments));
    const AttentionOutput expected = module_->forward(query, keys, keys, mask);
    ASSERT_FALSE(at::equal(expected.weights, open));  // the mask does something
    expect_written(run(arguments), expected);
  }
}

TEST_F(CliRunTest, AWrongMaskIsAnError) {
  write_input({{"x", random_.normal({2, 5, 12})}, {"mask", at::ones({2, 5}, at::kLong)}});
  expect_error_and_no_file(run({"--keep", "maks"}),
                           "--keep: expected the name of a tensor in " + input_ +
                               ", found 'maks'; it holds 'mask', 'x'");
  expect_error_and_no_file(run({"--keep", "mask"}), "[2, 5]");      // (L, S) is (5, 5)
  expect_error_and_no_file(run({"--block-keys", "mask"}), "bool");  // 1 would mean padding
  for (const char* window : {"3", "1,2,3", "1,x", "", "1,2,top-left,4", "1.5,2"}) {
    expect_error_and_no_file(run({std::string("--window=") + window}), "--window");
  }
  expect_error_and_no_file(run({"--window", "-2,0"}), "-2");
  expect_error_and_no_file(run({"--causal", "left"}), "bottom-right, top-left, found 'left'");
}

// --- the output ---

TEST_F(CliRunTest, WhichWeightsAreWrittenIsAnOption) {
  const at::Tensor x = random_.normal({2, 5, 12});
  write_input({{"x", x}});
  expect_written(run({"--return-weights", "none"}),
                 module_->forward(x, x, x, {}, Weights::none));
  expect_written(run({"--return-weights", "averaged"}),
                 module_->forward(x, x, x, {}, Weights::averaged));
  expect_written(run({"--return-weights", "per-head"}),
                 module_->forward(x, x, x, {}, Weights::per_head));
}

TEST_F(CliRunTest, JsonAndTextNameWhatWasReadAndWritten) {
  const at::Tensor x = random_.normal({2, 5, 12});
  write_input({{"x", x}, {"attention_mask", at::ones({2, 5})}});
  const json report = json::parse(run({"--json", "--causal"}).output);
  EXPECT_EQ(report["layer"]["file"], weights_);
  EXPECT_EQ(report["layer"]["heads"], 3);
  EXPECT_EQ(report["layer"]["head_dim"], 4);
  EXPECT_EQ(report["inputs"]["x"]["shape"], json({2, 5, 12}));
  EXPECT_EQ(report["inputs"]["x"]["dtype"], "float32");
  EXPECT_EQ(report["mask"], "causal(bottom_right)");
  EXPECT_EQ(report["outputs"]["output"]["shape"], json({2, 5, 12}));
  EXPECT_EQ(report["outputs"]["weights"]["shape"], json({2, 3, 5, 5}));
  EXPECT_EQ(report["unused_tensors"], json::array({"attention_mask"}));

  const std::string text = run().output;
  for (const char* part : {"(2, 5, 12) float32", "(2, 3, 5, 5) float32", "3 heads of size 4",
                           "Not used: attention_mask in "}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

TEST_F(CliRunTest, AFileThatIsReadIsNotWrittenOver) {
  write_input({{"x", random_.normal({2, 5, 12})}});
  for (const std::string& read : {weights_, input_}) {
    const std::string before = read_bytes(read);
    expect_error(run_mha({"run", "--model", weights_, "--input", input_, "--output", read}),
                 "--output: expected another file than " + read);
    EXPECT_EQ(read_bytes(read), before);
  }
}

TEST_F(CliRunTest, AFileThatCannotBeReadOrWrittenIsAnError) {
  const std::string missing = directory_.file("missing.safetensors");
  write_input({{"x", random_.normal({2, 5, 12})}});
  expect_error_and_no_file(
      run_mha({"run", "--model", missing, "--input", input_, "--output", output_}), missing);
  expect_error_and_no_file(
      run_mha({"run", "--model", weights_, "--input", missing, "--output", output_}), missing);
  const std::string nowhere = directory_.file("no-folder/y.safetensors");
  expect_error_and_no_file(
      run_mha({"run", "--model", weights_, "--input", input_, "--output", nowhere}), nowhere);

  const std::string bytes = read_bytes(input_);
  write_bytes(input_, bytes.substr(0, bytes.size() - 1));  // cut off
  expect_error_and_no_file(run(), input_);
}

}  // namespace
}  // namespace mha::test
