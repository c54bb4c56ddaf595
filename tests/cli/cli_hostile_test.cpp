// Guards the command line against what it may be given: files that never end or that hold
// anything, names that would act on a terminal, sizes that no memory has, and closed streams.
// Each is an error in one line, or is shown as text; none waits, none takes memory first.
#include <files/safetensors.h>
#include <gtest/gtest.h>
#include <mha/multi_head_attention.h>
#include <mha/weight_file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
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

// Clears the screen, breaks the line, and does both again in other bytes.
const std::string kActing =
    "a\x1b[2J\nb\r\x7f\xc2\x9b"
    "2Jc";
const std::string kShown = "a\\x1b[2J\\nb\\r\\x7f\\x9b2Jc";

class CliHostileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(1);
    save(module_, model_, WeightFileOptions().prefix(kActing));
    detail::write_safetensors(input_, {{{kActing, at::ones({1, 3, 4})}}, {}});
  }

  // The run's output is lines of printable characters, one of which holds the name as text.
  static void expect_shown(const ProgramResult& result) {
    const std::string& text = result.exit_code == 2 ? result.error : result.output;
    EXPECT_TRUE(std::all_of(text.begin(), text.end(), [](unsigned char c) {
      return c == '\n' || (c >= ' ' && c < 0x7f);
    })) << text;
    EXPECT_NE(text.find(kShown), std::string::npos) << text;
  }

  const TemporaryDirectory directory_;
  const std::string model_ = directory_.file("model.safetensors");
  const std::string input_ = directory_.file("x.safetensors");
  const std::string output_ = directory_.file("y.safetensors");
  MultiHeadAttention module_{MultiHeadAttentionOptions(4, 2)};
};

// --- names ---

TEST_F(CliHostileTest, NamesInFilesAndArgumentsSendNothingToATerminal) {
  const std::vector<std::string> layer = {"--model", model_,    "--prefix",
                                          kActing,   "--input", input_};
  const auto with = [&](std::vector<std::string> arguments, const std::string& command) {
    arguments.insert(arguments.begin(), command);
    return arguments;
  };
  auto run = with(layer, "run"), compare = with(layer, "compare");
  run.insert(run.end(), {"--output", output_});
  ASSERT_EQ(run_mha(run).exit_code, 0);
  expect_shown(run_mha(run));
  compare.insert(compare.end(), {"--expected", output_});
  expect_shown(run_mha(compare));
  expect_shown(run_mha({"convert", "--model", model_, "--prefix", kActing, "--output",
                        directory_.file("c.safetensors"), "--to-prefix", kActing}));
  expect_shown(run_mha({"info", "--model", model_}));
  expect_shown(run_mha({"map", "--maps", output_, "--title", kActing}));
}

TEST_F(CliHostileTest, NamesOfFilesSendNothingToATerminal) {
  const std::string model = directory_.file(kActing), picture = model + ".svg";
  std::filesystem::copy(model_, model);
  expect_shown(run_mha({"info", "--model", model}));
  detail::write_safetensors(output_, {{{"weights", at::ones({1, 1, 2, 2})}}, {}});
  expect_shown(run_mha({"map", "--maps", output_, "--output", picture}));
}

TEST_F(CliHostileTest, ErrorsSendNothingToATerminal) {
  // The parser's, the program's and the library's.
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"a\x1b[2J"},
        {"demo", "--num-heads", "a\x1b[2J"},
        {"map", "--maps", input_, "--tensor", "a\x1b[2J"},
        {"map", "--maps", input_, "--output", "a\x1b[2J"},
        {"info", "--model", "a\x1b[2J"},
        {"run", "--model", "a\x1b[2J", "--input", input_, "--output", output_},
        {"run", "--model", model_, "--prefix", kActing, "--input", input_, "--output", output_,
         "--keep", "a\x1b[2J"}}) {
    const ProgramResult result = run_mha(arguments);
    expect_error(result, "a\\x1b[2J");
    EXPECT_EQ(result.error.find('\x1b'), std::string::npos) << result.error;
  }
}

