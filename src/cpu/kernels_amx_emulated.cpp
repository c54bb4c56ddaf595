#include <immintrin.h>

#include "kernel_headers.h"
#include "tile_kernels.h"

namespace mha::cpu {
namespace {

#include "vec_amx.h"
struct AmxEmulated : TileSet {
  using Tiles = EmulatedTiles;
  using Pairs = EmulatedPairs;
};
using Isa = AmxEmulated;
#include "tile_body.h"

}  // namespace

const TileKernels* amx_emulated_tile_kernels() {
  static constexpr TileKernels kernels = make_tile_kernels();
  return &kernels;
}

}  // namespace mha::cpu
