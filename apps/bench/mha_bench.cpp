// Every case on one and two threads, ours and the peers, by Google Benchmark. Some useful
// calls:
//
//   mha_bench --benchmark_filter='module_forward 1x2048.*/threads:1'
//   mha_bench --benchmark_enable_random_interleaving=true --benchmark_repetitions=9
//             --benchmark_report_aggregates_only=true
//
// The counter percent_of_limit is the share of the FMA peak of that many threads, for decode of
// the read bandwidth, measured beside each benchmark. Half precision is compared with the
// float32 peak too, which products of bfloat16 can surpass; percent_of_bfloat16 is the share of
// the highest peak of these, where the CPU multiplies bfloat16.

#include <benchmark/benchmark.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <mha/cpu_isa.h>
#include <mha/version.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <sstream>

#include "machine.h"
#include "measure.h"
#include "workload.h"

namespace {

using namespace mha::bench;

constexpr double kSecondsBeside = 0.05;

/// Google Benchmark calls a function several times to find the number of iterations; input and
/// parameters are made once.
const Workload& workload_of(const Case& what) {
  static std::string name;
  static std::optional<Workload> workload;
  if (name != name_of(what)) {
    workload.reset();  // before the next is made: some take gigabytes
    workload = make_workload(what);
    name = name_of(what);
  }
  return *workload;
}

void run(benchmark::State& state, const Case& what, Side side, int threads) {
  const ThreadCount scope(threads);
  const Computation& computation = *workload_of(what).side(side);
  if (computation.memory > available_memory() / 2) {
    state.SkipWithError(
        fmt::format("would take {:.1f} GB of memory", computation.memory / 1e9).c_str());
    return;
  }
  // Timed here, so that what prepares a run stays outside without a price.
  using Clock = std::chrono::steady_clock;
  double total = 0;
  LimitsBeside limits(what);
  limits.measure(kSecondsBeside);
  for (auto _ : state) {
    if (computation.prepare) computation.prepare();
    const auto start = Clock::now();
    computation.run();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    state.SetIterationTime(seconds);
    total += seconds;
  }
  limits.measure(kSecondsBeside);
  const double seconds = total / static_cast<double>(state.iterations());
  state.counters["GFLOP/s"] = useful_flops(what) / seconds / 1e9;
  const auto percent = [&](double limit) { return 100 * share_of_limit(what, seconds, limit); };
  state.counters["percent_of_limit"] = percent(*limits.limits().limit);
  if (const std::optional<double> peak = limits.limits().bfloat16.highest()) {
    state.counters["percent_of_bfloat16"] = percent(*peak);
  }
}

void add_benchmarks() {
  for (const Case& what : all_cases()) {
    for (int threads = 1; threads <= std::min(2, cpu_count()); ++threads) {
      for (const Side side : kSides) {
        if (!computes(side, what.kind)) continue;
        const std::string name =
            fmt::format("{}/threads:{}/{}", name_of(what), threads, name_of(side));
        benchmark::RegisterBenchmark(
            name.c_str(), [=](benchmark::State& state) { run(state, what, side, threads); })
            ->UseManualTime()
            ->Unit(benchmark::kMillisecond);
      }
    }
  }
}

void add_context() {
  std::ostringstream isa;
  isa << mha::cpu_isa();
  benchmark::AddCustomContext("cpu", cpu_name());
  benchmark::AddCustomContext("isa", isa.str());
  benchmark::AddCustomContext("libtorch", mha::torch_version());
  for (int threads = 1; threads <= std::min(2, cpu_count()); ++threads) {
    benchmark::AddCustomContext(
        fmt::format("limits_{}_threads", threads),
        fmt::format("{:.0f} GFLOP/s, {:.1f} GB/s read", fma_peak(threads) / 1e9,
                    read_bandwidth(threads) / 1e9));
  }
  if (const double scaling = two_thread_scaling(); cpu_count() > 1 && scaling < 1.8) {
    benchmark::AddCustomContext(
        "note",
        fmt::format("two threads reach only {:.2f} times the peak of one here", scaling));
  }
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  try {
    add_context();
    add_benchmarks();
    benchmark::RunSpecifiedBenchmarks();
  } catch (const c10::Error& error) {
    fmt::print(stderr, "mha_bench: error: {}\n", error.what_without_backtrace());
    return 2;
  }
  benchmark::Shutdown();
  return 0;
}