TEST_F(CliHostileTest, JsonHoldsNamesAsTheyAreInEscapes) {
  const ProgramResult result = run_mha({"info", "--model", model_, "--json"});
  EXPECT_TRUE(std::all_of(result.output.begin(), result.output.end(), [](unsigned char c) {
    return c == '\n' || (c >= ' ' && c < 0x7f);
  })) << result.output;
  EXPECT_EQ(json::parse(result.output)["layers"][0]["prefix"], kActing);
}

// --- values ---

TEST_F(CliHostileTest, AnEmptyValueIsNoDefault) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"map", "--maps", output_, "--tokens", ""},
        {"map", "--maps", output_, "--key-tokens", ""},
        {"map", "--maps", output_, "--output", ""},
        {"map", "--maps", output_, "--tensor", ""},
        {"info", "--model", ""},
        {"bench", "--case", ""}}) {
    expect_error(run_mha(arguments), ": expected a value, found ''");
  }
}

TEST_F(CliHostileTest, ANumberIsReadWhole) {
  for (const char* text : {"", "1,2", "nan", "1e400"}) {
    expect_error(run_mha({"demo", "--tolerance", text}),
                 "--tolerance: expected a number >= 0, found '" + std::string(text) + "'");
    expect_error(run_mha({"map", "--maps", output_, "--largest", text}),
                 "--largest: expected a number > 0, found '" + std::string(text) + "'");
  }
}

// --- tokens ---

TEST_F(CliHostileTest, TokensAreReadFromARegularFileOnly) {
  detail::write_safetensors(output_, {{{"weights", at::ones({1, 1, 2, 2})}}, {}});
  const auto refused = [&](const std::string& tokens, const std::string& text) {
    expect_error(run_mha({"map", "--maps", output_, "--tokens", tokens}), text);
  };
  const std::string pipe = directory_.file("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {pipe, std::string("/dev/zero"), directory_.file("")}) {
    refused(path, path + ": expected a regular file, found a d");
  }
  const std::string large = directory_.file("large.txt");
  write_bytes(large, "");
  std::filesystem::resize_file(large, (64 << 20) + 1);
  refused(large, "expected tokens of at most 67108864 bytes, found 67108865");
  const std::string nested = directory_.file("nested.json");
  write_bytes(nested, std::string(1 << 20, '['));
  refused(nested, "found a list or an object inside of it");
}

TEST_F(CliHostileTest, AByteOrderMarkIsNoPartOfTheFirstToken) {
  detail::write_safetensors(output_, {{{"weights", at::full({1, 1, 2, 2}, 0.5)}}, {}});
  const auto drawn = [&](const std::string& tokens) {
    return run_mha({"map", "--maps", output_, "--tokens", tokens}).output;
  };
  const std::string plain = drawn("one two"), mark = "\xEF\xBB\xBF";
  ASSERT_NE(plain.find("one"), std::string::npos);
  write_bytes(directory_.file("t.txt"), mark + "one\r\ntwo\r\n");
  EXPECT_EQ(drawn(directory_.file("t.txt")), plain);
  write_bytes(directory_.file("t.json"), mark + R"(["one", "two"])");
  EXPECT_EQ(drawn(directory_.file("t.json")), plain);
}

// --- sizes ---

TEST_F(CliHostileTest, ExplainingACallTakesNoMemoryForIt) {
  for (const char* dtype : {"float32", "bfloat16", "float64"}) {
    const ProgramResult result =
        run_mha({"info", "--explain", "--json", "--dtype", dtype, "--batch", "1000000",
                 "--queries", "100000", "--keys", "1000000", "--head-dim", "256"});
    EXPECT_EQ(result.exit_code, 0) << result.error;
    EXPECT_TRUE(json::parse(result.output).contains("attention"));
  }
  expect_error(run_mha({"info", "--explain", "--batch", "9223372036854775807"}),
               "--explain: expected sizes of fewer than 2^62 numbers, found query "
               "(9223372036854775807, 8, 512, 64)");
}

