// Guards `mha map`: which stored weights it takes, or computes, and that each option reaches
// the picture. What is written must be byte for byte what the library draws; that its pictures
// are right is proven in draw_format_test.cpp.
#include <files/safetensors.h>
#include <gtest/gtest.h>
#include <mha/draw.h>
#include <mha/multi_head_attention.h>
#include <mha/weight_file.h>

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

class CliMapTest : public ::testing::Test {
 protected:
  void SetUp() override { maps_ = random_.normal({2, 3, 4, 4}).softmax(-1); }

  void store(const std::string& name, const at::Tensor& weights) {
    detail::write_safetensors(weights_, {{{name, weights}}, {}});
  }
  ProgramResult map(std::vector<std::string> more, const std::string& output = "m.svg") const {
    std::vector<std::string> arguments = {"map", "--output", directory_.file(output)};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_mha(arguments);
  }
  ProgramResult map_stored(std::vector<std::string> more) const {
    more.insert(more.begin(), {"--maps", weights_});
    return map(more);
  }

  // Checks that the run succeeded and wrote what the library draws.
  void expect_drawn(const ProgramResult& result, const draw::Maps& maps,
                    const draw::Options& options = {}) const {
    ASSERT_EQ(result.exit_code, 0) << result.error;
    EXPECT_EQ(read_bytes(directory_.file("m.svg")), draw::svg(maps, options));
  }
  // What is drawn without options: all heads of the first sample.
  draw::Maps first_sample() const {
    draw::Maps maps;
    maps.weights = maps_[0];
    maps.title = "w.safetensors, sample 0";
    return maps;
  }
  void expect_error_and_no_picture(const ProgramResult& result, const std::string& text) const {
    expect_error(result, text);
    EXPECT_FALSE(std::filesystem::exists(directory_.file("m.svg")));
  }

  TemporaryDirectory directory_;
  const std::string weights_ = directory_.file("w.safetensors");
  Random random_{11};
  at::Tensor maps_;
};

// --- what is drawn ---

TEST_F(CliMapTest, TheTensorIsTheOneNamedWeightsOrTheOnlyOneOfFourDimensions) {
  detail::write_safetensors(weights_, {{{"weights", maps_}, {"others", maps_ * 2}}, {}});
  expect_drawn(map_stored({}), first_sample());
  detail::write_safetensors(weights_, {{{"attn", maps_}, {"x", random_.normal({2, 4})}}, {}});
  expect_drawn(map_stored({}), first_sample());
  detail::write_safetensors(weights_, {{{"a", maps_ * 2}, {"b", maps_}}, {}});
  expect_drawn(map_stored({"--tensor", "b"}), first_sample());
  std::filesystem::remove(directory_.file("m.svg"));
  expect_error_and_no_picture(
      map_stored({}),
      "or a single one of shape (N, H, L, S), which --tensor can name, found 'a', 'b'");
  expect_error_and_no_picture(map_stored({"--tensor", "c"}), "--tensor: expected the name");
}

TEST_F(CliMapTest, ThreeDimensionsAreHeadsOrWithASampleSamples) {
  draw::Maps maps = first_sample();
  store("weights", maps_[0]);
  maps.title = "w.safetensors";
  expect_drawn(map_stored({}), maps);
  maps.weights = maps_[0][1];
  maps.title = "w.safetensors, sample 1";
  expect_drawn(map_stored({"--sample", "1"}), maps);
  store("weights", maps_[0][1]);
  maps.title = "w.safetensors";
  expect_drawn(map_stored({}), maps);
}

TEST_F(CliMapTest, SampleHeadsAndMeanAreChosen) {
  store("weights", maps_);
  draw::Maps maps = first_sample();
  maps.weights = maps_[1];
  maps.title = "w.safetensors, sample 1";
  expect_drawn(map_stored({"--sample", "1"}), maps);
  maps.weights = maps_[1].index_select(0, at::tensor({2, 0}));
  maps.names = {"head 2", "head 0"};
  expect_drawn(map_stored({"--sample", "1", "--head", "2", "--head", "0"}), maps);
  maps.weights = maps_[1].mean(0);
  maps.names = {"mean of 3 heads"};
  expect_drawn(map_stored({"--sample", "1", "--mean"}), maps);
}

