// The product that everything else is made of. Included once per ISA (see vec.h).

// Queries of one tile.
constexpr int tile_vectors = Isa::tile_vectors;
constexpr int tile = tile_vectors * lanes;
constexpr int micro_rows = Isa::micro_rows;

// Keys that one block of attention takes, and of which multiple the first of each is, but for
// the extra keys.
constexpr int64_t key_block = Isa::key_block;
constexpr int64_t key_step = Isa::key_step;

// What `multiply_add` sums: products of floats, or `Isa::Pairs` of two bfloat16 in each of
// their places.
struct Floats {
  static constexpr bool pairs = false;
  MHA_INLINE_MEMBER static Vec add_product(Vec sum, Vec x, Vec y) { return sum + x * y; }
};

// c[m][v] += sum over k of a[m * a_m + k * a_k] * b[k * b_k + v * lanes ..]: a is broadcast
// from any stride, b is read as it lies.
template <int M, int V, typename Of = Floats>
MHA_INLINE void multiply_add(int64_t depth, const float* a, int64_t a_m, int64_t a_k,
                             const float* b, int64_t b_k, Vec (&c)[M][V]) {
  static_assert(V <= 4);
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; ++k) {
    // Scalars, not an array: an array element would be spilled around the pin.
    Vec b0 = load(b), b1 = {}, b2 = {}, b3 = {};
    MHA_PIN(b0);
    if constexpr (V > 1) {
      b1 = load(b + lanes);
      MHA_PIN(b1);
    }
    if constexpr (V > 2) {
      b2 = load(b + 2 * lanes);
      MHA_PIN(b2);
    }
    if constexpr (V > 3) {
      b3 = load(b + 3 * lanes);
      MHA_PIN(b3);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vec x = broadcast(a[m * a_m]);
      c[m][0] = Of::add_product(c[m][0], x, b0);
      if constexpr (V > 1) c[m][1] = Of::add_product(c[m][1], x, b1);
      if constexpr (V > 2) c[m][2] = Of::add_product(c[m][2], x, b2);
      if constexpr (V > 3) c[m][3] = Of::add_product(c[m][3], x, b3);
    }
    a += a_k;
    b += b_k;
  }
}

// c[m][v] of a row-major matrix, to start or end a sum.
template <int M, int V>
MHA_INLINE void load_block(const float* from, int64_t stride, Vec (&c)[M][V]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) c[m][v] = load(from + m * stride + v * lanes);
  }
}

template <int M, int V>
MHA_INLINE void store_block(float* to, int64_t stride, const Vec (&c)[M][V]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(to + m * stride + v * lanes, c[m][v]);
  }
}

// Adds c to a row-major matrix. A long sum is made of sums of blocks, for which c starts at
// zero: one running sum would round as often as there are terms.
template <int M, int V>
MHA_INLINE void add_block(const Vec (&c)[M][V], float* to, int64_t stride) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* place = to + m * stride + v * lanes;
      store(place, load(place) + c[m][v]);
    }
  }
}

// Calls rows(integral_constant<int, M>, first) for [0, count) in steps of M rows, large steps
// first.
template <typename Rows>
MHA_INLINE void for_each_rows(int64_t count, const Rows& rows) {
  int64_t i = 0;
  for (; i + micro_rows <= count; i += micro_rows) {
    rows(std::integral_constant<int, micro_rows>{}, i);
  }
  if constexpr (micro_rows > 4) {
    for (; i + 4 <= count; i += 4) rows(std::integral_constant<int, 4>{}, i);
  }
  for (; i + 2 <= count; i += 2) rows(std::integral_constant<int, 2>{}, i);
  for (; i < count; ++i) rows(std::integral_constant<int, 1>{}, i);
}

// Calls finish(j, v, c) with the product rows[j] . columns[lane] for every key j and vector v.
template <int V, typename Finish>
MHA_INLINE void for_each_score(const float* rows, int64_t stride, int64_t keys, int64_t depth,
                               const float* columns, const Finish& finish) {
  int64_t j = 0;
  for (; j + micro_rows <= keys; j += micro_rows) {
    Vec c[micro_rows][V] = {};
    multiply_add<micro_rows, V>(depth, rows + j * stride, stride, 1, columns, tile, c);
#pragma GCC unroll 8
    for (int m = 0; m < micro_rows; ++m) {
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) finish(j + m, v, c[m][v]);
    }
  }
  for (; j < keys; ++j) {
    Vec c[1][V] = {};
    multiply_add<1, V>(depth, rows + j * stride, stride, 1, columns, tile, c);
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) finish(j, v, c[0][v]);
  }
}
