#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
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
// are measured beside what is compared with them, and by their median over about that many
// seconds, as a case is.

/// float32 FLOP/s of that many threads together.
double fma_peak(int threads, double seconds = 0.02);

/// FLOP/s of products of bfloat16 with sums in float32, for each way in which the processor
/// multiplies them; empty where it doesn't.
struct BFloat16Peaks {
  std::optional<double> pairs;  ///< VDPBF16PS, of AVX512_BF16
  std::optional<double> tiles;  ///< TDPBF16PS, of AMX

  /// An empty one is below any number.
  std::optional<double> highest() const { return std::max(pairs, tiles); }
};
BFloat16Peaks bfloat16_peaks(int threads, double seconds = 0.02);

/// Bytes/s that so many threads read from memory together.
double read_bandwidth(int threads, double seconds = 0.05);

/// The peak of two threads over that of one, near 2 if they get a core each; 1 if there is one
/// CPU only.
double two_thread_scaling();

}  // namespace mha::bench
