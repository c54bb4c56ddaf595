#pragma once

#include <cstdint>
#include <string>

namespace mha::bench {

/// ATen's number of threads until the end of the scope.
class ThreadCount {
 public:
  explicit ThreadCount(int threads);
  ~ThreadCount();
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  int before_;
};

/// "AMD EPYC 9654, family 25, model 17"; "unknown" if the system doesn't say.
std::string cpu_name();

/// How many threads can run at once.
int cpu_count();

/// The programs that wanted to run, on average over the last minute; negative if unknown.
double load_average();

/// The memory that could be taken now without swapping, in bytes.
double available_memory();

/// The limits of the machine, measured beside a benchmark. Other programs can only lower a
/// measurement, so the best one so far counts: measure before, between and after.
class MachineLimits {
 public:
  /// For work on that many threads. Measures everything once.
  explicit MachineLimits(int threads);

  void measure();       ///< everything, some 400 ms
  void measure_peak();  ///< what `fma_peak` returns, some 20 ms

  int threads() const { return threads_; }
  double fma_peak() const { return fma_peak_; }  ///< float32 FLOP/s, all threads
  double read_bandwidth() const {
    return read_bandwidth_;
  }  ///< bytes/s from memory, all threads

  /// The peak of two threads over that of one, near 2 if they get a core each; 1 if there is
  /// one CPU only.
  double two_thread_scaling() const;
  /// Whether two threads are worth comparing with one here.
  bool two_threads_scale() const { return two_thread_scaling() >= 1.8; }

 private:
  int threads_;
  double fma_peak_ = 0, one_thread_peak_ = 0, two_thread_peak_ = 0, read_bandwidth_ = 0;
};

}  // namespace mha::bench
