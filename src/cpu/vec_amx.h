// AVX-512 and matrix tiles of bfloat16. Included once per ISA (see vec.h, and vec_generic.h on
// what each part is for).

#include "vec_avx512.h"

// Tiles are 32 queries wide: two beside two are the blocks that keep the products fed. 64 keys
// of scores, weights and operands fill the first-level cache.
struct TileSet : Avx512 {
  static constexpr int tile_vectors = 2;
  static constexpr int64_t key_block = 64, key_step = 32;
};

#include "tiles_amx.h"
#include "tiles_emulated.h"
