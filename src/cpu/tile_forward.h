// Attention forward over bfloat16 on matrix tiles, blockwise with a running softmax as in
// attention_forward.h, queries in the lanes. Included once per ISA (see vec.h).
//
//   scores = K Q^T      A: keys as they lie, B: queries by pairs of dimensions
//   output += V^T P     A: values transposed, B: weights by pairs of keys
//
// Keys and values are packed once a head, a tile's queries once. A tile load waits for vector
// stores before it to reach the cache, so that the products of a block's weights come after
// those of the next block's scores.

struct PackedKeys {
  float* largest;  // magnitude of the head's keys
  BFloat16 *keys, *values;
};

// Numbers of bfloat16 of one head: the largest magnitude, keys, values.
MHA_INLINE int64_t packed_head(const TileForward& args) {
  const int64_t rows = packed_rows(args);
  return tile_depth + rows * (whole_steps(args.head_dim) * tile_depth +
                              ceil_div(args.value_dim, tile_rows) * tile_rows);
}

MHA_INLINE PackedKeys packed_keys_of(const TileForward& args, int64_t head) {
  auto* start = reinterpret_cast<BFloat16*>(args.packed) + head * packed_head(args);
  BFloat16* keys = start + tile_depth;
  return {reinterpret_cast<float*>(start), keys,
          keys + packed_rows(args) * whole_steps(args.head_dim) * tile_depth};
}

static int64_t packed_keys(const TileForward& args) {
  return args.batch * args.kv_heads * packed_head(args) / 2;
}

static void pack_keys(const TileForward& args, int64_t begin, int64_t end) {
  const int64_t key_width = whole_steps(args.head_dim) * tile_depth;
  const int64_t value_width = ceil_div(args.value_dim, tile_rows) * tile_rows;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t n = i / args.kv_heads, h = i % args.kv_heads;
    const PackedKeys to = packed_keys_of(args, i);
    Largest largest;
    for_each_key_step(args, [&](int64_t first, int64_t count, int64_t row) {
      for (int64_t r = 0; r < tile_depth; r += tile_rows) {
        pack_rows(tile_rows_of(args.key, n, h, first + r, max64(0, count - r), args.head_dim),
                  to.keys + (row + r) * key_width, largest);
      }
      pack_transposed(tile_rows_of(args.value, n, h, first, count, args.value_dim),
                      to.values + row * value_width);
    });
    *to.largest = largest.value();
  }
}

// One tile's state.
struct TileOfQueries {
  const TileForward& args;
  TileScores scores_of;
  PackedKeys packed;
  int64_t value_tiles;
  float* scores;      // [key][tile]
  BFloat16* weights;  // [step][vector]
  RunningSoftmax softmax;
  TileDropout dropout;
};

// What dropout leaves of the weights of keys `key` and the next.
MHA_INLINE Vec drop_pairs(const TileDropout& dropout, int64_t vector, int64_t key,
                          uint32_t threshold, Vec pairs) {
  constexpr int32_t high_half = -65536;
  const IntVec low = kept(dropout, vector, key, threshold) & ~high_half;
  const IntVec high = kept(dropout, vector, key + 1, threshold) & high_half;
  return as_float(as_int(pairs) & (low | high));
}

// weights = 4^(scores - maximum), rounded, by pairs of keys. The sum is of the rounded ones, so
// that a key that is open alone has weight 1.
template <int V, Held What, bool Drops>
static void weigh_scores(TileOfQueries& t, const KeyBlock& block) {
  const Vec minus_infinity = broadcast(-__builtin_inff());
  Vec maximum[V], sum[V];
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) {
    const Vec m = load(t.softmax.maximum + (block.first_vector + v) * lanes);
    maximum[v] = m == minus_infinity ? Vec{} : m;
    sum[v] = Vec{};
  }
  const float* row = t.scores + block.first_vector * lanes;
  for (int64_t j = 0; j < whole_rows(block); j += 2, row += 2 * tile) {
    BFloat16* pairs = t.weights +
                      (j / tile_depth * tile_vectors + block.first_vector) * tile_size +
                      j % tile_depth * 16;
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      Vec weight[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Vec score = load(row + i * tile + v * lanes);
        weight[i] = short_exp2(exponent<What>(score, t.scores_of.factor, maximum[v]));
      }
      Vec rounded = Isa::Pairs::round_to_pairs(weight[0], weight[1]);
      sum[v] += low_numbers(rounded) + high_numbers(rounded);
      if constexpr (Drops) {
        rounded = drop_pairs(t.dropout, block.first_vector + v, block.first + j,
                             t.args.dropout.threshold, rounded);
      }
      store(reinterpret_cast<float*>(pairs + v * tile_size), rounded);
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) {
    float* total = t.softmax.sum + (block.first_vector + v) * lanes;
    store(total, load(total) + sum[v]);
  }
}

template <int V>
static void multiply_keys(TileOfQueries& t, const KeyBlock& block) {
  const int64_t steps = whole_steps(t.args.head_dim);
  multiply_rows<V>(t.packed.keys + packed_row(t.args, block.first) * steps * tile_depth,
                   whole_rows(block), steps,
                   t.scores_of.packed_query + block.first_vector * tile_size,
                   t.scores + block.first_vector * lanes);
}

