// The two products of decoding, for a few queries that share keys and values. Included once per
// ISA (see vec.h).
//
// The time goes into reading keys and values from memory, and memory is read at full speed only
// line after line. So scores take one key at a time with several queries, and values whole rows
// with two; where the rest of the queries come, they find the rows in the cache.

constexpr int64_t decode_chunk = 512;

// A place of a row holds a float, or a pair of bfloat16 as they lie.
template <typename Of, typename Element>
MHA_INLINE Vec load_places(const Element* row, int64_t place) {
  if constexpr (Of::pairs) {
    return load(reinterpret_cast<const float*>(row) + place);
  } else {
    return load(row + place);
  }
}

// The last places, fewer than a vector, and zeros.
template <typename Of, typename Element>
MHA_INLINE Vec load_rest(const Element* row, int64_t place, int64_t places) {
  float rest[lanes] = {};
  for (int64_t p = place; p < places; ++p) {
    if constexpr (Of::pairs) {
      __builtin_memcpy(rest + p - place, row + 2 * p, sizeof(float));
    } else {
      rest[p - place] = to_float(row[p]);
    }
  }
  return load(rest);
}

template <typename Of, int R>
MHA_INLINE void add_products(const Vec (&query)[R], Vec key, Vec (&c)[R]) {
  if constexpr (R > 1) MHA_PIN(key);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) c[r] = Of::add_product(c[r], query[r], key);
}

template <int R>
MHA_INLINE void load_queries(const float* queries, Vec (&query)[R]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) query[r] = load(queries + r * lanes);
}

// scores[r * decode_chunk + j] of R queries against `count` keys. Queries lie vector by vector,
// [ceil(places / lanes)][R][lanes], with zeros at the end. The common numbers of places are
// known to the compiler as `Places`; then what fits of the queries stays in registers, since
// loads are what this loop is short of.
template <typename Of, int R, int Places, typename Element>
MHA_APART void score_keys(const float* queries, const Element* key, int64_t stride,
                          int64_t count, int64_t places, float* scores) {
  constexpr int keys = lanes / R, vectors = Places / lanes;
  constexpr int held = vectors < Isa::held_vectors ? vectors : Isa::held_vectors;
  Vec query[held + 1][R];
#pragma GCC unroll 4
  for (int v = 0; v < held; ++v) {
    load_queries(queries + v * R * lanes, query[v]);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) MHA_PIN(query[v][r]);
  }
  for (int64_t j = 0; j < count; j += keys) {
    Vec products[lanes];  // of key i with query r at i * R + r
#pragma GCC unroll 1
    for (int64_t i = 0; i < keys; ++i) {
      Vec c[R] = {};
#pragma GCC unroll 4
      for (int v = 0; v < held; ++v) {
        add_products<Of>(query[v], load_places<Of>(key, v * lanes), c);
      }
#pragma GCC unroll 16
      for (int v = held; v < vectors; ++v) {
        load_queries(queries + v * R * lanes, query[held]);
        add_products<Of>(query[held], load_places<Of>(key, v * lanes), c);
      }
      if constexpr (Places == 0) {
        int64_t p = 0;
#pragma GCC unroll 1
        for (; p + lanes <= places; p += lanes) {
          load_queries(queries + p * R, query[held]);
          add_products<Of>(query[held], load_places<Of>(key, p), c);
        }
        if (p < places) {
          load_queries(queries + p * R, query[held]);
          add_products<Of>(query[held], load_rest<Of>(key, p, places), c);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) products[i * R + r] = c[r];
      if (j + i + 1 < count) key += stride;  // what comes after the last is not used
    }
    Vec sums[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) sums[i] = products[i % keys * R + i / keys];
    add_across<lanes / 2>(sums);
    float found[lanes];
    store(found, sums[0]);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      __builtin_memcpy(scores + r * decode_chunk + j, found + r * keys, keys * sizeof(float));
    }
  }
}

// output[m][d] += sum of weights[m][j] * value[j][d] for M rows and V vectors of dimensions.
template <int M, int V, typename Element>
MHA_INLINE void add_values(const float* weights, const Element* value, int64_t stride,
                           int64_t keys, float* output, int64_t output_stride) {
  Vec c[M][V] = {};
  for (int64_t j = 0; j < keys; ++j, value += stride) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      Vec b = load(value + v * lanes);
      if constexpr (M > 1) MHA_PIN(b);
      // Parts of rows, which the CPU does not see coming.
      if constexpr (M > 2 || !Isa::holds_value_rows) {
        constexpr int64_t ahead = 64;
        if (v * lanes * sizeof(Element) % 64 == 0) {
          __builtin_prefetch(value + v * lanes + ahead * stride, 0, 2);
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) c[m][v] += weights[m * decode_chunk + j] * b;
    }
  }
  add_block(c, output, output_stride);
}

