// Register transposes between rows and tiles. Included once per ISA (see vec.h).

template <int Step, size_t... I>
MHA_INLINE void swap_blocks(Vec& a, Vec& b, std::index_sequence<I...>) {
  const Vec low = __builtin_shufflevector(a, b, ((I & Step) ? lanes + I - Step : I)...);
  const Vec high = __builtin_shufflevector(a, b, ((I & Step) ? lanes + I : I + Step)...);
  a = low;
  b = high;
}

template <int Step>
MHA_INLINE void transpose_step(Vec (&r)[lanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) {
    if (!(i & Step)) swap_blocks<Step>(r[i], r[i + Step], std::make_index_sequence<lanes>{});
  }
  if constexpr (Step > 1) transpose_step<Step / 2>(r);
}

// sums[0] lane i becomes the sum of all lanes of sums[i].
template <int Step>
MHA_INLINE void add_across(Vec (&sums)[lanes]) {
#pragma GCC unroll 8
  for (int i = 0; i < Step; ++i) {
    swap_blocks<Step>(sums[i], sums[i + Step], std::make_index_sequence<lanes>{});
    sums[i] += sums[i + Step];
  }
  if constexpr (Step > 1) add_across<Step / 2>(sums);
}

// lanes x lanes floats from rows of `from`, times `factor`, to rows of `to`; zeros stand for
// the rows from `rows` on, which need not exist.
MHA_INLINE void transpose_block(const float* from, int64_t from_stride, int64_t rows, float* to,
                                int64_t to_stride, float factor) {
  Vec r[lanes];
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) {
    r[i] = i < rows ? load(from + i * from_stride) * factor : Vec{};
  }
  transpose_step<lanes / 2>(r);
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) store(to + i * to_stride, r[i]);
}

// to[c * to_stride + r] = factor * from[r * from_stride + c] for `rows` x `columns`; rows of
// `to` are whole vectors, with zeros after `rows`.
static void transpose_in(const float* from, int64_t from_stride, int64_t rows, int64_t columns,
                         float factor, float* to, int64_t to_stride) {
  const int64_t whole = columns - columns % lanes;
  for (int64_t r = 0; r < rows; r += lanes) {
    const int64_t count = min64(lanes, rows - r);
    const float* first = from + r * from_stride;
    for (int64_t c = 0; c < whole; c += lanes) {
      transpose_block(first + c, from_stride, count, to + c * to_stride + r, to_stride, factor);
    }
    for (int64_t c = whole; c < columns; ++c) {
      for (int64_t i = 0; i < lanes; ++i) {
        to[c * to_stride + r + i] = i < count ? factor * first[i * from_stride + c] : 0.0f;
      }
    }
  }
}

// The way back: to[r * to_stride + c] = factor[r] * from[c * from_stride + r]; rows of `from`
// are whole vectors. Gives NaN in a lane that held an infinity or NaN, perhaps of no row.
static Vec transpose_out(const float* from, int64_t from_stride, int64_t rows, int64_t columns,
                         const Vec* factor, float* to, int64_t to_stride) {
  const int64_t whole = columns - columns % lanes;
  Vec wild[2] = {};  // two, since one sum would wait for itself
  for (int64_t r = 0; r < rows; r += lanes) {
    const int64_t count = min64(lanes, rows - r);
    const Vec f = factor[r / lanes];
    for (int64_t c = 0; c < whole; c += lanes) {
      Vec block[lanes];
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) {
        block[i] = load(from + (c + i) * from_stride + r) * f;
        wild[i % 2] += block[i] * 0.0f;
      }
      transpose_step<lanes / 2>(block);
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) {
        if (i < count) store(to + (r + i) * to_stride + c, block[i]);
      }
    }
    for (int64_t c = whole; c < columns; ++c) {
      const Vec column = load(from + c * from_stride + r) * f;
      wild[0] += column * 0.0f;
      for (int64_t i = 0; i < count; ++i) to[(r + i) * to_stride + c] = column[i];
    }
  }
  return wild[0] + wild[1];
}

// to[c * to_stride + r] = from[r * from_stride + c] for `rows` x `columns`.
static void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns,
                      float* to, int64_t to_stride) {
  const int64_t whole_rows = rows - rows % lanes, whole_columns = columns - columns % lanes;
  for (int64_t r = 0; r < whole_rows; r += lanes) {
    for (int64_t c = 0; c < whole_columns; c += lanes) {
      transpose_block(from + r * from_stride + c, from_stride, lanes, to + c * to_stride + r,
                      to_stride, 1.0f);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t first = r < whole_rows ? whole_columns : 0;
    for (int64_t c = first; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
  }
}
