// Guards `mha bench`: the form of its report, what its numbers mean among each other, and which
// cases it takes. No time is compared with another: a busy machine may give any. The program
// itself checks that ours and torch's compute the same.

#include <gtest/gtest.h>
#include <mha/version.h>

#include <algorithm>
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

// Null where the CPU has no such products.
const std::vector<std::string> kBFloat16Peaks = {"bfloat16_pairs_peak_gflops",
                                                 "bfloat16_tiles_peak_gflops"};

bool is_rate_or_null(const json& value) {
  return value.is_null() || value.get<double>() > 0;
}

// The report has four digits, so what follows from two of its numbers is near, not equal.
void expect_near(const json& found, double expected) {
  EXPECT_NEAR(found.get<double>(), expected, 2e-3 * expected);
}

double mean_of(const json& numbers) {
  double sum = 0;
  for (const json& number : numbers) sum += number.get<double>();
  return sum / static_cast<double>(numbers.size());
}

json bench_results(const std::vector<std::string>& cases) {
  std::vector<std::string> arguments = {"bench", "--threads", "1", "--json"};
  for (const std::string& name : cases) arguments.insert(arguments.end(), {"--case", name});
  return json::parse(run_mha(arguments).output)["results"];
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
  EXPECT_EQ(machine["device"], "cpu");
  EXPECT_EQ(machine["libtorch"], torch_version());
  EXPECT_GT(machine["fma_peak_gflops"].get<double>(), 0);
  EXPECT_GT(machine["read_bandwidth_gb_s"].get<double>(), 0);
  for (const std::string& key : kBFloat16Peaks)
    EXPECT_TRUE(is_rate_or_null(machine[key])) << key;
  EXPECT_EQ(machine["two_threads_scale"], machine["two_thread_scaling"].get<double>() >= 1.8);
}

TEST(CliBenchTest, AResultsNumbersFitTogether) {
  const json report = json::parse(run_mha(kSmall).output);
  ASSERT_EQ(report["results"].size(), 1u);
  const json& result = report["results"][0];
  EXPECT_EQ(keys_of(result),
            (std::set<std::string>{"case", "threads", "ms_median", "ms_min", "gflops",
                                   "fma_peak_gflops", "read_bandwidth_gb_s", "limit_measured",
                                   "fraction_of_peak", "bfloat16_pairs_peak_gflops",
                                   "bfloat16_tiles_peak_gflops", "fraction_of_bfloat16_peak",
                                   "ratio_to_builtin", "ratio_to_sdpa"}));
  EXPECT_EQ(result["case"], "core_forward 4x20x512x8");
  EXPECT_EQ(result["threads"], 1);
  const double median = result["ms_median"], gflops = result["gflops"];
  EXPECT_GT(result["ms_min"].get<double>(), 0);
  EXPECT_LE(result["ms_min"].get<double>(), median);
  // Two products of 4 samples x 20 queries x 20 keys x 512.
  expect_near(gflops * 1e9 * median * 1e-3, 2.0 * 2 * 4 * 20 * 20 * 512);
  // The share is of the limit around this case: what was measured before and after at least.
  EXPECT_GE(result["limit_measured"].size(), 2u);
  expect_near(result["fma_peak_gflops"], mean_of(result["limit_measured"]));
  expect_near(result["fraction_of_peak"], gflops / result["fma_peak_gflops"].get<double>());
  for (const std::string& key : kBFloat16Peaks) EXPECT_TRUE(result[key].is_null()) << key;
  EXPECT_TRUE(result["fraction_of_bfloat16_peak"].is_null());  // it is a case in float32
  EXPECT_TRUE(result["read_bandwidth_gb_s"].is_null());
  EXPECT_TRUE(result["ratio_to_builtin"].is_null());  // it has no such function
  EXPECT_GT(result["ratio_to_sdpa"].get<double>(), 0);
}

TEST(CliBenchTest, TheShareOfDecodingIsOfTheBandwidthMeasuredBesideIt) {
  const json result = bench_results({"decode 1x4096x768x12"})[0];
  EXPECT_TRUE(result["fma_peak_gflops"].is_null());
  EXPECT_GE(result["limit_measured"].size(), 2u);
  expect_near(result["read_bandwidth_gb_s"], mean_of(result["limit_measured"]));
  // Keys and values, float32.
  const double bytes = 2.0 * 4096 * 768 * 4;
  const double rate = bytes / (result["ms_median"].get<double>() * 1e-3);
  expect_near(result["fraction_of_peak"],
              rate / (result["read_bandwidth_gb_s"].get<double>() * 1e9));
}

