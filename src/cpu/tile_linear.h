// Products of whole matrices of bfloat16: linear layers and their gradients. Included once per
// ISA (see vec.h).
//
// Both sides lie packed in tiles, with zeros around, by blocks of 32 rows of the left side or
// 32 columns of the right:
//   left:  [row / 32][depth / 32][2][row % 16][depth % 32]
//   right: [column / 32][depth / 32][2][depth % 32 / 2][column % 16][depth % 2]
//
// Each sum runs over the depth step by step, whatever is computed beside it and however the
// work is split.

// Rows and columns of a block.
constexpr int64_t block_edge = 32, block_sums = block_edge * block_edge;
// Numbers that a step of 32 in depth takes of a side.
constexpr int64_t step_size = 2 * tile_size;
// Steps for which the sums of a block stay in tiles. Meanwhile so much of the right side, 16
// KiB, stays in the first-level cache, and the left side passes by from the second.
constexpr int64_t near_steps = 8;
// Steps after which the next part of the depth begins: so much of the left side, 512 KiB for
// 256 rows, stays in the second-level cache.
constexpr int64_t part_steps = 32;

// Numbers of a packed side; `count` is its rows on the left, its columns on the right.
static int64_t side_size(int64_t count, int64_t depth) {
  return ceil_div(count, block_edge) * whole_steps(depth) * step_size;
}

// Where up to 16 columns of a matrix lie in its rows.
struct ColumnPlaces {
  int64_t offset;
  __mmask16 valid;
};

template <typename T>
MHA_INLINE ColumnPlaces places_of(const TileMatrix<T>& matrix, int64_t first) {
  const int64_t count = max64(0, min64(lanes, matrix.columns - first));
  return {first / matrix.group * matrix.group_stride + first % matrix.group,
          static_cast<__mmask16>((1u << count) - 1)};
}

// Goes down the rows of a matrix.
template <typename T>
struct RowWalk {
  MHA_INLINE_MEMBER RowWalk(const TileMatrix<T>& of, int64_t first)
      : matrix(of), left(of.rows - first) {
    const int64_t sample = first / of.rows_per_sample;
    const int64_t in_sample = first - sample * of.rows_per_sample;
    left_in_sample = of.rows_per_sample - in_sample;
    at = of.data + sample * of.n + in_sample * of.t;
  }
  // Null after the last row.
  MHA_INLINE_MEMBER T* next() {
    if (--left < 0) return nullptr;
    T* const row = at;
    at += matrix.t;
    if (--left_in_sample == 0) {
      at += matrix.n - matrix.rows_per_sample * matrix.t;
      left_in_sample = matrix.rows_per_sample;
    }
    return row;
  }

  const TileMatrix<T> matrix;
  T* at;
  int64_t left, left_in_sample;
};

MHA_INLINE __m256i load_numbers(const BFloat16* row, const ColumnPlaces& places) {
  return row ? _mm256_maskz_loadu_epi16(places.valid, row + places.offset)
             : _mm256_setzero_si256();
}
MHA_INLINE __m512i load_widened(const BFloat16* row, const ColumnPlaces& places) {
  return _mm512_cvtepu16_epi32(load_numbers(row, places));
}

template <bool Transpose>
MHA_INLINE void store_tile(__m512i (&words)[16], BFloat16* to) {
  if constexpr (Transpose) transpose_words(words);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * tile_depth, words[i]);
}

// A block of 32 rows whose depth goes along them.
template <bool Transpose>
static void pack_along(const TileMatrix<const BFloat16>& matrix, int64_t first_row,
                       BFloat16* to) {
  for (int64_t c = 0; c < matrix.columns; c += tile_depth, to += step_size) {
    const ColumnPlaces first = places_of(matrix, c), second = places_of(matrix, c + lanes);
    RowWalk<const BFloat16> rows(matrix, first_row);
    for (int half = 0; half < 2; ++half) {
      __m512i words[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const BFloat16* row = rows.next();
        words[i] = __builtin_shufflevector(load_numbers(row, first), load_numbers(row, second),
                                           0, 1, 2, 3, 4, 5, 6, 7);
      }
      store_tile<Transpose>(words, to + half * tile_size);
    }
  }
}

