#include <immintrin.h>

#include "kernel_headers.h"

namespace mha::cpu {
namespace {

#include "vec_avx2.h"
using Isa = Avx2;
#include "kernels_body.h"

}  // namespace

const Kernels* avx2_kernels() {
  static constexpr Kernels kernels = make_kernels();
  return &kernels;
}

}  // namespace mha::cpu
