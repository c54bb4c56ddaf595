// Guards `mha bench`: the form of its report, what its numbers mean among each other, and which
// cases it takes. No time is compared with another: a busy machine may give any. The program
// itself checks that ours and torch's compute the same.

#include <gtest/gtest.h>
#include <mha/version.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "cli/cli_program.h"

namespace mha::test {
namespace {

using nlohmann::json;

// One small case, the fastest there is.
const std::vector<std::string> kSmall = {"bench",  "--threads", "1",
                                         "--json", "--case",    "core_forward 4x20x512x8"};

std::set<std::string> keys_of(const json& object) {
  std::set<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.insert(key);
  return keys;
}

TEST(CliBenchTest, TheReportNamesTheMachineAndItsLimits) {
  const ProgramResult result = run_mha(kSmall, {{"MHA_CPU_ISA", "generic"}});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.error, "");
  const json report = json::parse(result.output);
  EXPECT_EQ(keys_of(report), (std::set<std::string>{"machine", "results"}));
  const json& machine = report["machine"];
  EXPECT_NE(machine["cpu"], "");
  EXPECT_EQ(machine["isa"], "generic");
  EXPECT_EQ(machine["threads"], 1);
  EXPECT_EQ(machine["libtorch"], torch_version());
  EXPECT_GT(machine["fma_peak_gflops"].get<double>(), 0);
  EXPECT_GT(machine["read_bandwidth_gb_s"].get<double>(), 0);
  EXPECT_EQ(machine["two_threads_scale"], machine["two_thread_scaling"].get<double>() >= 1.8);
}

TEST(CliBenchTest, AResultsNumbersFitTogether) {
  const json report = json::parse(run_mha(kSmall).output);
  ASSERT_EQ(report["results"].size(), 1u);
  const json& result = report["results"][0];
  EXPECT_EQ(keys_of(result),
            (std::set<std::string>{"case", "threads", "ms_median", "ms_min", "gflops",
                                   "fma_peak_gflops", "read_bandwidth_gb_s", "fraction_of_peak",
                                   "ratio_to_builtin", "ratio_to_sdpa"}));
  EXPECT_EQ(result["case"], "core_forward 4x20x512x8");
  EXPECT_EQ(result["threads"], 1);
  const double median = result["ms_median"], gflops = result["gflops"];
  EXPECT_GT(result["ms_min"].get<double>(), 0);
  EXPECT_LE(result["ms_min"].get<double>(), median);
  // Two products of 4 samples x 20 queries x 20 keys x 512; the report has four digits.
  const double flops = 2.0 * 2 * 4 * 20 * 20 * 512;
  EXPECT_NEAR(gflops * 1e9 * median * 1e-3, flops, 2e-3 * flops);
  // The share is of the limit that was measured in turn with this case.
  EXPECT_NEAR(result["fraction_of_peak"].get<double>(),
              gflops / result["fma_peak_gflops"].get<double>(),
              2e-3 * result["fraction_of_peak"].get<double>());
  EXPECT_TRUE(result["read_bandwidth_gb_s"].is_null());
  EXPECT_TRUE(result["ratio_to_builtin"].is_null());  // it has no such function
  EXPECT_GT(result["ratio_to_sdpa"].get<double>(), 0);
}

TEST(CliBenchTest, TheShareOfDecodingIsOfTheBandwidthMeasuredBesideIt) {
  const json report = json::parse(
      run_mha({"bench", "--threads", "1", "--json", "--case", "decode 1x4096x768x12"}).output);
  const json& result = report["results"][0];
  EXPECT_TRUE(result["fma_peak_gflops"].is_null());
  // Keys and values, float32.
  const double bytes = 2.0 * 4096 * 768 * 4;
  const double rate = bytes / (result["ms_median"].get<double>() * 1e-3);
  EXPECT_NEAR(result["fraction_of_peak"].get<double>(),
              rate / (result["read_bandwidth_gb_s"].get<double>() * 1e9),
              2e-3 * result["fraction_of_peak"].get<double>());
}

TEST(CliBenchTest, OnlyWhatHasAPeerHasARatio) {
  const std::vector<std::string> arguments = {"bench",  "--json",
                                              "--case", "module_forward_causal 4x20",
                                              "--case", "module_weights 4x20",
                                              "--case", "module_train 4x20"};
  const json results = json::parse(run_mha(arguments).output)["results"];
  ASSERT_EQ(results.size(), 3u);
  for (const json& result : results) {
    EXPECT_TRUE(result["ratio_to_builtin"].is_number()) << result;
    const bool weights = result["case"] == "module_weights 4x20x512x8";  // SDPA returns none
    EXPECT_EQ(result["ratio_to_sdpa"].is_null(), weights) << result;
  }
}

TEST(CliBenchTest, ATableIsForReaders) {
  const ProgramResult result = run_mha({"bench", "--case", "core_backward 4x20x512x8"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  for (const char* text :
       {"FMA peak", "GFLOP/s", "\ncore_backward 4x20x512x8 ", "share", "built-in"}) {
    EXPECT_NE(result.output.find(text), std::string::npos) << text << '\n' << result.output;
  }
}

TEST(CliBenchTest, AWrongCallIsAnErrorBeforeAnythingIsMeasured) {
  expect_error(run_mha({"bench", "--case", "core_sideways"}), "found 'core_sideways'");
  expect_error(run_mha({"bench", "--threads", "0"}), "--threads: expected an integer >= 1");
  // So many would bring the machine to a halt, or be more than it can start.
  for (const char* threads : {"100000", "9223372036854775807"}) {
    expect_error(run_mha({"bench", "--threads", threads}),
                 std::string("CPUs, found ") + threads);
  }
}

TEST(CliBenchTest, TheHelpGivesAnExample) {
  const ProgramResult result = run_mha({"bench", "--help"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.output.find("Example: mha bench"), std::string::npos) << result.output;
}

}  // namespace
}  // namespace mha::test
