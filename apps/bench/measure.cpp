#include "measure.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "machine.h"
#include "workload.h"

namespace mha::bench {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// One run with the freeing of its results, which go to `kept` if given.
double run_ms(const Computation& computation, std::vector<at::Tensor>* kept) {
  if (computation.prepare) computation.prepare();
  const auto start = Clock::now();
  std::vector<at::Tensor> results = computation.run();
  if (kept != nullptr) *kept = std::move(results);
  results.clear();
  return milliseconds_since(start);
}

Timing timing(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  const size_t middle = times.size() / 2;
  const double median =
      times.size() % 2 == 1 ? times[middle] : (times[middle - 1] + times[middle]) / 2;
  return {median, times.front()};
}

}  // namespace

Measurement measure(const Case& what, double seconds) {
  const Workload workload = make_workload(what);
  const double memory = available_memory() / 2;
  struct Run {
    Side side;
    const Computation* computation;
    std::vector<double> times;
  };
  std::vector<Run> runs;
  for (const Side side : kSides) {
    const Computation* computation = workload.side(side);
    if (computation != nullptr && computation->memory <= memory) {
      runs.push_back({side, computation, {}});
    }
  }

  const auto start = Clock::now();
  std::vector<at::Tensor> ours;
  for (Run& run : runs) {
    std::vector<at::Tensor> results;
    run.times.push_back(run_ms(*run.computation, &results));
    if (run.side == Side::ours) {
      ours = std::move(results);
    } else {
      check_agreement(what, ours, run.side, results);
    }
  }
  ours.clear();
  // The first round fills caches and takes memory. Where it is a small part of the time that is
  // no loss; of long runs it is one in three, which the median sets aside.
  if (milliseconds_since(start) < 1e3 * seconds) {
    for (Run& run : runs) run.times.clear();
  }
  constexpr size_t least = 3, most = 2000;
  while (runs.front().times.size() < least ||
         (runs.front().times.size() < most && milliseconds_since(start) < 1e3 * seconds)) {
    for (Run& run : runs) run.times.push_back(run_ms(*run.computation, nullptr));
  }

  Measurement result{};
  for (Run& run : runs) {
    const Timing times = timing(std::move(run.times));
    if (run.side == Side::ours) result.ours = times;
    if (run.side == Side::builtin) result.builtin = times;
    if (run.side == Side::sdpa) result.sdpa = times;
  }
  return result;
}

}  // namespace mha::bench
