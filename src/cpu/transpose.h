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
