// Rows of bfloat16 in the order in which tiles read them: whole tiles, 1 kB each, one after the
// other, since rows 2,048 or 4,096 bytes apart share one set of the first-level cache. Zeros
// stand for what does not exist. Included once per ISA (see vec.h).
//
// A product C += A B takes A as 16 rows of 32 numbers, and B as 16 rows of 16 pairs: row k of B
// holds numbers 2k and 2k + 1 of the depth side by side, for each of 16 columns.

// Numbers of a tile, and those of them along the depth.
constexpr int64_t tile_size = 512, tile_depth = 32, tile_rows = 16;

MHA_INLINE int64_t whole_steps(int64_t count) {
  return ceil_div(count, tile_depth);
}

// Row `index` of `count` rows, of which those that do not exist are zero: its numbers from
// `column` on.
struct TileRows {
  const BFloat16* data;
  int64_t stride, count, columns;

  MHA_INLINE_MEMBER __m512i words(int64_t index, int64_t column) const {
    if (index >= count) return _mm512_setzero_si512();
    const int64_t left = columns - column;
    const __mmask32 valid = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    return _mm512_maskz_loadu_epi16(valid, data + index * stride + column);
  }
  // 16 of them, widened to words.
  MHA_INLINE_MEMBER __m512i numbers(int64_t index, int64_t column) const {
    if (index >= count) return _mm512_setzero_si512();
    const int64_t left = columns - column;
    const auto valid = static_cast<__mmask16>(left >= 16 ? 0xffffu : (1u << left) - 1);
    return _mm512_cvtepu16_epi32(
        _mm256_maskz_loadu_epi16(valid, data + index * stride + column));
  }
  // Numbers of rows 2 `pair` and 2 `pair` + 1 side by side, for 16 columns.
  MHA_INLINE_MEMBER __m512i paired(int64_t pair, int64_t column) const {
    return _mm512_or_si512(numbers(2 * pair, column),
                           _mm512_slli_epi32(numbers(2 * pair + 1, column), 16));
  }
};

MHA_INLINE TileRows tile_rows_of(const StoredRows& rows, int64_t n, int64_t h, int64_t first,
                                 int64_t count, int64_t columns) {
  return {rows.at<BFloat16>(n, h, first), rows.t, count, columns};
}

// The largest magnitude of what passed by; infinite or NaN if something was.
struct Largest {
  __m512i magnitudes = _mm512_setzero_si512();

  MHA_INLINE_MEMBER void add(__m512i numbers) {
    const __m512i magnitude = _mm512_and_si512(numbers, _mm512_set1_epi16(0x7fff));
    magnitudes = _mm512_max_epu16(magnitudes, magnitude);
  }
  float value() const {
    uint16_t each[32];
    _mm512_storeu_si512(each, magnitudes);
    uint16_t most = 0;
    for (const uint16_t magnitude : each) most = magnitude > most ? magnitude : most;
    return float_of_bits(static_cast<uint32_t>(most) << 16);
  }
};

// A, of 16 rows: [step of 32 columns][16][32].
static void pack_rows(const TileRows& rows, BFloat16* to, Largest& largest) {
  for (int64_t c = 0; c < rows.columns; c += tile_depth) {
    for (int64_t i = 0; i < tile_rows; ++i, to += tile_depth) {
      const __m512i numbers = rows.words(i, c);
      largest.add(numbers);
      _mm512_store_si512(to, numbers);
    }
  }
}

MHA_INLINE void transpose_words(__m512i (&words)[16]) {
  Vec r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = reinterpret_cast<Vec>(words[i]);
  transpose_step<8>(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) words[i] = reinterpret_cast<__m512i>(r[i]);
}

// B, of up to 16 rows that become its columns: [step of 32][16 pairs][16], the steps
// `step_size` numbers apart. The signs of `flip` are turned.
static void pack_columns(const TileRows& rows, __m512i flip, BFloat16* to, int64_t step_size,
                         Largest& largest) {
  for (int64_t c = 0; c < rows.columns; c += tile_depth, to += step_size) {
    __m512i words[16];
    for (int i = 0; i < 16; ++i) {
      words[i] = rows.words(i, c);
      largest.add(words[i]);
    }
    transpose_words(words);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      _mm512_store_si512(to + i * tile_depth, _mm512_xor_si512(words[i], flip));
    }
  }
}

// B, of 32 rows that are its depth: [16 columns][16 pairs][16].
static void pack_depth(const TileRows& rows, BFloat16* to) {
  for (int64_t c = 0; c < rows.columns; c += tile_rows) {
    for (int64_t p = 0; p < 16; ++p, to += tile_depth) {
      _mm512_store_si512(to, rows.paired(p, c));
    }
  }
}

// A, of 32 rows that are its depth: [16 columns][16][32].
static void pack_transposed(const TileRows& rows, BFloat16* to) {
  for (int64_t c = 0; c < rows.columns; c += tile_rows) {
    __m512i words[16];
    for (int p = 0; p < 16; ++p) words[p] = rows.paired(p, c);
    transpose_words(words);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i, to += tile_depth) _mm512_store_si512(to, words[i]);
  }
}

// Writes `count` rows of `columns` numbers, times the lane's factor, from from[column][tile].
// Gives NaN in a lane that held an infinity or NaN, perhaps of no row.
static Vec write_rows(const float* from, int64_t count, int64_t columns,
                      const Vec (&factor)[tile_vectors], BFloat16* to, int64_t stride) {
  Vec wild = {};
  for (int64_t r = 0; r < count; r += lanes) {
    const int64_t rows = min64(lanes, count - r);
    for (int64_t c = 0; c < columns; c += lanes) {
      Vec block[lanes];
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) {
        block[i] = load(from + (c + i) * tile + r) * factor[r / lanes];
        wild += block[i] * 0.0f;
      }
      transpose_step<lanes / 2>(block);
      const int64_t left = columns - c;
      const auto valid = static_cast<__mmask16>(left >= 16 ? 0xffffu : (1u << left) - 1);
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) {
        if (i >= rows) continue;
        const auto rounded = reinterpret_cast<__m512i>(Isa::Pairs::round(block[i], block[i]));
        _mm256_mask_storeu_epi16(to + (r + i) * stride + c, valid,
                                 _mm512_castsi512_si256(rounded));
      }
    }
  }
  return wild;
}
