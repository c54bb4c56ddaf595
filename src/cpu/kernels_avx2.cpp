#define MHA_ISA_AVX2 1
#include "kernels_body.h"

namespace mha::cpu {

const Kernels* avx2_kernels() {
  static constexpr Kernels kernels = make_kernels("avx2");
  return &kernels;
}

}  // namespace mha::cpu
