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

// lanes x lanes floats from rows of `from` to rows of `to`, all lanes valid.
MHA_INLINE void transpose_block(const float* from, int64_t from_stride, float* to,
                                int64_t to_stride) {
  Vec r[lanes];
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) r[i] = load(from + i * from_stride);
  transpose_step<lanes / 2>(r);
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) store(to + i * to_stride, r[i]);
}

// The same, with `rows` <= lanes rows of `from` that exist; zeros stand for the others.
MHA_INLINE void transpose_some(const float* from, int64_t from_stride, int64_t rows, float* to,
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
      transpose_some(first + c, from_stride, count, to + c * to_stride + r, to_stride, factor);
    }
    for (int64_t c = whole; c < columns; ++c) {
      for (int64_t i = 0; i < lanes; ++i) {
        to[c * to_stride + r + i] = i < count ? factor * first[i * from_stride + c] : 0.0f;
      }
    }
  }
}

// The way back: to[r * to_stride + c] = factor[r] * from[c * from_stride + r]; rows of `from`
// are whole vectors.
static void transpose_out(const float* from, int64_t from_stride, int64_t rows, int64_t columns,
                          const Vec* factor, float* to, int64_t to_stride) {
  const int64_t whole = columns - columns % lanes;
  for (int64_t r = 0; r < rows; r += lanes) {
    const int64_t count = min64(lanes, rows - r);
    const Vec f = factor[r / lanes];
    for (int64_t c = 0; c < whole; c += lanes) {
      Vec block[lanes];
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) block[i] = load(from + (c + i) * from_stride + r) * f;
      transpose_step<lanes / 2>(block);
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) {
        if (i < count) store(to + (r + i) * to_stride + c, block[i]);
      }
    }
    for (int64_t c = whole; c < columns; ++c) {
      const Vec column = load(from + c * from_stride + r) * f;
      for (int64_t i = 0; i < count; ++i) to[(r + i) * to_stride + c] = column[i];
    }
  }
}

// to[c * to_stride + r] = from[r * from_stride + c] for `rows` x `columns`.
static void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns,
                      float* to, int64_t to_stride) {
  const int64_t whole_rows = rows - rows % lanes, whole_columns = columns - columns % lanes;
  for (int64_t r = 0; r < whole_rows; r += lanes) {
    for (int64_t c = 0; c < whole_columns; c += lanes) {
      transpose_block(from + r * from_stride + c, from_stride, to + c * to_stride + r,
                      to_stride);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t first = r < whole_rows ? whole_columns : 0;
    for (int64_t c = first; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
  }
}
