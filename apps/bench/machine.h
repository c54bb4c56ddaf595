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

// The limits of the machine at this moment: clocks and neighbours change within a run, so these
// are measured beside what is compared with them, and by their median, as a case is.

/// float32 FLOP/s of that many threads together, in some 20 ms.
double fma_peak(int threads);

/// Bytes/s that so many threads read from memory together, in some 50 ms.
double read_bandwidth(int threads);

/// The peak of two threads over that of one, near 2 if they get a core each; 1 if there is one
/// CPU only.
double two_thread_scaling();

}  // namespace mha::bench
