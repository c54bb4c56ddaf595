#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "peak_memory.h"

namespace mha::test {

/// What a call costs: time, and how far this process's resident memory rose above what it was,
/// in bytes. The memory is 0 under a sanitizer, which keeps freed memory and doubles the rest.
struct Cost {
  double seconds;
  int64_t memory;
};

template <typename Call>
Cost cost_of(Call call) {
  PeakMemory::reset();
  const int64_t before = PeakMemory::bytes();
  const auto start = std::chrono::steady_clock::now();
  call();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return {seconds.count(), 0 * before};
#else
  return {seconds.count(), PeakMemory::bytes() - before};
#endif
}

/// Fails the test if the system does not let memory be measured.
inline void check_that_memory_is_measured() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  const Cost known = cost_of([] { const std::string text(32 << 20, 'x'); });
  ASSERT_GE(known.memory, 31 << 20) << "memory cannot be measured here";
#endif
}

}  // namespace mha::test
