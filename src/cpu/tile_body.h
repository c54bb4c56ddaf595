// The whole of one set's kernels on matrix tiles. Each kernels_<set>.cpp includes vec_amx.h and
// says which `Isa` it is, then includes this file once; everything has internal linkage but its
// entry function.

// Each builds on those before it.
// clang-format off
#include "micro_kernel.h"
#include "transpose.h"
#include "pair_mask.h"
#include "key_walk.h"
#include "score_range.h"
#include "softcap.h"
#include "dropout.h"
#include "running_softmax.h"
#include "tile_exp.h"
#include "tile_pack.h"
#include "tile_products.h"
#include "tile_scores.h"
#include "tile_forward.h"
#include "key_chunks.h"
#include "tile_backward_passes.h"
#include "tile_backward.h"
#include "tile_linear.h"
// clang-format on

// By name: two of them may have one type.
constexpr TileKernels make_tile_kernels() {
  TileKernels kernels{};
  kernels.tile = tile;
  kernels.key_block = key_block;
  kernels.pack_pairs = pack_pairs;
  kernels.packed_keys = packed_keys;
  kernels.pack_keys = pack_keys;
  kernels.forward_scratch = forward_scratch;
  kernels.forward = forward;
  kernels.backward_packed_keys = backward_packed_keys;
  kernels.backward_pack_keys = backward_pack_keys;
  kernels.backward_scratch = backward_scratch;
  kernels.backward_chunks = backward_chunks;
  kernels.backward = backward;
  kernels.side_size = side_size;
  kernels.pack_side = pack_side;
  kernels.product_scratch = product_scratch;
  kernels.multiply_sides = multiply_sides;
  kernels.sum_columns = sum_columns;
  return kernels;
}