TEST(CliBenchTest, BFloat16HasAShareOfItsOwnPeakToo) {
  const json results =
      bench_results({"core_forward 4x20x512x8 bfloat16", "decode 1x4096x4096x32 8kv bfloat16"});
  ASSERT_EQ(results.size(), 2u);
  const json& result = results[0];
  EXPECT_EQ(result["case"], "core_forward 4x20x512x8 bfloat16");
  const double gflops = result["gflops"];
  expect_near(result["fraction_of_peak"], gflops / result["fma_peak_gflops"].get<double>());
  double highest = 0;
  for (const std::string& key : kBFloat16Peaks) {
    EXPECT_TRUE(is_rate_or_null(result[key])) << key;
    if (!result[key].is_null()) highest = std::max(highest, result[key].get<double>());
  }
  if (highest == 0) {
    EXPECT_TRUE(result["fraction_of_bfloat16_peak"].is_null());
  } else {
    expect_near(result["fraction_of_bfloat16_peak"], gflops / highest);
  }
  // Decoding waits for memory, whatever the products.
  EXPECT_TRUE(results[1]["fraction_of_bfloat16_peak"].is_null());
}

// Each checks itself against its peers, of which not all compute every kind.
TEST(CliBenchTest, HalfPrecisionHasThePeersOfFloat32) {
  const json results = bench_results(
      {"core_forward_causal 4x20x512x8 bfloat16", "core_backward 4x20x512x8 bfloat16",
       "module_forward 4x20x512x8 bfloat16", "module_forward_causal 4x20x512x8 bfloat16",
       "module_train 4x20x512x8 bfloat16", "module_forward 4x20x512x8 float16"});
  ASSERT_EQ(results.size(), 6u);
  for (const json& result : results) {
    const bool module = result["case"].get<std::string>().rfind("module", 0) == 0;
    EXPECT_EQ(result["ratio_to_builtin"].is_number(), module) << result;
    EXPECT_TRUE(result["ratio_to_sdpa"].is_number()) << result;
  }
}

TEST(CliBenchTest, ProjectingAloneIsComparedWithLinear) {
  const json results = bench_results({"projection 4x20x512x8"});
  ASSERT_EQ(results.size(), 2u);
  EXPECT_EQ(results[0]["case"], "projection 4x20x512x8");
  EXPECT_EQ(results[1]["case"], "projection 4x20x512x8 bfloat16");
  for (const json& result : results) {
    // Keys and values: two products of 4 x 20 rows by 512 x 512.
    expect_near(result["gflops"].get<double>() * 1e6 * result["ms_median"].get<double>(),
                2.0 * 2 * 4 * 20 * 512 * 512);
    EXPECT_TRUE(result["ratio_to_builtin"].is_null()) << result;
    EXPECT_TRUE(result["ratio_to_sdpa"].is_number()) << result;
  }
}

TEST(CliBenchTest, OnlyWhatHasAPeerHasARatio) {
  const json results =
      bench_results({"module_forward_causal 4x20", "module_weights 4x20", "module_train 4x20"});
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
  for (const char* text : {"FMA peak", "GFLOP/s", "\ncore_backward 4x20x512x8 ", "FMA or read",
                           "of that", "of bf16", "built-in"}) {
    EXPECT_NE(result.output.find(text), std::string::npos) << text << '\n' << result.output;
  }
}

// Of parts that are in the short list and parts that are not, none may hide another.
TEST(CliBenchTest, EachPartOfANameFindsItsCasesOnce) {
  const json results = bench_results(
      {"core_forward 4x20x512x8 bfloat16", "core_forward 4x20x512x8", "forward 4x20x512x8 bf"});
  ASSERT_EQ(results.size(), 3u);
  EXPECT_EQ(results[0]["case"], "core_forward 4x20x512x8 bfloat16");
  EXPECT_EQ(results[1]["case"], "core_forward 4x20x512x8");
  EXPECT_EQ(results[2]["case"], "module_forward 4x20x512x8 bfloat16");
}

TEST(CliBenchTest, AWrongCallIsAnErrorBeforeAnythingIsMeasured) {
  expect_error(run_mha({"bench", "--case", "core_sideways"}), "found 'core_sideways'");
  expect_error(run_mha({"bench", "--case", "core_forward 4x20", "--case", "core_upwards"}),
               "found 'core_upwards'");
  for (const char* device : {"gpu", "meta", "cpu:1x"}) {
    expect_error(
        run_mha({"bench", "--device", device}),
        std::string("--device: expected a device of this machine and this LibTorch, ") +
            "found '" + device + "'");
  }
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
