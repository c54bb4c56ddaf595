#include "measure.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <vector>

#include "machine.h"
#include "workload.h"

namespace mha::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kLeastRounds = 3, kMostRounds = 2000;
// In seconds: a limit is steady only after the least, and no more is learned after the most.
constexpr double kLeastBeside = 0.01, kMostBeside = 0.25;

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// One run with the freeing of its results, which go to `kept` if given.
double run_ms(const Computation& computation, at::Device device,
              std::vector<at::Tensor>* kept) {
  if (computation.prepare) computation.prepare();
  wait_for(device);
  const auto start = Clock::now();
  std::vector<at::Tensor> results = computation.run();
  if (kept != nullptr) *kept = std::move(results);
  results.clear();
  wait_for(device);
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

/// The runs of one side.
struct Runs {
  Side side;
  const Computation* computation;
  std::vector<double> times;  // in milliseconds
};

/// Ours in front, then the peers that there is memory for.
std::vector<Runs> runs_of(const Workload& workload) {
  const double memory = available_memory() / 2;
  std::vector<Runs> sides;
  for (const Side side : kSides) {
    const Computation* computation = workload.side(side);
    if (computation != nullptr && computation->memory <= memory) {
      sides.push_back({side, computation, {}});
    }
  }
  return sides;
}

/// Runs every side once and compares the results.
void first_round(const Case& what, at::Device device, std::vector<Runs>& sides) {
  std::vector<at::Tensor> ours;
  for (Runs& side : sides) {
    std::vector<at::Tensor> results;
    side.times.push_back(run_ms(*side.computation, device, &results));
    if (side.side == Side::ours) {
      ours = std::move(results);
    } else {
      check_agreement(what, ours, side.side, results);
    }
  }
}

Measurement measurement(const std::vector<Runs>& sides, const Limits& limits) {
  Measurement result{};
  result.limits = limits;
  for (const Runs& side : sides) {
    const Timing times = timing(side.times);
    if (side.side == Side::ours) result.ours = times;
    if (side.side == Side::builtin) result.builtin = times;
    if (side.side == Side::sdpa) result.sdpa = times;
  }
  return result;
}

// The mean of the two ends is what the machine had in the middle, if its clock drifts. Their
// maximum would call a case slow for a clock that it never had, and their minimum fast. (Within
// a measurement it is the median: there, too, neighbours come and go.)
double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) /
         static_cast<double>(values.size());
}

std::optional<double> mean_if_any(const std::vector<double>& values) {
  return values.empty() ? std::nullopt : std::optional(mean(values));
}

/// How long the limits are measured before and again after so many runs of ours: half as long
/// as these take.
double seconds_beside(double run, double runs) {
  return std::clamp(run * runs / 2, kLeastBeside, kMostBeside);
}

}  // namespace

void wait_for(at::Device device) {
  if (device.is_cpu()) return;
  if (device.is_cuda()) return torch::cuda::synchronize(device.index());
  // What comes to the CPU was computed after all that was asked for before.
  (void)at::zeros({1}, at::TensorOptions(device)).item();
}

void LimitsBeside::measure(double seconds) {
  const auto start = Clock::now();
  const int threads = at::get_num_threads();
  const bool bfloat16 = what_.dtype == at::kBFloat16 && !is_decoding(what_.kind);
  if (bfloat16) seconds /= 2;  // there is more than one limit to measure
  limit_.push_back(is_decoding(what_.kind) ? read_bandwidth(threads, seconds)
                                           : fma_peak(threads, seconds));
  if (bfloat16) {
    const BFloat16Peaks peaks = bfloat16_peaks(threads, seconds);
    if (peaks.pairs) pairs_.push_back(*peaks.pairs);
    if (peaks.tiles) tiles_.push_back(*peaks.tiles);
  }
  spent_ += milliseconds_since(start) / 1e3;
}

Limits LimitsBeside::limits() const {
  return {mean_if_any(limit_), limit_, {mean_if_any(pairs_), mean_if_any(tiles_)}};
}

double share_of_limit(const Case& what, double seconds, double limit) {
  return (is_decoding(what.kind) ? bytes_read(what) : useful_flops(what)) / seconds / limit;
}

Measurement measure(const Case& what, double seconds, at::Device device) {
  const Workload workload = make_workload(what, device);
  std::vector<Runs> sides = runs_of(workload);
  const auto start = Clock::now();
  LimitsBeside limits(what);
  const auto measure_limits = [&](double beside) {
    if (device.is_cpu()) limits.measure(beside);
  };
  measure_limits(kLeastBeside);
  first_round(what, device, sides);
  const auto elapsed = [&] { return milliseconds_since(start) / 1e3 - limits.spent_seconds(); };
  const double rounds = std::clamp<double>(seconds / elapsed(), kLeastRounds, kMostRounds);
  const double beside = seconds_beside(sides.front().times.front() / 1e3, rounds);
  // The first round fills caches and takes memory. Where it is a small part of the time that is
  // no loss; of long runs it is one in three, which the median sets aside.
  if (elapsed() < seconds) {
    for (Runs& side : sides) side.times.clear();
    limits = LimitsBeside(what);
    measure_limits(beside);
  }
  const std::vector<double>& ours = sides.front().times;
  while (ours.size() < kLeastRounds || (ours.size() < kMostRounds && elapsed() < seconds)) {
    // A clock that moves in seconds would be missed from the ends.
    if (!ours.empty() && 5 * limits.spent_seconds() < elapsed()) measure_limits(beside);
    for (Runs& side : sides) side.times.push_back(run_ms(*side.computation, device, nullptr));
  }
  measure_limits(beside);
  return measurement(sides, limits.limits());
}

}  // namespace mha::bench
