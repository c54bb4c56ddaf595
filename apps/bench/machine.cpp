#include "machine.h"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "processor_loops.h"
#include "runtime/huge_pages.h"

namespace mha::bench {
namespace {

double seconds_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

/// The median time of calls of work(thread, round), made on all threads at once for about that
/// many seconds, at least three times. What takes a part of the machine away for a while takes
/// it from a case beside it too.
template <typename Work>
double median_seconds(int threads, double seconds, const Work& work) {
  constexpr size_t least = 3;
  const ThreadCount scope(threads);
  std::vector<double> times;
  const double end = seconds_now() + seconds;
  while (times.size() < least || seconds_now() < end) {
    const double start = seconds_now();
    at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
      for (int64_t thread = first; thread < last; ++thread) work(thread, times.size());
    });
    times.push_back(seconds_now() - start);
  }
  const auto middle = times.begin() + static_cast<int64_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

/// FLOP/s of a loop on that many threads together.
double peak_of(const ProductLoop& loop, int threads, double seconds) {
  constexpr int64_t rounds = 100000;  // some tenths of a millisecond, of tiles a few whole ones
  const double one = median_seconds(threads, seconds, [&](int64_t, size_t) {
    [[maybe_unused]] volatile float kept = loop.run(rounds);
  });
  return static_cast<double>(loop.flops_per_round * rounds * threads) / one;
}

/// The value of "key : value" in a file of such lines, "" if there is none.
std::string value_in(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const size_t end = line.find_last_not_of(" \t", colon - 1) + 1;
    if (line.substr(0, end) != key) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

/// Memory several times as large as any cache that one socket has, within reason, and written
/// once: what was never written isn't read from memory.
class ReadBuffer {
 public:
  ReadBuffer() {
    constexpr int64_t page = 2 << 20, smallest = 64 * page, largest = 512 * page;
    const int64_t cache = sysconf(_SC_LEVEL3_CACHE_SIZE);  // 0 or -1: unknown
    bytes_ = std::clamp(4 * cache / page * page, smallest, largest);
    data_.reset(static_cast<float*>(std::aligned_alloc(page, static_cast<size_t>(bytes_))));
    if (!data_) throw std::bad_alloc();
    detail::prefer_huge_pages(data_.get(), static_cast<size_t>(bytes_));
    std::fill_n(data_.get(), size(), 1.0F);
  }
  const float* data() const { return data_.get(); }
  int64_t size() const { return bytes_ / int64_t{sizeof(float)}; }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  int64_t bytes_;
  std::unique_ptr<float, Free> data_;
};

}  // namespace

ThreadCount::ThreadCount(int threads) : before_(at::get_num_threads()) {
  at::set_num_threads(threads);
}

ThreadCount::~ThreadCount() {
  at::set_num_threads(before_);
}

std::string cpu_name() {
  constexpr const char* path = "/proc/cpuinfo";
  std::string name = value_in(path, "model name");
  if (name.empty()) return "unknown";
  // Virtual machines often hide the model's number, so these two tell the generation.
  const std::string family = value_in(path, "cpu family"), model = value_in(path, "model");
  if (!family.empty()) name += ", family " + family;
  if (!model.empty()) name += ", model " + model;
  return name;
}

int cpu_count() {
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

double load_average() {
  double loads[1];
  return getloadavg(loads, 1) == 1 ? loads[0] : -1;
}

double available_memory() {
  const std::string kilobytes = value_in("/proc/meminfo", "MemAvailable");
  if (!kilobytes.empty()) return std::strtod(kilobytes.c_str(), nullptr) * 1024;
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<double>(sysconf(_SC_PAGESIZE));
}

double fma_peak(int threads, double seconds) {
  return peak_of(processor_loops().multiply_add, threads, seconds);
}

BFloat16Peaks bfloat16_peaks(int threads, double seconds) {
  const auto peak = [&](const ProductLoop& loop) {
    return loop.run != nullptr ? std::optional(peak_of(loop, threads, seconds)) : std::nullopt;
  };
  return {peak(processor_loops().bfloat16_pairs), peak(processor_loops().bfloat16_tiles)};
}

double read_bandwidth(int threads, double seconds) {
  static const ReadBuffer buffer;  // kept: fresh memory can cost a second on a virtual machine
  // An eighth at a time, so that a part costs little and has left the caches when its turn
  // comes again; the next call goes on where this one ends.
  constexpr size_t parts = 8;
  static size_t next = 0;
  const int64_t share = buffer.size() / int64_t{parts} / threads / 128 * 128;
  size_t rounds = 0;
  const double one = median_seconds(threads, seconds, [&](int64_t thread, size_t round) {
    const auto part = static_cast<int64_t>((next + round) % parts);
    const float* data = buffer.data() + (part * threads + thread) * share;
    [[maybe_unused]] volatile float kept = processor_loops().sum(data, share);
    if (thread == 0) rounds = round + 1;
  });
  next = (next + rounds) % parts;
  return static_cast<double>(share * threads) * sizeof(float) / one;
}

double two_thread_scaling() {
  if (cpu_count() == 1) return 1;
  double best = 0;  // of a few tries: others can only take a thread's time away
  // A thread that was just started can share its starter's core for tens of milliseconds.
  constexpr double settled = 0.1;
  for (int i = 0; i < 3; ++i) best = std::max(best, fma_peak(2, settled) / fma_peak(1));
  return best;
}

}  // namespace mha::bench
