// What every CPU of the architecture has. Included once per ISA (see vec.h).

constexpr int lanes = 4;

#include "vec.h"

// What a set is tuned to and able to do. One that builds on another set's vectors derives from
// its struct, and hides what differs.
struct Generic {
  // Vectors of queries in one tile, and rows of accumulators that fill the registers beside
  // them.
  static constexpr int tile_vectors = 3, micro_rows = 4;
  // Keys of one block of attention, and of which multiple the first is: bfloat16 takes keys by
  // twos.
  static constexpr int64_t key_block = 96, key_step = 2;
  // The same for the backward's products, whose rows are as long as the head is wide.
  static constexpr int wide_rows = 6, wide_vectors = 2;
  // In decoding: vectors of each query that stay in registers while keys pass by, accumulators
  // of values, and whether those hold whole rows of 128 dimensions for two queries.
  static constexpr int held_vectors = 2, value_sums = 8;
  static constexpr bool holds_value_rows = false;
  // What multiplies bfloat16 by twos.
  using Pairs = NoPairs;
};

MHA_INLINE Vec load(const Float16* p) {
  Vec v;
  for (int i = 0; i < lanes; ++i) v[i] = to_float(p[i]);
  return v;
}
MHA_INLINE void store(Float16* p, Vec v) {
  for (int i = 0; i < lanes; ++i) p[i] = to_float16(v[i]);
}

// Whether a comparison holds in any lane.
MHA_INLINE bool any(IntVec v) {
  int32_t found = 0;
  for (int i = 0; i < lanes; ++i) found |= v[i];
  return found != 0;
}

// Writes past the caches to an aligned place, where the CPU can.
MHA_INLINE void stream(float* to, Vec v) {
  store(to, v);
}
