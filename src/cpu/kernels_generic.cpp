#define MHA_ISA_GENERIC 1
#include "kernels_body.h"

namespace mha::cpu {

const Kernels* generic_kernels() {
  static constexpr Kernels kernels = make_kernels("generic");
  return &kernels;
}

}  // namespace mha::cpu
