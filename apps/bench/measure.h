#pragma once

#include <optional>

#include "cases.h"

namespace mha::bench {

struct Timing {
  double median_ms, min_ms;
};

/// Times of all sides of one case.
struct Measurement {
  Timing ours;
  std::optional<Timing> builtin, sdpa;  ///< empty where there is no such peer
};

/// Runs the sides in turn, A B C A B C, so that what disturbs the machine hits them alike, for
/// about `seconds` but at least three rounds. Checks that all sides compute the same.
Measurement measure(const Case& what, double seconds);

}  // namespace mha::bench