TEST_F(CliHostileTest, SizesThatNoMemoryHasAreAnErrorBeforeAnyIsTaken) {
  expect_error(
      run_mha({"demo", "--length", "10000000"}),
      "--batch 4, --length 10000000, --d-model 512, --num-heads 8: expected at most the ");
  expect_error(run_mha({"demo", "--d-model", "4611686018427387904"}), "GB of memory");
  // 16 TB of maps.
  const std::string narrow = directory_.file("narrow.safetensors");
  save(MultiHeadAttention(MultiHeadAttentionOptions(1, 1)), narrow);
  detail::write_safetensors(input_, {{{"x", at::zeros({1, 2000000, 1})}}, {}});
  for (const char* weights : {"per-head", "averaged"}) {
    expect_error(run_mha({"run", "--model", narrow, "--input", input_, "--output", output_,
                          "--return-weights", weights}),
                 std::string("--return-weights ") + weights + ": expected at most the ");
  }
  expect_error(run_mha({"map", "--model", narrow, "--input", input_, "--head", "0"}),
               "--head: expected at most the ");
  expect_error(run_mha({"map", "--model", narrow, "--input", input_, "--mean"}),
               "--mean: expected at most the ");
  EXPECT_FALSE(std::filesystem::exists(output_));
}

TEST_F(CliHostileTest, MemoryThatIsNotGrantedIsAnErrorInWordsOfThisProgram) {
  // On the plain path of float64 in one block scores are held whatever is written: 2 * 10^14
  // bytes, more than an address space has.
  const std::string narrow = directory_.file("narrow.safetensors");
  save(MultiHeadAttention(MultiHeadAttentionOptions(1, 1).dtype(at::kDouble)), narrow);
  detail::write_safetensors(input_, {{{"x", at::zeros({1, 5000000, 1}, at::kDouble)}}, {}});
  const ProgramResult result = run_mha({"run", "--model", narrow, "--input", input_, "--output",
                                        output_, "--return-weights", "none"},
                                       {{"MHA_PATH", "plain"}, {"MHA_BLOCK_BYTES", "9000000000000000000"}});
  expect_error(result, "memory");
  EXPECT_EQ(result.error.find("enforce fail"), std::string::npos) << result.error;
  EXPECT_EQ(result.error.find("bad_alloc"), std::string::npos) << result.error;
}

// --- streams ---

TEST_F(CliHostileTest, AnErrorWithoutAPlaceToGoIsStillExitCode2) {
  for (const std::vector<int>& closed :
       {std::vector<int>{STDERR_FILENO}, {STDOUT_FILENO}, {0, 1, 2}}) {
    EXPECT_EQ(run_mha_without(closed, {"demo", "--num-heads", "two"}).exit_code, 2);
    EXPECT_EQ(run_mha_without(closed, {"demo", "--d-model", "7"}).exit_code, 2);
  }
  EXPECT_EQ(run_mha_without({STDERR_FILENO}, {"info"}).exit_code, 0);
  EXPECT_EQ(run_mha_without({STDOUT_FILENO}, {"info"}).exit_code, 2);
}

TEST_F(CliHostileTest, WhatIsMeantForAClosedStreamGoesToNoFile) {
  const auto converted = [&](const std::vector<int>& closed) {
    run_mha_without(closed,
                    {"convert", "--model", model_, "--prefix", kActing, "--output", output_});
    return read_bytes(output_);
  };
  const std::string whole = converted({});
  ASSERT_NE(whole, "");
  std::filesystem::remove(output_);
  EXPECT_EQ(converted({0, 1, 2}), whole);
}

TEST_F(CliHostileTest, TheFileOfStandardOutputIsNotWrittenOver) {
  const ProgramResult result = run_mha_into(
      output_, {"convert", "--model", model_, "--prefix", kActing, "--output", output_});
  expect_error(result, "which the report on standard output goes to");
  EXPECT_EQ(read_bytes(output_), "");
}

TEST_F(CliHostileTest, AnOutputThatIsNoPlaceForAFileIsAnError) {
  const std::string pipe = directory_.file("pipe.safetensors");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& output :
       {pipe, std::string("/dev/full"), std::string("/dev/null"), directory_.file("")}) {
    if (access(output.c_str(), F_OK) != 0) continue;  // not on this system
    expect_error(
        run_mha({"convert", "--model", model_, "--prefix", kActing, "--output", output}),
        output + ": expected a regular file, found ");
  }
}

}  // namespace
}  // namespace mha::test
