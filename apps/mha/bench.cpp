#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <fmt/ranges.h>
#include <mha/cpu_isa.h>
#include <mha/version.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cases.h"
#include "command.h"
#include "machine.h"
#include "measure.h"
#include "text.h"
#include "validators.h"

namespace mha::cli {
namespace {

using bench::Case;
using bench::Measurement;
using nlohmann::ordered_json;

struct BenchArguments {
  std::vector<std::string> cases;
  std::optional<int64_t> threads;
  std::string device = "cpu";
  bool json = false;
};

// Ours and the peers together. Cases that take longer get three rounds all the same, on one
// core of up to 4 s each.
constexpr double kSecondsPerCase = 0.4;

/// Four digits: more would be noise.
ordered_json rounded(double number) {
  return std::strtod(fmt::format("{:.4g}", number).c_str(), nullptr);
}

/// Adds those whose names contain `part` and that `found` has not yet.
void add_cases(std::vector<Case>& found, const std::vector<Case>& cases,
               const std::string& part) {
  const auto is_in_found = [&](const std::string& name) {
    return std::any_of(found.begin(), found.end(),
                       [&](const Case& other) { return name_of(other) == name; });
  };
  std::copy_if(cases.begin(), cases.end(), std::back_inserter(found), [&](const Case& what) {
    const std::string name = name_of(what);
    return name.find(part) != std::string::npos && !is_in_found(name);
  });
}

std::vector<std::string> kind_names() {
  std::vector<std::string> kinds;
  for (const Case& what : bench::all_cases()) {
    const std::string name = name_of(what);
    const std::string kind = name.substr(0, name.find(' '));
    if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
  }
  return kinds;
}

/// The short list without parts. For each part those of the short list that contain it, or else
/// those of all cases.
std::vector<Case> cases_with(const std::vector<std::string>& parts) {
  if (parts.empty()) return bench::short_cases();
  std::vector<Case> found;
  for (const std::string& part : parts) {
    std::vector<Case> cases;
    add_cases(cases, bench::short_cases(), part);
    if (cases.empty()) add_cases(cases, bench::all_cases(), part);
    TORCH_CHECK(!cases.empty(), "--case: expected a part of a name like '",
                name_of(bench::short_cases().front()), "' (",
                fmt::format("{}), found '{}'", fmt::join(kind_names(), ", "), part));
    add_cases(found, cases, part);
  }
  return found;
}

/// Null where there is none.
ordered_json in_billions(const std::optional<double>& rate) {
  return rate ? rounded(*rate / 1e9) : ordered_json();
}

ordered_json in_billions(const std::vector<double>& rates) {
  ordered_json numbers = ordered_json::array();
  for (const double rate : rates) numbers.push_back(rounded(rate / 1e9));
  return numbers;
}

/// Of the machine before anything else runs; the limits of each case stand with it.
ordered_json machine_json(at::Device device) {
  const double load = bench::load_average();  // of others: before this program adds to it
  const int threads = at::get_num_threads();
  const double scaling = bench::two_thread_scaling();
  const bench::BFloat16Peaks bfloat16 = bench::bfloat16_peaks(threads);
  return {
      {"cpu", bench::cpu_name()},
      {"isa", stream_text(cpu_isa())},
      {"threads", threads},
      {"device", device.str()},
      {"libtorch", torch_version()},
      {"fma_peak_gflops", rounded(bench::fma_peak(threads) / 1e9)},
      {"bfloat16_pairs_peak_gflops", in_billions(bfloat16.pairs)},
      {"bfloat16_tiles_peak_gflops", in_billions(bfloat16.tiles)},
      {"read_bandwidth_gb_s", rounded(bench::read_bandwidth(threads) / 1e9)},
      {"two_thread_scaling", rounded(scaling)},
      {"two_threads_scale", rounded(scaling).get<double>() >= 1.8},
      {"load_average", rounded(load)},
  };
}

ordered_json result_json(const Case& what, const Measurement& times) {
  const double seconds = times.ours.median_ms / 1e3;
  const bench::Limits& limits = times.limits;
  const bool from_memory = bench::is_decoding(what.kind);
  const auto share = [&](const std::optional<double>& limit) {  // of the CPU's
    return limit ? rounded(bench::share_of_limit(what, seconds, *limit)) : ordered_json();
  };
  const auto ratio = [&](const std::optional<bench::Timing>& peer) {
    return peer ? rounded(peer->median_ms / times.ours.median_ms) : ordered_json();
  };
  return {
      {"case", name_of(what)},
      {"threads", at::get_num_threads()},
      {"ms_median", rounded(times.ours.median_ms)},
      {"ms_min", rounded(times.ours.min_ms)},
      {"gflops", rounded(bench::useful_flops(what) / seconds / 1e9)},
      {"fma_peak_gflops", from_memory ? ordered_json() : in_billions(limits.limit)},
      {"read_bandwidth_gb_s", from_memory ? in_billions(limits.limit) : ordered_json()},
      {"limit_measured", in_billions(limits.measured)},
      {"fraction_of_peak", share(limits.limit)},
      {"bfloat16_pairs_peak_gflops", in_billions(limits.bfloat16.pairs)},
      {"bfloat16_tiles_peak_gflops", in_billions(limits.bfloat16.tiles)},
      {"fraction_of_bfloat16_peak", share(limits.bfloat16.highest())},
      {"ratio_to_builtin", ratio(times.builtin)},
      {"ratio_to_sdpa", ratio(times.sdpa)},
  };
}

std::string machine_text(const ordered_json& machine) {
  const auto number = [&](const char* key) { return machine[key].get<double>(); };
  const auto peak = [&](const char* key, const char* name) {
    return machine[key].is_null() ? "" : fmt::format(", {} {:.0f} GFLOP/s", name, number(key));
  };
  std::string lines = fmt::format(
      "{}, {} kernels, {} thread{}, LibTorch {}\n", machine["cpu"].get<std::string>(),
      machine["isa"].get<std::string>(), machine["threads"].get<int>(),
      machine["threads"].get<int>() == 1 ? "" : "s", machine["libtorch"].get<std::string>());
  lines += fmt::format(
      "Before: FMA peak {:.0f} GFLOP/s{}{}, memory read {:.1f} GB/s, load average {:.1f}\n",
      number("fma_peak_gflops"),
      peak("bfloat16_pairs_peak_gflops", "bfloat16 peak of VDPBF16PS"),
      peak("bfloat16_tiles_peak_gflops", "of AMX tiles"), number("read_bandwidth_gb_s"),
      number("load_average"));
  if (machine["device"] != "cpu") {
    lines += fmt::format("The cases run on {}, which has none of these limits.\n",
                         machine["device"].get<std::string>());
  } else if (!machine["two_threads_scale"].get<bool>()) {
    lines += fmt::format("Two threads reach only {:.2f} times the peak of one here.\n",
                         number("two_thread_scaling"));
  }
  return lines;
}

constexpr const char* kNameTitle = "case (BxTxDxH)";

std::string title_line(size_t name_width) {
  return fmt::format("{:<{}}{:>10}{:>10}{:>9}{:>12}{:>9}{:>9}{:>10}{:>8}\n", kNameTitle,
                     name_width, "ms median", "ms min", "GFLOP/s", "FMA or read", "of that",
                     "of bf16", "built-in", "SDPA");
}

std::string result_line(const ordered_json& result, size_t name_width) {
  const auto number = [&](const char* key) { return result[key].get<double>(); };
  const auto or_dash = [&](const char* format, const char* key, double factor = 1) {
    return result[key].is_null() ? "-"
                                 : fmt::format(fmt::runtime(format), factor * number(key));
  };
  return fmt::format(
      "{:<{}}{:>10.4g}{:>10.4g}{:>9.1f}{:>12}{:>9}{:>9}{:>10}{:>8}\n",
      result["case"].get<std::string>(), name_width, number("ms_median"), number("ms_min"),
      number("gflops"),
      result["fma_peak_gflops"].is_null() ? or_dash("{:.1f} GB/s", "read_bandwidth_gb_s")
                                          : or_dash("{:.1f}", "fma_peak_gflops"),
      or_dash("{:.0f}%", "fraction_of_peak", 100),
      or_dash("{:.0f}%", "fraction_of_bfloat16_peak", 100),
      or_dash("{:.2f}x", "ratio_to_builtin"), or_dash("{:.2f}x", "ratio_to_sdpa"));
}

std::string bench_text(const ordered_json& report) {
  size_t name_width = std::string(kNameTitle).size();
  for (const ordered_json& result : report["results"]) {
    name_width = std::max(name_width, result["case"].get<std::string>().size());
  }
  std::string lines = machine_text(report["machine"]) + '\n' + title_line(name_width);
  for (const ordered_json& result : report["results"]) lines += result_line(result, name_width);
  return lines +
         "\nFMA or read: the float32 FMA peak in GFLOP/s, for decoding the memory's read "
         "bandwidth, each\n"
         "the mean of what was measured just before and just after the case; of that: our "
         "share. "
         "of bf16:\n"
         "our share of the highest bfloat16 peak, where the CPU multiplies bfloat16.\n"
         "built-in, SDPA: their median time over ours; above 1 this library is faster. For "
         "projection\n"
         "SDPA stands for at::linear.\n";
}

/// Shows on a terminal what is being measured; an empty text clears the line.
void show_progress(const std::string& what) {
  if (isatty(STDERR_FILENO) == 0) return;
  std::fputs(fmt::format("\r{:<60}{}", what, what.empty() ? "\r" : "").c_str(), stderr);
  std::fflush(stderr);
}

/// More threads than a few a CPU only wait for each other, and thousands bring the machine to a
/// halt.
int checked_threads(const BenchArguments& arguments) {
  const int most = 4 * bench::cpu_count();
  const int64_t threads = arguments.threads.value_or(at::get_num_threads());
  TORCH_CHECK(threads <= most, "--threads: expected at most ", most, ", four for each of the ",
              bench::cpu_count(), " CPUs, found ", threads);
  return static_cast<int>(threads);
}

/// One that numbers can be read from.
at::Device checked_device(const std::string& name) {
  try {
    const auto tensor = at::zeros({1}, at::TensorOptions(at::Device(name)));
    if (tensor.item<float>() == 0) return tensor.device();
  } catch (const std::exception&) {
    // LibTorch says what it was built without, in many lines.
  }
  TORCH_CHECK(false, "--device: expected a device of this machine and this LibTorch, found '",
              name, "'");
}

ExitCode run_bench(const BenchArguments& arguments) {
  const std::vector<Case> cases = cases_with(arguments.cases);
  const at::Device device = checked_device(arguments.device);
  const bench::ThreadCount scope(checked_threads(arguments));
  ordered_json report = {{"machine", machine_json(device)}, {"results", ordered_json::array()}};
  ordered_json& results = report["results"];
  for (const Case& what : cases) {
    show_progress(fmt::format("{}/{} {}", results.size() + 1, cases.size(), name_of(what)));
    results.push_back(result_json(what, bench::measure(what, kSecondsPerCase, device)));
  }
  show_progress("");
  print_report(report, arguments.json, bench_text);
  return kSuccess;
}

}  // namespace

Command bench_command(CLI::App& program) {
  const auto arguments = std::make_shared<BenchArguments>();
  CLI::App* app = program.add_subcommand("bench", "Measure the speed beside torch's modules");
  app->add_option("--threads", arguments->threads, "Threads; default: LibTorch's own number")
      ->check(integer_from(1));
  app->add_option("--case", arguments->cases,
                  "Only cases whose name contains this; may be repeated")
      ->check(not_empty())
      ->type_name("TEXT")
      ->allow_extra_args(false);
  app->add_option("--device", arguments->device, "cpu, cuda, cuda:1, mps, xpu; default: cpu")
      ->check(not_empty())
      ->type_name("DEVICE");
  app->add_flag("--json", arguments->json, "Write JSON");
  app->footer(
      "Example: mha bench --threads 1 --case 'module_forward 1x2048'\n"
      "Takes about a minute without --case. Ours and torch's run in turn; under a causal mask\n"
      "the allowed pairs alone count as work. Half types, grouped heads and windows are in no\n"
      "short list: --case bfloat16.");
  return {app, [arguments] { return run_bench(*arguments); }};
}

}  // namespace mha::cli
