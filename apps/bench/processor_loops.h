#pragma once

#include <cstdint>

namespace mha::bench {

/// Loops that do nothing but reach a limit of the processor, with the widest instructions that
/// it has.
struct ProcessorLoops {
  const char* isa;  ///< "generic", "avx2" or "avx512"
  /// Multiplies and adds `rounds` times in independent chains; returns a number that depends on
  /// all of them.
  float (*multiply_add)(int64_t rounds);
  int64_t flops_per_round;  ///< of `multiply_add`; a multiply and an add count as two
  /// The sum of `count` numbers, a multiple of 128, at an address that is a multiple of 64.
  float (*sum)(const float* data, int64_t count);
};

const ProcessorLoops& processor_loops();

}  // namespace mha::bench
