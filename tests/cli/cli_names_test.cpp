// Guards the names of options: one meaning a name and one spelling, and an error that tells the
// present name to those who use a former one.

#include <gtest/gtest.h>
#include <mha/weight_file.h>

#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "cli/cli_program.h"
#include "support/file_support.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

const std::vector<std::string> kCommands = {"demo", "run",  "convert", "compare",
                                            "map",  "info", "bench"};

// The options in a command's help, each with what stands for its value.
std::map<std::string, std::string> options_of(const std::string& command) {
  const std::string help = run_mha({command, "--help"}).output;
  std::map<std::string, std::string> options;
  const std::regex option("\n  (--[^ \n]+)(?: ([^ \n]+))?");
  for (std::sregex_iterator match(help.begin(), help.end(), option), end; match != end;
       ++match) {
    options[(*match)[1]] = (*match)[2];
  }
  return options;
}

TEST(CliNamesTest, AFormerNameIsAnErrorThatTellsThePresentOne) {
  struct Former {
    std::string command, former, present;
  };
  for (const auto& [command, former, present] :
       std::vector<Former>{{"run", "--weights", "--model"},
                           {"convert", "--weights", "--model"},
                           {"compare", "--weights", "--model"},
                           {"info", "--file", "--model"},
                           {"map", "--weights", "--maps"},
                           {"run", "--maps", "--return-weights"},
                           {"info", "--weights", "--return-weights"},
                           {"run", "--heads", "--num-heads"},
                           {"convert", "--heads", "--num-heads"},
                           {"compare", "--heads", "--num-heads"},
                           {"map", "--heads", "--num-heads"},
                           {"demo", "--heads", "--num-heads"},
                           {"demo", "--show-head", "--head"}}) {
    SCOPED_TRACE(command);
    std::string text = former;
    text += ": expected " + present + ", as it is called now (see mha " + command + " --help)";
    expect_error(run_mha({command, former, "8"}), text);
    expect_error(run_mha({command, former + "=8", "--json"}), text);
    expect_error(run_mha({command, former}), text);
    const auto options = options_of(command);
    EXPECT_EQ(options.count(former), 0u);
    EXPECT_EQ(options.count(present), 1u);
  }
}

TEST(CliNamesTest, AFormerValueIsAnErrorThatTellsThePresentOne) {
  const TemporaryDirectory directory;
  const std::string model = directory.file("model.safetensors"),
                    output = directory.file("output.safetensors");
  save(MultiHeadAttention(8, 2), model);
  struct Former {
    std::vector<std::string> arguments;
    std::string text;
  };
  for (const auto& [arguments, text] : std::vector<Former>{
           {{"run", "--return-weights", "per_head"},
            "--return-weights: expected one of none, averaged, per-head, found 'per_head'"},
           {{"info", "--explain", "--return-weights", "per_head"},
            "--return-weights: expected one of none, averaged, per-head, found 'per_head'"},
           {{"run", "--causal", "top_left"},
            "--causal: expected one of bottom-right, top-left, found 'top_left'"},
           {{"map", "--colour-scale", "square_root"},
            "--colour-scale: expected one of square-root, linear, found 'square_root'"},
           {{"convert", "--model", model, "--output", output, "--rotary", "rotary_dim=8"},
            "--rotary: expected rotary-dim, found 'rotary_dim'"},
           {{"convert", "--model", model, "--output", output, "--rotary", "pairing=half_split"},
            "--rotary: pairing: expected one of half-split, interleaved, found "
            "'half_split'"}}) {
    expect_error(run_mha(arguments), text);
  }
}

TEST(CliNamesTest, WordsAreJoinedByHyphens) {
  for (const std::string& command : kCommands) {
    for (const auto& [name, value] : options_of(command)) {
      EXPECT_EQ(name.find('_'), std::string::npos) << command << ' ' << name;
      EXPECT_EQ(value.find('_'), std::string::npos) << command << ' ' << name << ' ' << value;
    }
  }
}

TEST(CliNamesTest, AnOptionTakesTheSameInEveryCommand) {
  std::map<std::string, std::set<std::string>> values;
  for (const std::string& command : kCommands) {
    const auto options = options_of(command);
    EXPECT_GE(options.size(), 3u) << command;
    for (const auto& [name, value] : options) {
      // The demo is about fewer kinds of masks and dtypes.
      if (command != "demo" || (name != "--causal" && name != "--dtype")) {
        values[name].insert(value);
      }
    }
  }
  for (const auto& [name, found] : values) {
    EXPECT_EQ(found.size(), 1u) << name << ' ' << ::testing::PrintToString(found);
  }
}

}  // namespace
}  // namespace mha::test
