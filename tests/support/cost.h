#pragma once

#include <gtest/gtest.h>
#include <time.h>

#include <cstdint>
#include <string>

#include "support/peak_memory.h"

namespace mha::test {

/// What a call costs: its processor time, as a multiple of a loop of 2^26 steps in the same
/// process, which neither the machine's load nor its speed changes much; and how far this
/// process's resident memory rose above what it was, in bytes. The memory is 0 under a
/// sanitizer, which keeps freed memory and doubles the rest.
struct Cost {
  double work;
  int64_t memory;
};

/// Processor time of this thread.
inline double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// That of a loop of 2^26 steps, each of which waits for the one before.
inline double seconds_of_a_loop() {
  static const double seconds = [] {
    const double start = thread_seconds();
    uint64_t state = 1;
    for (int step = 0; step < 1 << 26; ++step) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
    }
    const volatile uint64_t used = state;
    (void)used;
    return thread_seconds() - start;
  }();
  return seconds;
}

template <typename Call>
double work_of(Call call) {
  const double start = thread_seconds();
  call();
  return (thread_seconds() - start) / seconds_of_a_loop();
}

template <typename Call>
Cost cost_of(Call call) {
  PeakMemory::reset();
  const int64_t before = PeakMemory::bytes();
  const double work = work_of(call);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return {work, 0 * before};
#else
  return {work, PeakMemory::bytes() - before};
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
