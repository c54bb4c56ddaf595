#include <immintrin.h>

#include "kernel_headers.h"
#include "tile_kernels.h"

namespace mha::cpu {
namespace {

#include "vec_amx.h"
struct Amx : TileSet {
  using Tiles = AmxTiles;
  using Pairs = BFloat16Pairs;
};
using Isa = Amx;
#include "tile_body.h"

}  // namespace

const TileKernels* amx_tile_kernels() {
  static constexpr TileKernels kernels = make_tile_kernels();
  return &kernels;
}

}  // namespace mha::cpu