// A block of 32 columns whose depth goes down the rows.
template <bool Transpose>
static void pack_down(const TileMatrix<const BFloat16>& matrix, int64_t first_column,
                      BFloat16* to) {
  for (int64_t r = 0; r < matrix.rows; r += tile_depth, to += step_size) {
    for (int half = 0; half < 2; ++half) {
      const ColumnPlaces places = places_of(matrix, first_column + half * lanes);
      RowWalk<const BFloat16> rows(matrix, r);
      __m512i words[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const __m512i even = load_widened(rows.next(), places);
        words[i] =
            _mm512_or_si512(even, _mm512_slli_epi32(load_widened(rows.next(), places), 16));
      }
      store_tile<Transpose>(words, to + half * tile_size);
    }
  }
}

// Packs one block of 32 rows of a left side, or of 32 columns of a right one.
static void pack_side(const TileSide& side, int64_t block, BFloat16* packed) {
  const auto& matrix = side.matrix;
  const int64_t first = block * block_edge;
  const int64_t depth = side.depth_is_rows ? matrix.rows : matrix.columns;
  const int64_t steps = side.steps > 0 ? side.steps : whole_steps(depth);
  BFloat16* to = packed + (block * steps + side.first_step) * step_size;
  if (side.depth_is_rows) {
    side.is_left ? pack_down<true>(matrix, first, to) : pack_down<false>(matrix, first, to);
  } else {
    side.is_left ? pack_along<false>(matrix, first, to) : pack_along<true>(matrix, first, to);
  }
}

// sums[32][32] (or half the rows) += a block of each side over `steps` of the depth. Meanwhile
// 256 bytes a step are fetched from `ahead` on.
template <int M>
static void add_steps(const BFloat16* left, const BFloat16* right, int64_t steps, bool begins,
                      const BFloat16* ahead, float* sums) {
  if (begins) {
    clear_sums<M, 2>();
  } else {
    load_sums<M, 2>(sums, block_edge);
  }
  for (int64_t s = 0; s < steps; ++s, left += step_size, right += step_size) {
    multiply_tiles<M, 2>(left, left + tile_size, right, right + tile_size);
    for (int line = 0; line < 4; ++line, ahead += 32) __builtin_prefetch(ahead, 0, 2);
  }
  store_sums<M, 2>(sums, block_edge);
}

// Where a block's columns go, and what is added to them.
struct BlockColumns {
  ColumnPlaces places[2];
  Vec bias[2];
};

MHA_INLINE BlockColumns block_columns(const TileProduct& product, int64_t block) {
  BlockColumns columns;
  for (int half = 0; half < 2; ++half) {
    const int64_t first = block * block_edge + half * lanes;
    const ColumnPlaces places = places_of(product.output, first);
    columns.places[half] = places;
    columns.bias[half] =
        product.bias
            ? reinterpret_cast<Vec>(_mm512_maskz_loadu_ps(places.valid, product.bias + first))
            : Vec{};
  }
  return columns;
}

// Rounds two vectors to where their columns go.
MHA_INLINE void store_rounded(BFloat16* row, const ColumnPlaces (&places)[2], Vec first,
                              Vec second) {
  const auto both = reinterpret_cast<__m512i>(Isa::Pairs::round(first, second));
  _mm256_mask_storeu_epi16(row + places[0].offset, places[0].valid,
                           __builtin_shufflevector(both, both, 0, 1, 2, 3));
  _mm256_mask_storeu_epi16(row + places[1].offset, places[1].valid,
                           __builtin_shufflevector(both, both, 4, 5, 6, 7));
}

template <bool Whole>
MHA_INLINE void finish_rows(const BlockColumns& given, RowWalk<BFloat16> rows,
                            const float* sums) {
  const BlockColumns columns = given;  // what is written could alias them
#pragma GCC unroll 4
  for (int64_t i = 0; i < block_edge; ++i, sums += block_edge) {
    BFloat16* const row = rows.next();
    if (!row) return;
    const Vec first = load(sums) + columns.bias[0];
    const Vec second = load(sums + lanes) + columns.bias[1];
    if constexpr (Whole) {
      store(reinterpret_cast<float*>(row + columns.places[0].offset),
            Isa::Pairs::round(first, second));
    } else {
      store_rounded(row, columns.places, first, second);
    }
  }
}

// Adds the bias to a block's sums, rounds them and writes them.
static void finish_block(const TileProduct& product, const BlockColumns& columns,
                         int64_t row_block, const float* sums) {
  const RowWalk<BFloat16> rows(product.output, row_block * block_edge);
  const auto &first = columns.places[0], &second = columns.places[1];
  const bool whole = second.valid == 0xffff && second.offset == first.offset + lanes;
  whole ? finish_rows<true>(columns, rows, sums) : finish_rows<false>(columns, rows, sums);
}