TEST_F(CliMapTest, AModelComputesWhatIsDrawn) {
  torch::manual_seed(2);
  const torch::NoGradGuard no_grad;
  MultiHeadAttention module(MultiHeadAttentionOptions(12, 3).dropout(0.5));
  module->eval();
  const std::string model = directory_.file("model.safetensors");
  save(module, model, WeightFileOptions().prefix("layer.1").layout(Layout::torch));
  const at::Tensor x = random_.normal({2, 5, 12}), lengths = at::tensor({5, 3});
  const std::string input = directory_.file("x.safetensors");
  detail::write_safetensors(input, {{{"x", x}, {"lengths", lengths}}, {}});
  const auto computed = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"--model", model, "--prefix", "layer.1", "--input", input,
                               "--lengths", "lengths", "--causal", "--sample"});
    return map(more);
  };
  const auto mask = Mask::lengths(lengths) & Mask::causal();
  const at::Tensor weights = module->forward(x, {}, {}, mask).weights[1];
  draw::Maps maps;
  maps.title = "layer.1, sample 1";
  maps.map = module->trace(x, {}, {}, mask).map;
  maps.sample = 1;
  expect_drawn(computed({"1"}), maps);
  maps.map.reset();
  maps.weights = weights;
  expect_drawn(computed({"1"}), maps);
  maps.weights = weights.index_select(0, at::tensor({2, 0}));
  maps.names = {"head 2", "head 0"};
  expect_drawn(computed({"1", "--head", "2", "--head", "0"}), maps);
  maps.weights = weights.slice(0, 1, 2);
  maps.names = {"head 1"};
  expect_drawn(computed({"1", "--head", "1"}), maps);
  maps.weights = weights.mean(0);
  maps.names = {"mean of 3 heads"};
  expect_drawn(computed({"1", "--mean"}), maps);
  std::filesystem::remove(directory_.file("m.svg"));
  expect_error_and_no_picture(computed({"1", "--head", "3"}), "--head: expected below 3");
  expect_error_and_no_picture(computed({"2"}), "--sample: expected below 2");
}

TEST_F(CliMapTest, TokensAreWordsOrAFileOfLinesOrOfJson) {
  store("weights", maps_);
  draw::Maps maps = first_sample();
  maps.queries = maps.keys = {"[CLS]", "a", "<cat>", "[SEP]"};
  expect_drawn(map_stored({"--tokens", "[CLS] a <cat> [SEP]"}), maps);
  const std::string lines = directory_.file("tokens"), list = directory_.file("tokens.json");
  write_bytes(lines, "[CLS]\na\r\n<cat>\n[SEP]\n");
  expect_drawn(map_stored({"--tokens", lines}), maps);
  write_bytes(list, R"(["[CLS]", "a", "<cat>", "[SEP]"])");
  expect_drawn(map_stored({"--tokens", list}), maps);
  maps.keys = {"1", "2", "3", "4"};
  expect_drawn(map_stored({"--tokens", lines, "--key-tokens", "1 2 3 4"}), maps);
}

TEST_F(CliMapTest, OptionsOfThePictureReachIt) {
  store("weights", maps_);
  draw::Maps maps = first_sample();
  maps.title = "A \"title\"";
  expect_drawn(map_stored({"--title", "A \"title\"", "--causal", "--colours", "ink",
                           "--colour-scale", "linear", "--largest", "0.5"}),
               maps,
               draw::Options()
                   .causal(true)
                   .colours(draw::ColourMap::ink)
                   .scale(draw::Scale::linear)
                   .largest(0.5));
}

// --- where it goes ---

