#pragma once

#include <malloc.h>

#include <cstdint>
#include <fstream>
#include <string>

namespace mha::test {

/// This process's resident memory at its highest since `reset`, as the operating system says; 0
/// where it does not. A sanitizer keeps freed memory and doubles the rest.
class PeakMemory {
 public:
  /// From here on large blocks come from the system and go back to it, so that what earlier
  /// tests left of the heap in small pieces adds nothing.
  static void reset() {
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
    malloc_trim(0);
    std::ofstream("/proc/self/clear_refs") << 5;
  }
  static int64_t bytes() {
    std::ifstream status("/proc/self/status");
    int64_t kilobytes = 0;
    for (std::string word; status >> word;) {
      if (word == "VmHWM:") status >> kilobytes;
    }
    return kilobytes * 1024;
  }
  static double mib() { return static_cast<double>(bytes()) / (1 << 20); }
};

}  // namespace mha::test
