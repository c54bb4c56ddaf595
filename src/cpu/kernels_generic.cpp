#include "kernel_headers.h"

namespace mha::cpu {
namespace {

#include "vec_generic.h"
using Isa = Generic;
#include "kernels_body.h"

}  // namespace

const Kernels* generic_kernels() {
  static constexpr Kernels kernels = make_kernels();
  return &kernels;
}

}  // namespace mha::cpu
