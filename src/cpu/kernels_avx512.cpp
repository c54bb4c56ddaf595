#include <immintrin.h>

#include "kernel_headers.h"

namespace mha::cpu {
namespace {

#include "vec_avx512.h"
using Isa = Avx512;
#include "kernels_body.h"

}  // namespace

const Kernels* avx512_kernels() {
  static constexpr Kernels kernels = make_kernels();
  return &kernels;
}

}  // namespace mha::cpu
