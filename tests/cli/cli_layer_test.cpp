// Guards the arguments for what a weight file does not tell of its layer, `--scale`,
// `--softcap` and `--qk-norm-eps`, and for what is passed over when it is read, `--ignore` and
// `--missing-checksums`, run as a user would. Bit for bit what the library gives.

#include <files/safetensors.h>
#include <gtest/gtest.h>
#include <mha/weight_file.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/cli_program.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_file_support.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

class CliLayerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(1);
    module_ = MultiHeadAttention(MultiHeadAttentionOptions(12, 3).qk_norm(QKNorm::rms));
    module_->eval();
    save(module_, own_);
    auto file = detail::read_safetensors(own_);
    file.metadata.clear();  // as other programs write them
    detail::write_safetensors(path_, file);
    x_ = torch::randn({2, 5, 12});
    detail::write_safetensors(input_, {{{"x", x_}}, {}});
  }

  ProgramResult run(const std::string& model, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"run",  "--model",     model,   "--input",
                                          input_, "--output",    output_, "--return-weights",
                                          "none", "--num-heads", "3"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_mha(arguments);
  }
  at::Tensor computed() { return module_->forward(x_, {}, {}, Mask(), Weights::none).output; }
  at::Tensor written() const { return detail::read_safetensors(output_).tensors.at("output"); }

  TemporaryDirectory directory_;
  const std::string own_ = directory_.file("own"), path_ = directory_.file("model"),
                    input_ = directory_.file("x"), output_ = directory_.file("y");
  torch::NoGradGuard no_grad_;
  MultiHeadAttention module_{nullptr};
  at::Tensor x_;
};

TEST_F(CliLayerTest, NumbersThatNoConfigurationGivesAreArguments) {
  const at::Tensor without = computed();
  module_->options.scale(0.75).softcap(2.5).qk_norm_eps(0.125);
  const at::Tensor expected = computed();
  const std::vector<std::string> numbers = {"--scale", "0.75",          "--softcap",
                                            "2.5",     "--qk-norm-eps", "0.125"};
  const ProgramResult result = run(path_, numbers);
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_TRUE(is_bit_equal(written(), expected));
  EXPECT_FALSE(torch::allclose(expected, without));
  for (const char* line : {"scale    0.75\n", "softcap  2.5\n", "norm eps 0.125\n"}) {
    EXPECT_NE(result.output.find(line), std::string::npos) << result.output;
  }
  const ProgramResult map =
      run_mha({"map", "--model", path_, "--num-heads", "3", "--input", input_, "--scale",
               "0.75", "--colour-scale", "square-root", "--output", directory_.file("m.png")});
  EXPECT_EQ(map.exit_code, 0) << map.error;
  // A conversion keeps them, and then the file tells them.
  std::vector<std::string> convert = {
      "convert", "--model", path_, "--num-heads", "3", "--output", directory_.file("z")};
  convert.insert(convert.end(), numbers.begin(), numbers.end());
  ASSERT_EQ(run_mha(convert).exit_code, 0);
  const auto options = options_from_file(directory_.file("z"));
  EXPECT_EQ(options.scale(), 0.75);
  EXPECT_EQ(options.softcap(), 2.5);
  EXPECT_EQ(options.qk_norm_eps(), 0.125);
  const std::string told = directory_.file("z");
  EXPECT_EQ(run(told, numbers).exit_code, 0);
  expect_error(run(told, {"--scale", "0.5"}),
               "--scale: expected 0.75, as " + told + " says, found 0.5");
  expect_error(run(told, {"--softcap", "3"}), "--softcap: expected 2.5, as " + told);
  expect_error(run(told, {"--qk-norm-eps", "1e-5"}), "--qk-norm-eps: expected 0.125, as ");
}

TEST_F(CliLayerTest, NumbersThatMakeNoSenseAreRefused) {
  for (const char* option : {"--scale", "--softcap", "--qk-norm-eps"}) {
    for (const char* number : {"0", "-1", "nan", "x"}) {
      expect_error(run(path_, {option, number}),
                   std::string(option) + ": expected a number > 0, found '" + number + "'");
    }
  }
  const std::string plain = directory_.file("plain");
  save(MultiHeadAttention(12, 3), plain);
  expect_error(run(plain, {"--qk-norm-eps", "1e-5"}),
               "--qk-norm-eps: expected a layer with gains of queries and keys, found one "
               "without in " +
                   plain);
  const std::string folder = directory_.file("folder");
  std::filesystem::create_directory(folder);
  save(module_, folder + "/model.safetensors");
  expect_error(run_mha({"run", "--model", folder, "--layer", "0", "--input", input_, "--output",
                        output_, "--scale", "1"}),
               "--scale: expected it with a file, found the folder");
}

TEST_F(CliLayerTest, NamesToIgnoreArePassedOver) {
  auto file = detail::read_safetensors(path_);
  file.tensors["rope.cos"] = file.tensors["rope.sin"] = torch::ones({3});
  detail::write_safetensors(path_, file);
  expect_error(run(path_), "unexpected: 'rope.cos'");
  expect_error(run(path_, {"--ignore", "rope.cos"}), "unexpected: 'rope.sin'");
  for (const std::vector<std::string>& ignored :
       {std::vector<std::string>{"--ignore", "rope.*"},
        std::vector<std::string>{"--ignore", "rope.cos", "--ignore", "rope.sin"}}) {
    ASSERT_EQ(run(path_, ignored).exit_code, 0);
    EXPECT_TRUE(is_bit_equal(written(), computed()));
  }
  expect_error(run(path_, {"--ignore", ""}), "--ignore: expected a value");
  const auto info = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"info", "--model", path_};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_mha(arguments).output;
  };
  EXPECT_NE(info({}).find("unexpected: 'rope.cos'"), std::string::npos);
  EXPECT_EQ(info({"--ignore", "rope.*"}).find("unexpected"), std::string::npos);
  EXPECT_NE(info({"--ignore", "rope.*"}).find("native layout, d_model 12"), std::string::npos);
}

TEST_F(CliLayerTest, AFileWithoutChecksumsIsTakenWhereThatIsAllowed) {
  // The only tensor of the file as the input of a call, and as the layer none.
  ZipItem pickle{"a/data.pkl", good_pickle()}, data{"a/data/0", std::string(24, '\1')};
  pickle.crc = data.crc = 0;
  const std::string archive = directory_.file("a.pt");
  write_bytes(archive, zip_bytes({pickle, data}));
  expect_error(run(archive), "was saved without checksums");
  expect_error(run(archive, {"--missing-checksums"}),
               "expected an attention layer at prefix '', found the names 'x'");
}

}  // namespace
}  // namespace mha::test
