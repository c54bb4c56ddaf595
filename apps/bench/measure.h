#pragma once

#include <optional>

#include "cases.h"

namespace mha::bench {

struct Timing {
  double median_ms, min_ms;
};

/// Times of all sides of one case, and what the machine could do meanwhile.
struct Measurement {
  Timing ours;
  std::optional<Timing> builtin, sdpa;  ///< empty where there is no such peer
  double limit;                         ///< FLOP/s; of `decode` bytes/s from memory
};

/// What holds a case back on the threads in use: the FMA peak, or for `decode` the memory's
/// read bandwidth.
double limit_of(const Case& what);

/// What our share of that limit is, if a run takes that long.
double share_of_limit(const Case& what, double seconds, double limit);

/// Runs the sides in turn, A B C A B C, so that what disturbs the machine hits them alike, for
/// about `seconds` but at least three rounds. The limit is measured before, between and after,
/// and its median counts, as that of the times. Checks that all sides compute the same.
Measurement measure(const Case& what, double seconds);

}  // namespace mha::bench
