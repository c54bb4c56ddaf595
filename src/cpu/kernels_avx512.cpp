#define MHA_ISA_AVX512 1
#include "kernels_body.h"

namespace mha::cpu {

const Kernels* avx512_kernels() {
  static constexpr Kernels kernels = make_kernels("avx512");
  return &kernels;
}

}  // namespace mha::cpu