// The largest score of each lane, in four strands, since one would wait for itself.
template <int V>
MHA_INLINE void find_top(const float* scores, int64_t rows, Vec (&top)[V]) {
  Vec strands[4][V];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) strands[i][v] = broadcast(-__builtin_inff());
  }
  for (int64_t j = 0; j < rows; j += 4, scores += 4 * tile) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        strands[i][v] = max_drop_nan(strands[i][v], load(scores + i * tile + v * lanes));
      }
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) {
    top[v] = max_drop_nan(max_drop_nan(strands[0][v], strands[1][v]),
                          max_drop_nan(strands[2][v], strands[3][v]));
  }
}

template <int V, Held What>
MHA_INLINE void weigh_scores(TileOfQueries& t, const KeyBlock& block) {
  if (t.args.dropout.threshold) {
    weigh_scores<V, What, true>(t, block);
  } else {
    weigh_scores<V, What, false>(t, block);
  }
}

template <int V>
static void weigh_block(TileOfQueries& t, const KeyBlock& block) {
  const int64_t offset = block.first_vector * lanes;
  const Held held = finish_scores<V>(t.scores_of, block, t.scores, nullptr, false);
  // What fills up the last step has no weight.
  for (int64_t j = block.keys; j < whole_rows(block); ++j) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      store(t.scores + j * tile + offset + v * lanes, broadcast(-__builtin_inff()));
    }
  }
  Vec top[V];
  find_top<V>(t.scores + offset, whole_rows(block), top);
  if (held == Held::products) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) top[v] *= t.scores_of.factor;
  }
  raise_maximum<V>(t.softmax, t.args.value_dim, top, block.first_vector);
  if (held == Held::products) {
    weigh_scores<V, Held::products>(t, block);
  } else {
    weigh_scores<V, Held::scores>(t, block);
  }
}

template <int V>
static void multiply_values(TileOfQueries& t, const KeyBlock& block) {
  const bool starts = !t.softmax.started && V == tile_vectors;
  if (!t.softmax.started && !starts) clear_output(t.softmax, t.value_tiles * tile_rows);
  t.softmax.started = true;
  add_transposed<V>(
      t.packed.values + packed_row(t.args, block.first) * t.value_tiles * tile_rows,
      t.value_tiles, t.weights + block.first_vector * tile_size, whole_steps(block.keys),
      starts, t.softmax.output + block.first_vector * lanes);
}

static void finish_tile(TileOfQueries& t) {
  const TileForward& args = t.args;
  const QueryTile& at = t.scores_of.at;
  Vec factor[tile_vectors];
  inverse_sums(t.softmax, factor);
  for (Vec& f : factor) f *= args.dropout.factor;
  const Vec wild = write_rows(t.softmax.output, at.count, args.value_dim, factor,
                              args.output.at(at.n, at.h, at.first), args.output.t);
  if (any(wild != Vec{})) mark_not_finite(args.not_finite);
  if (!args.row_maximum) return;
  const int64_t row = first_row(args, at);
  keep_statistics(t.softmax, at.count, args.row_maximum + row, args.row_factor + row);
}

static void forward_tile(const TileForward& args, const QueryTile& at, float* scratch) {
  const int64_t kv_head = kv_head_of(args, at.h);
  TileOfQueries t{args,
                  {args, at, kv_head, args.query, args.key, {}, {}, {}, {}},
                  packed_keys_of(args, at.n * args.kv_heads + kv_head),
                  ceil_div(args.value_dim, tile_rows),
                  {},
                  {},
                  {},
                  {}};
  t.scores = scratch;
  t.weights = reinterpret_cast<BFloat16*>(t.scores + key_block * tile);
  t.softmax.output = t.scores + key_block * tile + key_block * tile / 2;
  float* query = t.softmax.output + t.value_tiles * tile_rows * tile;
  t.scores_of.packed_query = reinterpret_cast<BFloat16*>(query);
  t.scores_of.terms = query + query_tiles(args.head_dim) * tile_size / 2;
  start_scores(t.scores_of, *t.packed.largest);
  start_rows(t.softmax, args.sinks ? args.sinks + at.h : nullptr);
  if (args.dropout.threshold) {
    start_dropout(t.dropout, args.dropout.seed, first_row(args, at), at.count);
  }
  KeyBlock weighed{};
  const auto multiply_weighed = [&] {
    if (weighed.keys > 0) MHA_FOR_TILE_VECTORS(weighed.vectors, multiply_values, t, weighed);
  };
  walk_keys(args, at, [&](const KeyBlock& block) {
    MHA_FOR_TILE_VECTORS(block.vectors, multiply_keys, t, block);
    multiply_weighed();
    MHA_FOR_TILE_VECTORS(block.vectors, weigh_block, t, block);
    weighed = block;
  });
  multiply_weighed();
  if (!t.softmax.started) clear_output(t.softmax, t.value_tiles * tile_rows);
  finish_tile(t);
}

static int64_t forward_scratch(const TileForward& args) {
  const int64_t output = ceil_div(args.value_dim, tile_rows) * tile_rows * tile;
  return key_block * tile * 3 / 2 + output + query_tiles(args.head_dim) * tile_size / 2 +
         terms_size;
}

static void forward(const TileForward& args, int64_t begin, int64_t end, float* scratch) {
  Tiles::start();
  for (int64_t i = begin; i < end; ++i) {
    forward_tile(args, query_tile(args.heads, args.queries, i), scratch);
  }
  Tiles::stop();
}
