// The products that attention on tiles is made of: blocks of 2 x 2 tiles, whose four loads keep
// up with their four products. Operands lie as tile_pack.h leaves them. Included once per ISA
// (see vec.h).
//
// Tiles 0 to 3 are the sums, 4 and 5 are A's, 6 and 7 B's.

using Tiles = Isa::Tiles;

constexpr int64_t tile_row = 64;  // bytes

// sum(0, 0) += A0 B0 and so on, for M tiles of A and V of B.
template <int M, int V>
MHA_INLINE void multiply_tiles(const BFloat16* a0, const BFloat16* a1, const BFloat16* b0,
                               const BFloat16* b1) {
  Tiles::load<4>(a0, tile_row);
  Tiles::load<6>(b0, tile_row);
  Tiles::multiply_add<0, 4, 6>();
  if constexpr (V > 1) {
    Tiles::load<7>(b1, tile_row);
    Tiles::multiply_add<1, 4, 7>();
  }
  if constexpr (M > 1) {
    Tiles::load<5>(a1, tile_row);
    Tiles::multiply_add<2, 5, 6>();
    if constexpr (V > 1) Tiles::multiply_add<3, 5, 7>();
  }
}

template <int M, int V>
MHA_INLINE void clear_sums() {
  Tiles::zero<0>();
  if constexpr (V > 1) Tiles::zero<1>();
  if constexpr (M > 1) Tiles::zero<2>();
  if constexpr (M > 1 && V > 1) Tiles::zero<3>();
}

// Rows of `to` are `stride` floats apart.
template <int M, int V>
MHA_INLINE void load_sums(const float* from, int64_t stride) {
  Tiles::load<0>(from, stride * 4);
  if constexpr (V > 1) Tiles::load<1>(from + 16, stride * 4);
  if constexpr (M > 1) Tiles::load<2>(from + 16 * stride, stride * 4);
  if constexpr (M > 1 && V > 1) Tiles::load<3>(from + 16 * stride + 16, stride * 4);
}

template <int M, int V>
MHA_INLINE void store_sums(float* to, int64_t stride) {
  Tiles::store<0>(to, stride * 4);
  if constexpr (V > 1) Tiles::store<1>(to + 16, stride * 4);
  if constexpr (M > 1) Tiles::store<2>(to + 16 * stride, stride * 4);
  if constexpr (M > 1 && V > 1) Tiles::store<3>(to + 16 * stride + 16, stride * 4);
}

// products[row][tile] = A B: `rows`, a multiple of 32, of A at [16 rows][step], and V vectors
// of lanes of B at [step][vector].
template <int V>
static void multiply_rows(const BFloat16* a, int64_t rows, int64_t steps, const BFloat16* b,
                          float* products) {
  constexpr int64_t b_step = tile_vectors * tile_size;
  for (int64_t r = 0; r < rows; r += 32, a += 2 * steps * tile_size) {
    clear_sums<2, V>();
    for (int64_t s = 0; s < steps; ++s) {
      const BFloat16* a0 = a + s * tile_size;
      multiply_tiles<2, V>(a0, a0 + steps * tile_size, b + s * b_step,
                           b + s * b_step + tile_size);
    }
    store_sums<2, V>(products + r * tile, tile);
  }
}

template <int M, int V>
MHA_INLINE void add_transposed_rows(const BFloat16* a, int64_t a_step, const BFloat16* b,
                                    int64_t steps, bool starts, float* sums) {
  constexpr int64_t b_step = tile_vectors * tile_size;
  if (starts) {
    clear_sums<M, V>();
  } else {
    load_sums<M, V>(sums, tile);
  }
  for (int64_t s = 0; s < steps; ++s) {
    const BFloat16 *a0 = a + s * a_step, *b0 = b + s * b_step;
    multiply_tiles<M, V>(a0, a0 + tile_size, b0, b0 + tile_size);
  }
  store_sums<M, V>(sums, tile);
}

// sums[row][tile] += A B over `steps` of the depth: A, transposed, at [step][16 rows], and V
// vectors of lanes of B at [step][vector].
template <int V>
static void add_transposed(const BFloat16* a, int64_t row_tiles, const BFloat16* b,
                           int64_t steps, bool starts, float* sums) {
  const int64_t a_step = row_tiles * tile_size;
  int64_t r = 0;
  for (; r + 2 <= row_tiles; r += 2) {
    add_transposed_rows<2, V>(a + r * tile_size, a_step, b, steps, starts,
                              sums + r * 16 * tile);
  }
  if (r < row_tiles) {
    add_transposed_rows<1, V>(a + r * tile_size, a_step, b, steps, starts,
                              sums + r * 16 * tile);
  }
}

template <int V>
MHA_INLINE void add_outer_columns(const BFloat16* a, const BFloat16* b, float* sums,
                                  int64_t stride) {
  load_sums<2, V>(sums, stride);
  multiply_tiles<2, V>(a, a + tile_size, b, b + tile_size);
  store_sums<2, V>(sums, stride);
}

// sums[row][column] += A B over one step of the depth: `rows`, a multiple of 32, of A at
// [16 rows], and B at [16 columns].
static void add_outer(const BFloat16* a, int64_t rows, const BFloat16* b, int64_t column_tiles,
                      float* sums, int64_t stride) {
  for (int64_t r = 0; r < rows; r += 32, a += 2 * tile_size, sums += 32 * stride) {
    int64_t c = 0;
    for (; c + 2 <= column_tiles; c += 2) {
      add_outer_columns<2>(a, b + c * tile_size, sums + c * 16, stride);
    }
    if (c < column_tiles) add_outer_columns<1>(a, b + c * tile_size, sums + c * 16, stride);
  }
}
