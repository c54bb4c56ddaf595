// Guards the command line as a user meets it: the built program is run, and exit codes, streams
// and pictures are read. The tolerances are the program's own, 2e-6 for float32 and 1e-12 for
// float64, the bounds that the parity suite proves.

#include <gtest/gtest.h>
#include <mha/cpu_isa.h>
#include <mha/version.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "cli/cli_program.h"
#include "support/file_support.h"

namespace mha::test {
namespace {

using nlohmann::json;

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// Columns that a line takes: escape sequences take none, a UTF-8 character one.
int64_t width_of(const std::string& line) {
  const std::string visible = std::regex_replace(line, std::regex("\x1b\\[[0-9;]*m"), "");
  return std::count_if(visible.begin(), visible.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

// Which of the front and back colours are still set at the end of a line.
std::string colours_after(const std::string& line) {
  bool front = false, back = false;
  const std::regex code("\x1b\\[([0-9;]*)m");
  for (std::sregex_iterator match(line.begin(), line.end(), code), end; match != end; ++match) {
    const std::string kind = (*match)[1].str().substr(0, 2);
    if (kind == "38" || kind == "39" || kind == "0") front = kind == "38";
    if (kind == "48" || kind == "49" || kind == "0") back = kind == "48";
  }
  return std::string(front ? "front" : "") + (back ? "back" : "");
}

// The lines of the picture, without the line of key labels above and the row labels.
std::vector<std::string> picture_of(const std::string& output, size_t row_label_width) {
  const std::vector<std::string> lines = lines_of(output);
  auto line = std::find_if(lines.begin(), lines.end(), [](const std::string& text) {
    return text.rfind("Weights of head", 0) == 0;
  });
  std::vector<std::string> picture;
  for (line += 2; line != lines.end() && !line->empty(); ++line) {
    picture.push_back(line->substr(2 + row_label_width + 1));
  }
  return picture;
}

// --- the program ---

TEST(CliTest, HelpOfEveryCommandGivesAnExampleAndSucceeds) {
  for (const std::vector<std::string>& command : {std::vector<std::string>{},
                                                  {"demo"},
                                                  {"run"},
                                                  {"convert"},
                                                  {"compare"},
                                                  {"map"},
                                                  {"info"},
                                                  {"bench"}}) {
    std::vector<std::string> arguments = command;
    arguments.push_back("--help");
    const ProgramResult result = run_mha(arguments);
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_EQ(result.error, "");
    const std::string example = "Example: mha " + (command.empty() ? "demo" : command[0]);
    EXPECT_TRUE(contains(result.output, example)) << result.output;
    for (const std::string& line : lines_of(result.output))
      EXPECT_LE(width_of(line), 90) << line;
  }
}

TEST(CliTest, TheVersionIsTheLibrarys) {
  const ProgramResult result = run_mha({"--version"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.output, "mha " + version() + "\n");
}

TEST(CliTest, AWrongCallIsOneLineOnStandardError) {
  expect_error(
      run_mha({}),
      "expected a command, demo, run, convert, compare, map, info or bench (see mha --help)");
  expect_error(run_mha({"dmeo"}), "not expected: dmeo");
  expect_error(run_mha({"info", "--wrong"}), "--wrong (see mha info --help)");
  expect_error(run_mha({"demo", "--num-heads", "two"}),
               "--num-heads: expected an integer >= 1, found 'two' (see mha demo --help)");
  expect_error(run_mha({"demo", "--length", "0"}), "--length: expected an integer >= 1");
  expect_error(run_mha({"demo", "--dtype", "half"}), "one of float32, float64, found 'half'");
  expect_error(run_mha({"demo", "--tolerance", "nan"}), "--tolerance: expected a number >= 0");
  expect_error(run_mha({"run", "--model", "w"}), "--input is required");
  expect_error(run_mha({"run", "--modle", "w"}),
               "not expected: --modle w (see mha run --help)");
  expect_error(run_mha({"bench", "--foo", "8"}), "not expected: --foo 8");
  expect_error(run_mha({"run", "--model", "w", "--input", ""}),
               "--input: expected a value, found ''");
  // Their value may be left out, but not be empty.
  for (const char* option : {"--causal", "--rotary"}) {
    expect_error(run_mha({"run", "--model", "w", "--input", "x", "--output", "y", option, ""}),
                 std::string(option) + ": expected a value, found ''");
  }
  expect_error(run_mha({"demo", "--d-model", "10", "--num-heads", "4"}),
               "--num-heads: expected a divisor of --d-model 10, found 4");
}

TEST(CliTest, AnErrorOfTheLibraryIsOneLineWithoutABacktrace) {
  expect_error(run_mha({"info", "--model", "no such file"}),
               "no such file: cannot be opened: No such file or directory");
  expect_error(run_mha({"demo", "--head", "8"}), "expected below 8");
}

// --- info ---

TEST(CliInfoTest, TextAndJsonSayTheSame) {
  const ProgramResult text = run_mha({"info"});
  const ProgramResult machine = run_mha({"info", "--json"});
  EXPECT_EQ(text.exit_code, 0);
  EXPECT_EQ(machine.exit_code, 0);
  const json info = json::parse(machine.output);
  EXPECT_EQ(info["version"], version());
  EXPECT_EQ(info["libtorch"]["compiled"], torch_version());
  EXPECT_EQ(info["libtorch"]["running"], torch_version());
  EXPECT_GE(info["threads"].get<int>(), 1);
  EXPECT_EQ(info["default_dtype"], "float32");
  for (const char* key : {"version", "parallel_backend", "cpu_capability", "default_dtype"}) {
    EXPECT_TRUE(contains(text.output, info[key].get<std::string>())) << key << text.output;
  }
}

TEST(CliInfoTest, TheThreadsAreThoseThatTheEnvironmentGives) {
  const ProgramResult result = run_mha({"info", "--json"}, {{"OMP_NUM_THREADS", "1"}});
  EXPECT_EQ(json::parse(result.output)["threads"], 1);
}

TEST(CliInfoTest, ExactlyOneKernelIsActive) {
  const json kernels = json::parse(run_mha({"info", "--json"}).output)["kernels"];
  EXPECT_EQ(std::count_if(kernels.begin(), kernels.end(),
                          [](const json& kernel) { return kernel["active"].get<bool>(); }),
            1);
  EXPECT_TRUE(std::any_of(kernels.begin(), kernels.end(),
                          [](const json& kernel) { return kernel["name"] == "plain"; }));
}

TEST(CliInfoTest, ExplainsWhichWayACallTakesAndWhy) {
  const auto explain = [](std::vector<std::string> arguments,
                          const Environment& environment = {}) {
    arguments.insert(arguments.begin(), {"info", "--explain", "--json"});
    return json::parse(run_mha(arguments, environment).output);
  };
  const auto says = [](const json& line, const std::string& part) {
    return contains(line.get<std::string>(), part);
  };
  const Environment generic{{"MHA_CPU_ISA", "generic"}};
  EXPECT_TRUE(says(explain({}, generic)["kernel"], "generic, float32, tiles of 12"));
  EXPECT_TRUE(says(explain({"--queries", "1", "--keys", "4096"}, generic)["kernel"], "chunks"));
  EXPECT_TRUE(says(explain({"--dtype", "bfloat16"}, generic)["kernel"], "float32 copies"));
  EXPECT_TRUE(says(explain({"--dtype", "float64"})["attention"], "scaled_dot_product"));
  EXPECT_TRUE(says(explain({"--device", "mps"})["attention"], "composition"));
  EXPECT_TRUE(says(explain({"--device", "cuda"})["attention"], "for the CPU"));
  EXPECT_TRUE(says(explain({}, {{"MHA_PATH", "plain"}})["projections"], "MHA_PATH=plain"));
  EXPECT_FALSE(explain({}, {{"MHA_PATH", "plain"}}).contains("kernel"));
  // Whichever is faster on this CPU.
  const auto projections = explain({"--dtype", "bfloat16"}, generic)["projections"];
  EXPECT_TRUE(says(projections, "packed weights") || says(projections, "layer is faster"));
  const auto available = available_cpu_isas();
  if (std::count(available.begin(), available.end(), CpuIsa::amx_emulated) == 1) {
    const auto lines =
        explain({"--dtype", "bfloat16", "--gradient"}, {{"MHA_CPU_ISA", "amx-emulated"}});
    EXPECT_TRUE(says(lines["projections"], "matrix tiles"));
  }
  EXPECT_FALSE(explain({}).contains("blocks"));
  std::vector<std::string> composed{"--dtype", "float64", "--return-weights", "per-head"};
  const Environment small{{"MHA_BLOCK_BYTES", "1000000"}};
  EXPECT_TRUE(says(explain(composed)["attention"], "weights are returned"));
  EXPECT_TRUE(
      says(explain(composed, small)["blocks"], "in blocks of 24 of 512 queries, 1 of "));
  composed.insert(composed.end(), {"--queries", "9"});
  EXPECT_TRUE(says(explain(composed)["blocks"], "one"));
  for (const char* wrong : {"0", "-1", "64M", "1e6", "99999999999999999999"}) {
    expect_error(
        run_mha({"info", "--explain", "--return-weights", "averaged", "--dtype", "float64"},
                {{"MHA_BLOCK_BYTES", wrong}}),
        std::string("MHA_BLOCK_BYTES: expected a positive integer, found '") + wrong);
  }
  expect_error(run_mha({"info", "--explain", "--num-kv-heads", "3"}),
               "--num-kv-heads: expected a divisor of --num-heads 8, found 3");
  expect_error(run_mha({"info", "--explain", "--device", "foo"}),
               "--device: expected a device of torch such as cpu or cuda:0, found 'foo'");
}

// --- demo ---

TEST(CliDemoTest, TheReferencesSizesAreTheDefault) {
  const json report = json::parse(run_mha({"demo", "--json"}).output);
  EXPECT_EQ(report["shapes"]["input"], json({4, 20, 512}));
  EXPECT_EQ(report["shapes"]["output"], json({4, 20, 512}));
  EXPECT_EQ(report["shapes"]["weights"], json({4, 8, 20, 20}));
  EXPECT_EQ(report["tolerance"], 2e-6);
}

TEST(CliDemoTest, EveryOptionReachesTheRun) {
  const json report =
      json::parse(run_mha({"demo", "--json", "--batch", "2", "--length", "7", "--d-model", "30",
                           "--num-heads", "3", "--seed", "5", "--causal", "--dtype", "float64"})
                      .output);
  EXPECT_EQ(report["shapes"]["input"], json({2, 7, 30}));
  EXPECT_EQ(report["shapes"]["weights"], json({2, 3, 7, 7}));
  EXPECT_EQ(report["seed"], 5);
  EXPECT_EQ(report["causal"], true);
  EXPECT_EQ(report["dtype"], "float64");
  EXPECT_EQ(report["tolerance"], 1e-12);
}

TEST(CliDemoTest, TheDifferenceToTheBuiltInIsWithinTheTolerance) {
  for (const char* dtype : {"float32", "float64"}) {
    for (const char* length : {"1", "20", "33"}) {
      std::vector<std::string> arguments = {"demo", "--json",   "--dtype",
                                            dtype,  "--length", length};
      for (int causal = 0; causal < 2; ++causal) {
        const ProgramResult result = run_mha(arguments);
        EXPECT_EQ(result.exit_code, 0) << result.output;
        const json report = json::parse(result.output);
        for (const char* key : {"output", "weights_per_head", "weights_averaged"}) {
          EXPECT_LE(report["largest_difference"][key].get<double>(), report["tolerance"])
              << key;
        }
        EXPECT_EQ(report["within_tolerance"], true);
        arguments.push_back("--causal");
      }
    }
  }
}

TEST(CliDemoTest, ADifferenceAboveTheToleranceIsExitCode1) {
  const std::vector<std::string> arguments = {"demo",     "--length",    "5",
                                              "--causal", "--tolerance", "0"};
  const ProgramResult text = run_mha(arguments);
  EXPECT_EQ(text.exit_code, 1);
  EXPECT_TRUE(contains(text.output, "ABOVE THE TOLERANCE")) << text.output;

  std::vector<std::string> with_json = arguments;
  with_json.push_back("--json");
  const ProgramResult machine = run_mha(with_json);
  EXPECT_EQ(machine.exit_code, 1);
  EXPECT_EQ(json::parse(machine.output)["within_tolerance"], false);
}

TEST(CliDemoTest, AFullDiskIsAnError) {
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full on this system";
  const ProgramResult result = run_mha_into("/dev/full", {"demo"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_TRUE(contains(result.error, "mha: error: ")) << result.error;
}

// --- the picture ---

TEST(CliPictureTest, InAPipeItIsPlainCharacters) {
  const ProgramResult result = run_mha({"demo", "--causal"}, {{"COLORTERM", "truecolor"}});
  EXPECT_FALSE(contains(result.output, "\x1b"));
  EXPECT_TRUE(std::all_of(result.output.begin(), result.output.end(), [](char c) {
    return c == '\n' || (c >= ' ' && c <= '~');
  })) << result.output;
}

TEST(CliPictureTest, ACausalMapIsBlankAboveTheDiagonalAndOnlyThere) {
  const std::vector<std::string> picture =
      picture_of(run_mha({"demo", "--length", "20", "--causal"}).output, 2);
  ASSERT_EQ(picture.size(), 20u);
  for (size_t query = 0; query < 20; ++query) {
    ASSERT_EQ(picture[query].size(), 40u);  // two columns a key
    for (size_t key = 0; key < 20; ++key) {
      const std::string cell = picture[query].substr(2 * key, 2);
      EXPECT_EQ(cell == "  ", key > query) << "query " << query << ", key " << key;
    }
  }
}

TEST(CliPictureTest, TheHeadIsTheOneAskedFor) {
  const std::string first = run_mha({"demo"}).output;
  const std::string other = run_mha({"demo", "--head", "7"}).output;
  EXPECT_TRUE(contains(other, "Weights of head 7")) << other;
  EXPECT_NE(picture_of(first, 2), picture_of(other, 2));
}

class CliTerminalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (access("/dev/ptmx", R_OK | W_OK) != 0) GTEST_SKIP() << "no pseudo-terminals here";
  }
  // A terminal that can do everything; each test takes something away.
  Environment environment_ = {{"TERM", "xterm-256color"},
                              {"COLORTERM", "truecolor"},
                              {"NO_COLOR", ""},
                              {"LC_ALL", "C.UTF-8"}};
};

TEST_F(CliTerminalTest, ColoursAre24BitWhereTheTerminalSaysSo) {
  const ProgramResult result = run_mha_at_terminal({"demo"}, 80, environment_);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(contains(result.output, "\x1b[48;2;")) << result.output;
}

TEST_F(CliTerminalTest, ColoursAreOf256Elsewhere) {
  environment_["COLORTERM"] = "";
  const ProgramResult result = run_mha_at_terminal({"demo"}, 80, environment_);
  EXPECT_TRUE(contains(result.output, "\x1b[48;5;")) << result.output;
  EXPECT_FALSE(contains(result.output, "8;2;")) << result.output;
}

TEST_F(CliTerminalTest, NoColorIsHonoured) {
  environment_["NO_COLOR"] = "1";
  const ProgramResult result = run_mha_at_terminal({"demo"}, 80, environment_);
  EXPECT_EQ(result.output, run_mha({"demo"}).output);
}

TEST_F(CliTerminalTest, ADumbTerminalGetsPlainCharacters) {
  environment_["TERM"] = "dumb";
  const ProgramResult result = run_mha_at_terminal({"demo"}, 80, environment_);
  EXPECT_FALSE(contains(result.output, "\x1b"));
}

TEST_F(CliTerminalTest, EveryColouredLineSetsTheColoursBack) {
  int coloured = 0;
  for (const char* length : {"20", "60"}) {
    const ProgramResult result =
        run_mha_at_terminal({"demo", "--causal", "--length", length}, 80, environment_);
    for (const std::string& line : lines_of(result.output)) {
      EXPECT_EQ(colours_after(line), "") << line;
      coloured += contains(line, "\x1b") ? 1 : 0;
    }
  }
  EXPECT_GE(coloured, 20 + 60 / 2);
}

TEST_F(CliTerminalTest, BlockCharactersNeedAUtf8Locale) {
  const std::vector<std::string> arguments = {"demo", "--length", "60"};
  const std::string block = "\u2580";
  EXPECT_TRUE(contains(run_mha_at_terminal(arguments, 80, environment_).output, block));
  environment_["LC_ALL"] = "C";
  EXPECT_FALSE(contains(run_mha_at_terminal(arguments, 80, environment_).output, block));
}

TEST_F(CliTerminalTest, AMapThatFitsIsNotPooled) {
  for (const char* length : {"1", "20", "60"}) {
    const ProgramResult result =
        run_mha_at_terminal({"demo", "--length", length}, 80, environment_);
    EXPECT_FALSE(contains(result.output, "Pooled")) << result.output;
  }
}

TEST_F(CliTerminalTest, ALongMapIsPooledToTheWidthAndSaysSo) {
  for (const char* no_colour : {"", "1"}) {
    environment_["NO_COLOR"] = no_colour;
    for (const int columns : {75, 120}) {
      const ProgramResult result =
          run_mha_at_terminal({"demo", "--length", "300", "--causal"}, columns, environment_);
      EXPECT_EQ(result.exit_code, 0);
      EXPECT_TRUE(contains(result.output, "Pooled from 300 x 300: a cell")) << result.output;
      for (const std::string& line : lines_of(result.output)) {
        EXPECT_LE(width_of(line), columns) << line;
      }
    }
  }
}

TEST_F(CliTerminalTest, ANarrowTerminalStillGetsAPicture) {
  const ProgramResult result = run_mha_at_terminal({"demo"}, 10, environment_);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(contains(result.output, "Pooled")) << result.output;
}

}  // namespace
}  // namespace mha::test
