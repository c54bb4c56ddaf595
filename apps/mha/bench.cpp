#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fmt/ranges.h>
#include <mha/cpu_isa.h>
#include <mha/version.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
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
  bool json = false;
};

// Ours and the peers together. Cases that take longer get three rounds all the same, on one
// core of up to 4 s each.
constexpr double kSecondsPerCase = 0.4;

/// Four digits: more would be noise.
ordered_json rounded(double number) {
  return std::strtod(fmt::format("{:.4g}", number).c_str(), nullptr);
}

/// Those whose names contain any of `parts`.
std::vector<Case> cases_among(const std::vector<Case>& cases,
                              const std::vector<std::string>& parts) {
  std::vector<Case> found;
  std::copy_if(cases.begin(), cases.end(), std::back_inserter(found), [&](const Case& what) {
    const std::string name = name_of(what);
    return std::any_of(parts.begin(), parts.end(), [&](const std::string& part) {
      return name.find(part) != std::string::npos;
    });
  });
  return found;
}

/// The short list without parts. With them those of the short list that contain any, or else
/// those of all cases.
std::vector<Case> cases_with(const std::vector<std::string>& parts) {
  if (parts.empty()) return bench::short_cases();
  std::vector<Case> found = cases_among(bench::short_cases(), parts);
  if (found.empty()) found = cases_among(bench::all_cases(), parts);
  std::vector<std::string> kinds;
  for (const Case& what : bench::all_cases()) {
    const std::string name = name_of(what);
    const std::string kind = name.substr(0, name.find(' '));
    if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
  }
  TORCH_CHECK(!found.empty(), "--case: expected a part of a name like '",
              name_of(bench::short_cases().front()), "' (",
              fmt::format("{}), found '{}'", fmt::join(kinds, ", "), fmt::join(parts, "', '")));
  return found;
}

/// Of the machine before anything else runs; the limits of each case stand with it.
ordered_json machine_json() {
  const double load = bench::load_average();  // of others: before this program adds to it
  const int threads = at::get_num_threads();
  const double scaling = bench::two_thread_scaling();
  return {
      {"cpu", bench::cpu_name()},
      {"isa", stream_text(cpu_isa())},
      {"threads", threads},
      {"libtorch", torch_version()},
      {"fma_peak_gflops", rounded(bench::fma_peak(threads) / 1e9)},
      {"read_bandwidth_gb_s", rounded(bench::read_bandwidth(threads) / 1e9)},
      {"two_thread_scaling", rounded(scaling)},
      {"two_threads_scale", scaling >= 1.8},
      {"load_average", rounded(load)},
  };
}

ordered_json result_json(const Case& what, const Measurement& times) {
  const double seconds = times.ours.median_ms / 1e3;
  const double limit = times.limit;
  const bool from_memory = bench::is_decoding(what.kind);
  const auto ratio = [&](const std::optional<bench::Timing>& peer) {
    return peer ? rounded(peer->median_ms / times.ours.median_ms) : ordered_json();
  };
  return {
      {"case", name_of(what)},
      {"threads", at::get_num_threads()},
      {"ms_median", rounded(times.ours.median_ms)},
      {"ms_min", rounded(times.ours.min_ms)},
      {"gflops", rounded(bench::useful_flops(what) / seconds / 1e9)},
      {"fma_peak_gflops", from_memory ? ordered_json() : rounded(limit / 1e9)},
      {"read_bandwidth_gb_s", from_memory ? rounded(limit / 1e9) : ordered_json()},
      {"fraction_of_peak", rounded(bench::share_of_limit(what, seconds, limit))},
      {"ratio_to_builtin", ratio(times.builtin)},
      {"ratio_to_sdpa", ratio(times.sdpa)},
  };
}

std::string text(const ordered_json& report) {
  const ordered_json& machine = report["machine"];
  const auto number = [](const ordered_json& json) { return json.get<double>(); };
  std::string lines = fmt::format(
      "{}, {} kernels, {} thread{}, LibTorch {}\n"
      "Before: FMA peak {:.0f} GFLOP/s, memory read {:.1f} GB/s, load average {:.1f}{}\n\n",
      machine["cpu"].get<std::string>(), machine["isa"].get<std::string>(),
      machine["threads"].get<int>(), machine["threads"].get<int>() == 1 ? "" : "s",
      machine["libtorch"].get<std::string>(), number(machine["fma_peak_gflops"]),
      number(machine["read_bandwidth_gb_s"]), number(machine["load_average"]),
      machine["two_threads_scale"].get<bool>()
          ? ""
          : fmt::format("\nTwo threads reach only {:.2f} times the peak of one here.",
                        number(machine["two_thread_scaling"])));
  lines += fmt::format("{:<38}{:>10}{:>10}{:>9}{:>10}{:>7}{:>10}{:>8}\n", "case (BxTxDxH)",
                       "ms median", "ms min", "GFLOP/s", "limit", "share", "built-in", "SDPA");
  const auto ratio = [&](const ordered_json& json) {
    return json.is_null() ? std::string("-") : fmt::format("{:.2f}x", number(json));
  };
  for (const ordered_json& result : report["results"]) {
    const ordered_json& peak = result["fma_peak_gflops"];
    lines += fmt::format("{:<38}{:>10.4g}{:>10.4g}{:>9.1f}{:>10}{:>6.0f}%{:>10}{:>8}\n",
                         result["case"].get<std::string>(), number(result["ms_median"]),
                         number(result["ms_min"]), number(result["gflops"]),
                         peak.is_null()
                             ? fmt::format("{:.1f} GB/s", number(result["read_bandwidth_gb_s"]))
                             : fmt::format("{:.1f}", number(peak)),
                         100 * number(result["fraction_of_peak"]),
                         ratio(result["ratio_to_builtin"]), ratio(result["ratio_to_sdpa"]));
  }
  return lines +
         "\nlimit: the FMA peak in GFLOP/s, for decode the memory's read bandwidth, measured "
         "in\n"
         "turn with the case; share: ours of it.\n"
         "built-in, SDPA: their median time over ours; above 1 this library is faster.\n";
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

ExitCode run_bench(const BenchArguments& arguments) {
  const std::vector<Case> cases = cases_with(arguments.cases);
  const bench::ThreadCount scope(checked_threads(arguments));
  ordered_json report = {{"machine", machine_json()}, {"results", ordered_json::array()}};
  ordered_json& results = report["results"];
  for (const Case& what : cases) {
    show_progress(fmt::format("{}/{} {}", results.size() + 1, cases.size(), name_of(what)));
    results.push_back(result_json(what, bench::measure(what, kSecondsPerCase)));
  }
  show_progress("");
  print_report(report, arguments.json, text);
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
  app->add_flag("--json", arguments->json, "Write JSON");
  app->footer(
      "Example: mha bench --threads 1 --case 'module_forward 1x2048'\n"
      "Takes about a minute without --case. Ours and torch's run in turn; under a causal mask\n"
      "the allowed pairs alone count as work. The limit of a case is measured in turn with "
      "it.");
  return {app, [arguments] { return run_bench(*arguments); }};
}

}  // namespace mha::cli