// Blocks of rows with one block of columns, over steps [begin, end) of the depth.
static void add_blocks(const TileProduct& product, const TileBlocks& blocks, int64_t column,
                       int64_t begin, int64_t end, float* sums) {
  const int64_t steps = whole_steps(product.depth);
  const BFloat16* right = product.right + (column * steps + begin) * step_size;
  // What is read of the right side next, a part of it with each block of rows.
  const BFloat16* ahead = right + (end - begin) * step_size;
  const bool ends = end == steps;
  const BlockColumns columns = block_columns(product, column);
  for (int64_t row = blocks.row_begin; row < blocks.row_end; ++row) {
    const BFloat16* left = product.left + (row * steps + begin) * step_size;
    if (product.output.rows - row * block_edge > tile_rows) {
      add_steps<2>(left, right, end - begin, begin == 0, ahead, sums);
    } else {
      add_steps<1>(left, right, end - begin, begin == 0, ahead, sums);
    }
    ahead += (end - begin) * 128;
    // One block late: what tiles store is not at hand at once, and meanwhile they go on.
    if (ends && row > blocks.row_begin) {
      finish_block(product, columns, row - 1, sums - block_sums);
    }
    sums += block_sums;
  }
  if (ends) finish_block(product, columns, blocks.row_end - 1, sums - block_sums);
}

// Calls part(begin, end) for even parts of [begin, end), which has at least one.
template <typename Part>
MHA_INLINE void in_even_parts(int64_t begin, int64_t end, int64_t most, const Part& part) {
  const int64_t parts = ceil_div(end - begin, most);
  const int64_t size = ceil_div(end - begin, parts);
  for (; begin < end; begin += size) part(begin, min64(begin + size, end));
}

// Floats between the sums of one block of columns and the next. In one part of the depth, each
// is finished before the next begins.
MHA_INLINE int64_t sums_apart(int64_t depth, const TileBlocks& blocks) {
  return whole_steps(depth) > part_steps ? (blocks.row_end - blocks.row_begin) * block_sums : 0;
}

static int64_t product_scratch(int64_t depth, const TileBlocks& blocks) {
  return (blocks.row_end - blocks.row_begin) * block_sums +
         sums_apart(depth, blocks) * (blocks.column_end - blocks.column_begin - 1);
}

static void multiply_sides(const TileProduct& product, const TileBlocks& blocks,
                           float* scratch) {
  const int64_t apart = sums_apart(product.depth, blocks);
  Tiles::start();
  in_even_parts(0, whole_steps(product.depth), part_steps, [&](int64_t begin, int64_t end) {
    for (int64_t column = blocks.column_begin; column < blocks.column_end; ++column) {
      float* sums = scratch + (column - blocks.column_begin) * apart;
      in_even_parts(begin, end, near_steps, [&](int64_t from, int64_t to) {
        add_blocks(product, blocks, column, from, to, sums);
      });
    }
  });
  Tiles::stop();
}

// sums[c] = the sum of column c over all rows, for one block of 32 columns: in float32, rounded
// once. By parts of 256 rows, since one running sum would round as often as there are rows.
static void sum_columns(const TileMatrix<const BFloat16>& matrix, int64_t block,
                        BFloat16* sums) {
  constexpr int64_t part_rows = 256;
  const int64_t first = block * block_edge;
  const ColumnPlaces from[2] = {places_of(matrix, first), places_of(matrix, first + lanes)};
  RowWalk<const BFloat16> rows(matrix, 0);
  Vec total[2] = {};
  for (int64_t r = 0; r < matrix.rows; r += part_rows) {
    Vec part[4][2] = {};  // four, since one would wait for itself
    for (int64_t i = r; i < min64(r + part_rows, matrix.rows); i += 4) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const BFloat16* row = rows.next();
        for (int half = 0; half < 2; ++half) {
          part[k][half] +=
              reinterpret_cast<Vec>(_mm512_slli_epi32(load_widened(row, from[half]), 16));
        }
      }
    }
    for (int half = 0; half < 2; ++half) {
      total[half] += (part[0][half] + part[1][half]) + (part[2][half] + part[3][half]);
    }
  }
  const ColumnPlaces to[2] = {{first, from[0].valid}, {first + lanes, from[1].valid}};
  store_rounded(sums, to, total[0], total[1]);
}