// Rows of weights that one pass over the values serves: two where the registers hold whole
// rows for them, so that memory is read line after line. Else four, on parts of rows.
template <typename Of, typename Element>
constexpr bool whole_rows = Isa::holds_value_rows &&
                            (Of::pairs || std::is_same_v<Element, float>);
template <typename Of, typename Element>
constexpr int rows_together = whole_rows<Of, Element> ? 2 : 4;

// All dimensions for M rows.
template <int M, typename Element>
MHA_INLINE void add_float_rows(const float* weights, const Element* value, int64_t stride,
                               int64_t keys, int64_t dim, float* output,
                               int64_t output_stride) {
  constexpr int wide = M == 1 ? 8 : Isa::value_sums / M;
  int64_t d = 0;
  for (; d + wide * lanes <= dim; d += wide * lanes) {
    add_values<M, wide>(weights, value + d, stride, keys, output + d, output_stride);
  }
  for (; d + lanes <= dim; d += lanes) {
    add_values<M, 1>(weights, value + d, stride, keys, output + d, output_stride);
  }
  for (; d < dim; ++d) {
    for (int m = 0; m < M; ++m) {
      for (int64_t j = 0; j < keys; ++j) {
        output[m * output_stride + d] +=
            weights[m * decode_chunk + j] * to_float(value[j * stride + d]);
      }
    }
  }
}

// The same for keys by twos, whose weights are pairs, and V double vectors. The rows of two
// keys are put side by side within quarters of a vector; the end puts those in order.
template <typename Of, int M, int V>
MHA_INLINE void add_value_pairs(const float* weights, const BFloat16* value, int64_t stride,
                                int64_t keys, float* output, int64_t output_stride) {
  Vec c[M][2 * V] = {};
  for (int64_t j = 0; j < keys; j += 2, value += 2 * stride) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      Vec a = load_places<Of>(value, v * lanes);
      Vec b = j + 1 < keys ? load_places<Of>(value + stride, v * lanes) : Vec{};
      Of::pair_quarters(a, b);
#pragma GCC unroll 2
      for (int m = 0; m < M; ++m) {
        const Vec w = broadcast(weights[m * decode_chunk + j / 2]);
        c[m][2 * v] = Of::add_product(c[m][2 * v], w, a);
        c[m][2 * v + 1] = Of::add_product(c[m][2 * v + 1], w, b);
      }
    }
  }
#pragma GCC unroll 2
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) Of::order_quarters(c[m][2 * v], c[m][2 * v + 1]);
  }
  add_block(c, output, output_stride);
}

template <typename Of, int M>
MHA_INLINE void add_paired_rows(const float* weights, const BFloat16* value, int64_t stride,
                                int64_t keys, int64_t dim, float* output,
                                int64_t output_stride) {
  constexpr int wide = 4;
  int64_t d = 0;
  for (; d + wide * 2 * lanes <= dim; d += wide * 2 * lanes) {
    add_value_pairs<Of, M, wide>(weights, value + d, stride, keys, output + d, output_stride);
  }
  for (; d < dim; d += 2 * lanes) {
    add_value_pairs<Of, M, 1>(weights, value + d, stride, keys, output + d, output_stride);
  }
}

template <typename Of, int M, typename Element>
MHA_APART void add_value_rows(const float* weights, const Element* value, int64_t stride,
                              int64_t keys, int64_t dim, float* output, int64_t output_stride) {
  if constexpr (Of::pairs) {
    add_paired_rows<Of, M>(weights, value, stride, keys, dim, output, output_stride);
  } else {
    add_float_rows<M>(weights, value, stride, keys, dim, output, output_stride);
  }
}

// Whether a chunk of bfloat16 can be multiplied in pairs.
MHA_INLINE bool can_dot_chunks(const AttentionForward& args) {
  return args.query_is_bfloat16 && args.head_dim % 2 == 0 &&
         args.value_dim % (2 * lanes) == 0 && Isa::Pairs::can_run();
}

// Rounds a chunk's weights to bfloat16, two in a place.
template <typename Of>
MHA_INLINE void pair_weights(float* weights) {
  for (int64_t j = 0; j < decode_chunk; j += 2 * lanes) {
    store(weights + j / 2, Of::round(load(weights + j), load(weights + j + lanes)));
  }
}
