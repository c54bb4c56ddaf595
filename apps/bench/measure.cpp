#include "measure.h"

#include <ATen/Parallel.h>

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

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

Timing timing(const std::vector<double>& times) {
  return {median(times), *std::min_element(times.begin(), times.end())};
}

/// The limit of a case, measured now and again in at most a fifth of the time.
class LimitBeside {
 public:
  explicit LimitBeside(const Case& what) : what_(what), start_(Clock::now()) {}

  void measure() {
    const auto start = Clock::now();
    limits_.push_back(limit_of(what_));
    spent_ += milliseconds_since(start);
  }
  void measure_if_due() {
    if (5 * spent_ < milliseconds_since(start_)) measure();
  }
  double typical() const { return median(limits_); }
  double spent_ms() const { return spent_; }

 private:
  const Case& what_;
  const Clock::time_point start_;
  double spent_ = 0;
  std::vector<double> limits_;
};

}  // namespace

double limit_of(const Case& what) {
  const int threads = at::get_num_threads();
  return is_decoding(what.kind) ? read_bandwidth(threads) : fma_peak(threads);
}

double share_of_limit(const Case& what, double seconds, double limit) {
  return (is_decoding(what.kind) ? bytes_read(what) : useful_flops(what)) / seconds / limit;
}

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
  LimitBeside limit(what);
  limit.measure();
  // The first round fills caches and takes memory. Where it is a small part of the time that is
  // no loss; of long runs it is one in three, which the median sets aside.
  if (milliseconds_since(start) < 1e3 * seconds) {
    for (Run& run : runs) run.times.clear();
  }
  constexpr size_t least = 3, most = 2000;
  while (runs.front().times.size() < least ||
         (runs.front().times.size() < most &&
          milliseconds_since(start) - limit.spent_ms() < 1e3 * seconds)) {
    for (Run& run : runs) run.times.push_back(run_ms(*run.computation, nullptr));
    limit.measure_if_due();
  }
  limit.measure();

  Measurement result{};
  result.limit = limit.typical();
  for (const Run& run : runs) {
    const Timing times = timing(run.times);
    if (run.side == Side::ours) result.ours = times;
    if (run.side == Side::builtin) result.builtin = times;
    if (run.side == Side::sdpa) result.sdpa = times;
  }
  return result;
}

}  // namespace mha::bench
