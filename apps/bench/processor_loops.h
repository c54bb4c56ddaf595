#pragma once

#include <cstdint>

namespace mha::bench {

/// Multiplies and adds in independent chains.
struct ProductLoop {
  /// Returns a number that depends on all chains, so that none can be left out. Null where the
  /// processor lacks the instruction, or the system does not lend it.
  float (*run)(int64_t rounds) = nullptr;
  int64_t flops_per_round = 0;  ///< a multiply and an add count as two
};

/// Loops that do nothing but reach a limit of the processor, with the widest instructions that
/// it has.
struct ProcessorLoops {
  const char* isa;           ///< "generic", "avx2" or "avx512"
  ProductLoop multiply_add;  ///< float32
  // Sums in float32 of products of bfloat16:
  ProductLoop bfloat16_pairs;  ///< by twos in vectors: VDPBF16PS of AVX512_BF16
  ProductLoop bfloat16_tiles;  ///< of 16 x 32 by 32 x 16: TDPBF16PS of AMX
  /// The sum of `count` numbers, a multiple of 128, at an address that is a multiple of 64.
  float (*sum)(const float* data, int64_t count);
};

const ProcessorLoops& processor_loops();

}  // namespace mha::bench
