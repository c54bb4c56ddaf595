#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <vector>

#include "cases.h"
#include "machine.h"

namespace mha::bench {

struct Timing {
  double median_ms, min_ms;
};

/// What the machine could do while a case ran. Of the CPU alone: elsewhere none is known.
struct Limits {
  /// What holds a case back on the threads in use: the FMA peak in FLOP/s, or of a decoding
  /// case the memory's read bandwidth in bytes/s. The mean of what was measured.
  std::optional<double> limit;
  std::vector<double> measured;  ///< in the order of time: just before the runs .. just after
  BFloat16Peaks bfloat16;        ///< means; of bfloat16 cases alone
};

/// Times of all sides of one case, and what the machine could do meanwhile.
struct Measurement {
  Timing ours;
  std::optional<Timing> builtin, sdpa;  ///< empty where there is no such peer
  Limits limits;
};

/// The limits of a case at this moment, for as long as it is.
class LimitsBeside {
 public:
  explicit LimitsBeside(const Case& what) : what_(what) {}

  /// Takes about that many seconds.
  void measure(double seconds);
  double spent_seconds() const { return spent_; }
  /// Of at least one measurement.
  Limits limits() const;

 private:
  Case what_;
  double spent_ = 0;
  std::vector<double> limit_, pairs_, tiles_;
};

/// What our share of a limit is, if a run takes that long.
double share_of_limit(const Case& what, double seconds, double limit);

/// Runs the sides in turn, A B C A B C, so that what disturbs the machine hits them alike, for
/// about `seconds` but at least three rounds. The limits are measured just before and just
/// after, together for about as long as ours runs, and between the rounds of cases that take
/// seconds. Checks that all sides compute the same.
Measurement measure(const Case& what, double seconds, at::Device device = at::kCPU);

/// Waits until a device has done all that it was given.
void wait_for(at::Device device);

}  // namespace mha::bench