TEST_F(CliMapTest, TheEndingDecidesTheFormatAndWithoutAFileItIsTheTerminals) {
  store("weights", maps_);
  for (const auto& [name, begin] : std::vector<std::pair<std::string, std::string>>{
           {"m.png", "\x89PNG"}, {"m.svg", "<svg"}, {"m.html", "<!DOCTYPE html>"}}) {
    const ProgramResult result = map({"--maps", weights_}, name);
    EXPECT_EQ(result.exit_code, 0) << result.error;
    EXPECT_EQ(result.output, directory_.file(name) + ": 3 maps of 4 queries x 4 keys\n");
    EXPECT_EQ(read_bytes(directory_.file(name)).rfind(begin, 0), 0u);
  }
  EXPECT_EQ(run_mha({"map", "--maps", weights_}).output,
            draw::text(first_sample(), draw::Terminal{}));
  const auto report = nlohmann::json::parse(map_stored({"--json"}).output);
  EXPECT_EQ(report["maps"], 3);
  EXPECT_EQ(report["output_file"], directory_.file("m.svg"));
}

// --- errors ---

TEST_F(CliMapTest, AWrongCallIsAnErrorThatNamesTheOption) {
  store("weights", maps_);
  const auto expect = [&](const std::vector<std::string>& arguments, const std::string& text) {
    expect_error_and_no_picture(map_stored(arguments), text);
  };
  expect({"--sample", "2"}, "--sample: expected below 2, the number of samples, found 2");
  expect({"--head", "3"}, "--head: expected below 3, the number of heads, found 3");
  expect({"--tokens", "a b c"}, "--tokens: expected 4 tokens, one for each query, found 3");
  expect({"--tokens", directory_.file("none.txt")},
         directory_.file("none.txt") + ": cannot be opened");
  expect({"--colours", "rainbow"}, "one of dusk, ink, grey, found 'rainbow'");
  expect({"--keep", "mask"}, "expected no mask but --causal for stored maps");
  expect({"--model", weights_}, "expected --maps (stored maps) or --model");
  write_bytes(directory_.file("t.json"), R"(["a", 2])");
  expect({"--tokens", directory_.file("t.json")}, "found number at index 1");
  expect_error_and_no_picture(map({}),
                              "expected --maps (stored maps) or --model (a layer to "
                              "compute them), found neither");
  expect_error_and_no_picture(map({"--model", weights_}), "--input is required with --model");
  expect_error(map({"--maps", weights_}, "m.gif"),
               "--output: expected a name that ends in .png, .svg or .html, found");
  expect_error(run_mha({"map", "--maps", weights_, "--json"}),
               "--json: expected with --output");
}

TEST_F(CliMapTest, WeightsThatAreNoneAreAnError) {
  store("weights", random_.normal({4}));
  expect_error_and_no_picture(map_stored({}), "found (4)");
  store("weights", random_.normal({1, 2, 3, 3}));
  expect_error_and_no_picture(map_stored({}), "expected finite numbers >= 0, found -");
  store("weights", at::ones({1, 2, 3, 3}, at::kInt));
  expect_error_and_no_picture(map_stored({"--mean"}),
                              "--mean: expected floating weights of one head or more");
}

TEST_F(CliMapTest, StoredMapsAreCausalFromTheLastKeyAlone) {
  store("weights", at::ones({1, 2, 3, 5}) / 5);
  expect_error_and_no_picture(map_stored({"--causal", "top-left"}),
                              "--causal: expected bottom-right for stored maps");
  EXPECT_EQ(map_stored({"--causal"}).exit_code, 0);
}

TEST_F(CliMapTest, TokensThatAreReadAreNotWrittenOver) {
  store("weights", maps_);
  const std::string tokens = directory_.file("m.svg");
  write_bytes(tokens, "a\nb\nc\nd\n");
  for (const char* option : {"--tokens", "--key-tokens"}) {
    expect_error(map_stored({option, tokens}),
                 "--output: expected another file than " + tokens);
  }
  EXPECT_EQ(read_bytes(tokens), "a\nb\nc\nd\n");
}

TEST_F(CliMapTest, AFileThatIsReadIsNotWrittenOver) {
  const std::string disguised = directory_.file("m.svg");
  detail::write_safetensors(disguised, {{{"weights", maps_}}, {}});
  const std::string before = read_bytes(disguised);
  expect_error(map({"--maps", disguised}), "--output: expected another file than");
  EXPECT_EQ(read_bytes(disguised), before);
}

}  // namespace
}  // namespace mha::test
