// Keys and values packed for the backward on matrix tiles, and what it does with one block of
// them, pass by pass (see tile_backward.h). Included once per ISA (see vec.h).

// Up to so many keys that a tile sees, their weights and gradients are kept.
constexpr int64_t few_keys = 256;

MHA_INLINE int64_t column_tiles(int64_t dim) {
  return ceil_div(dim, tile_rows);
}

// Keys of weights and grad_scores: a tile that sees few keys keeps them all, else there is one
// block. The extra keys follow, in whole steps.
MHA_INLINE int64_t kept_keys(const TileBackward& args) {
  return few_keys + whole_steps(args.keys - args.mask.keys) * tile_depth;
}

// A key/value head's keys and values, in the order in which tiles read them.
struct BackwardKeys {
  float* largest;  // magnitude of the keys
  BFloat16 *keys, *transposed, *values;
};

MHA_INLINE int64_t backward_head(const TileBackward& args) {
  const int64_t columns =
      (whole_steps(args.head_dim) + whole_steps(args.value_dim)) * tile_depth +
      column_tiles(args.head_dim) * tile_rows;
  return tile_depth + packed_rows(args) * columns;
}

MHA_INLINE BackwardKeys backward_keys_of(const TileBackward& args, int64_t head) {
  auto* start = reinterpret_cast<BFloat16*>(args.packed) + head * backward_head(args);
  const int64_t rows = packed_rows(args);
  BackwardKeys found{reinterpret_cast<float*>(start), start + tile_depth, {}, {}};
  found.transposed = found.keys + rows * whole_steps(args.head_dim) * tile_depth;
  found.values = found.transposed + rows * column_tiles(args.head_dim) * tile_rows;
  return found;
}

static int64_t backward_packed_keys(const TileBackward& args) {
  return args.batch * args.kv_heads * backward_head(args) / 2;
}

static void backward_pack_keys(const TileBackward& args, int64_t begin, int64_t end) {
  const int64_t key_width = whole_steps(args.head_dim) * tile_depth;
  const int64_t value_width = whole_steps(args.value_dim) * tile_depth;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t n = i / args.kv_heads, h = i % args.kv_heads;
    const BackwardKeys to = backward_keys_of(args, i);
    Largest largest, ignored;
    for_each_key_step(args, [&](int64_t first, int64_t count, int64_t row) {
      for (int64_t r = 0; r < tile_depth; r += tile_rows) {
        const int64_t rows = max64(0, count - r);
        pack_rows(tile_rows_of(args.key, n, h, first + r, rows, args.head_dim),
                  to.keys + (row + r) * key_width, largest);
        pack_rows(tile_rows_of(args.value, n, h, first + r, rows, args.value_dim),
                  to.values + (row + r) * value_width, ignored);
      }
      pack_transposed(tile_rows_of(args.key, n, h, first, count, args.head_dim),
                      to.transposed + row * column_tiles(args.head_dim) * tile_rows);
    });
    *to.largest = largest.value();
  }
}

// A block's weights and gradients of scores as tiles read them.
struct RoundedBlock {
  KeyBlock block;
  BFloat16 *weights, *gradients;  // [key][query]
  BFloat16* gradient_pairs;       // [step][vector]
};

// The sums of one task, over all its tiles: [key][D], [key][Dv], from the chunk's first key on.
struct KeyGradients {
  float *keys, *values;
  int64_t first_row;
};

struct BackwardTile {
  const TileBackward& args;
  TileScores scores_of;
  BackwardKeys packed;
  KeySpan chunk;  // the keys whose gradients are wanted
  KeyGradients sums;
  BFloat16* grad_output;                      // [step][vector], by pairs of dimensions
  BFloat16 *query_depth, *grad_output_depth;  // by pairs of queries
  float *weights, *grad_scores, *slopes;      // [key][tile]
  float* grad_query;                          // [D][tile]
  RoundedBlock rounded[2];
  bool keeps_all;     // weights and grad_scores hold all keys that the tile sees
  int64_t first_key;  // of those
  float maximum[tile], factor[tile], delta[tile];
  bool at_limit;  // a row's maximum is so large that its scores may be held
  bool has_slopes;
  TileDropout dropout;
};

MHA_INLINE bool in_chunk(const BackwardTile& t, const KeyBlock& block) {
  return block.first >= t.chunk.begin && block.first < t.chunk.end;
}

// Where a block's rows lie in `weights` and `grad_scores`.
MHA_INLINE int64_t block_offset(const BackwardTile& t, const KeyBlock& block) {
  if (!t.keeps_all) return 0;
  const int64_t given = t.args.mask.keys;
  return block.first < given ? (block.first - t.first_key) * tile
                             : (few_keys + block.first - given) * tile;
}

// Both products of a block's keys and values.
template <int V>
static void multiply_keys_and_values(BackwardTile& t, const KeyBlock& block) {
  const int64_t row = packed_row(t.args, block.first), rows = whole_rows(block);
  const int64_t at = block_offset(t, block) + block.first_vector * lanes;
  const int64_t steps = whole_steps(t.args.head_dim),
                value_steps = whole_steps(t.args.value_dim);
  multiply_rows<V>(t.packed.keys + row * steps * tile_depth, rows, steps,
                   t.scores_of.packed_query + block.first_vector * tile_size, t.weights + at);
  multiply_rows<V>(t.packed.values + row * value_steps * tile_depth, rows, value_steps,
                   t.grad_output + block.first_vector * tile_size, t.grad_scores + at);
}

// weights = 4^(scores - row_maximum), rounded as the forward summed them, * row_factor, in
// place.
template <int V, Held What>
static void recompute_weights_of(const BackwardTile& t, const KeyBlock& block, float* held) {
  const int64_t offset = block.first_vector * lanes;
  Vec maximum[V], row_factor[V];
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) {
    maximum[v] = load(t.maximum + offset + v * lanes);
    row_factor[v] = load(t.factor + offset + v * lanes);
  }
  for (int64_t j = 0; j < block.keys; ++j) {
    Vec weight[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const float* place = held + j * tile + offset + v * lanes;
      weight[v] = short_exp2(exponent<What>(load(place), t.scores_of.factor, maximum[v]));
    }
    const Vec rounded = Isa::Pairs::round_to_pairs(weight[0], weight[V - 1]);
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const Vec of_row = v == 0 ? low_numbers(rounded) : high_numbers(rounded);
      store(held + j * tile + offset + v * lanes, of_row * row_factor[v]);
    }
  }
}

template <int V>
static void recompute_weights(BackwardTile& t, const KeyBlock& block) {
  float* held = t.weights + block_offset(t, block);
  float* slopes = t.has_slopes ? t.slopes + block_offset(t, block) : nullptr;
  if (finish_scores<V>(t.scores_of, block, held, slopes, t.at_limit) == Held::products) {
    recompute_weights_of<V, Held::products>(t, block, held);
  } else {
    recompute_weights_of<V, Held::scores>(t, block, held);
  }
  // A row of NaN has such weights, also of blocked keys.
  if (block.blocks) fill_blocked<V>(t.args.mask, t.scores_of.at, block, 0.0f, held);
}

template <int V>
static void drop_gradients(const BackwardTile& t, const KeyBlock& block, float* gradients) {
  const KernelDropout& dropout = t.args.dropout;
  for (int64_t j = 0; j < block.keys; ++j) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      float* place = gradients + j * tile + (block.first_vector + v) * lanes;
      const IntVec keep =
          kept(t.dropout, block.first_vector + v, block.first + j, dropout.threshold);
      store(place, keep ? load(place) * dropout.factor : Vec{});
    }
  }
}

// A query that sees one key has weight e * (1 / e), which rounds to 1 or to the number below.
// Then no gradient may flow through its score.
template <int V>
static void add_to_delta(BackwardTile& t, const KeyBlock& block) {
  constexpr float below_one = 1.0f - 0x1p-24f;
  const int64_t offset = block.first_vector * lanes;
  float* weights = t.weights + block_offset(t, block) + offset;
  const float* grad_weights = t.grad_scores + block_offset(t, block) + offset;
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) {
    Vec delta = load(t.delta + offset + v * lanes);
    for (int64_t j = 0; j < block.keys; ++j) {
      const int64_t at = j * tile + v * lanes;
      const Vec given = load(weights + at);
      const Vec weight = given == broadcast(below_one) ? broadcast(1.0f) : given;
      store(weights + at, weight);
      delta += weight * load(grad_weights + at);
    }
    store(t.delta + offset + v * lanes, delta);
  }
}

// grad_scores = weights * (grad_weights - delta), and what dropout leaves of the weights.
template <int V>
static void score_gradients(BackwardTile& t, const KeyBlock& block) {
  const KernelDropout& dropout = t.args.dropout;
  const int64_t offset = block.first_vector * lanes;
  float* weights = t.weights + block_offset(t, block) + offset;
  float* gradients = t.grad_scores + block_offset(t, block) + offset;
  Vec delta[V];
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) delta[v] = load(t.delta + offset + v * lanes);
  for (int64_t j = 0; j < block.keys; ++j) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const int64_t at = j * tile + v * lanes;
      store(gradients + at, load(weights + at) * (load(gradients + at) - delta[v]));
    }
  }
  if (dropout.threshold) drop_gradients<V>(t, block, t.weights + block_offset(t, block));
  if (t.has_slopes) {
    multiply_slopes<V>(t.slopes + block_offset(t, block) + offset, block.keys, tile, gradients);
  }
  // 0 * NaN is NaN, and the delta of a query that sees NaN is.
  if (block.blocks) {
    fill_blocked<V>(t.args.mask, t.scores_of.at, block, 0.0f,
                    t.grad_scores + block_offset(t, block));
  }
}

// Zeros stand for what fills up the last step of keys and the tile of queries, and for the
// other vector's queries.
template <int V>
static void round_block(const BackwardTile& t, const KeyBlock& block, const RoundedBlock& to) {
  const int64_t at = block_offset(t, block) + block.first_vector * lanes;
  IntVec exists[V];
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) {
    for (int i = 0; i < lanes; ++i) {
      exists[v][i] = (block.first_vector + v) * lanes + i < t.scores_of.at.count ? -1 : 0;
    }
  }
  const auto row = [&](const float* values, int64_t j, Vec(&of)[tile_vectors]) {
#pragma GCC unroll 2
    for (int v = 0; v < tile_vectors; ++v) of[v] = Vec{};
    if (j >= block.keys) return;
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const Vec given = load(values + at + j * tile + v * lanes);
      of[V == 1 ? block.first_vector : v] = exists[v] ? given : Vec{};
    }
  };
  for (int64_t j = 0; j < whole_rows(block); j += 2) {
    Vec weights[2][tile_vectors], gradients[2][tile_vectors];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      row(t.weights, j + i, weights[i]);
      row(t.grad_scores, j + i, gradients[i]);
      const int64_t key = (j + i) * tile_depth;
      store(reinterpret_cast<float*>(to.weights + key),
            Isa::Pairs::round(weights[i][0], weights[i][1]));
      store(reinterpret_cast<float*>(to.gradients + key),
            Isa::Pairs::round(gradients[i][0], gradients[i][1]));
    }
    BFloat16* pairs =
        to.gradient_pairs + j / tile_depth * tile_vectors * tile_size + j % tile_depth * 16;
#pragma GCC unroll 2
    for (int v = 0; v < tile_vectors; ++v) {
      store(reinterpret_cast<float*>(pairs + v * tile_size),
            Isa::Pairs::round_to_pairs(gradients[0][v], gradients[1][v]));
    }
  }
}

// The three products of a block's rounded weights and gradients.
static void add_products(BackwardTile& t, const RoundedBlock& from) {
  const TileBackward& args = t.args;
  const KeyBlock& block = from.block;
  const int64_t row = packed_row(args, block.first), rows = whole_rows(block);
  const int64_t sum_row = row - t.sums.first_row;
  const int64_t key_tiles = column_tiles(args.head_dim),
                value_tiles = column_tiles(args.value_dim);
  add_outer(from.weights, rows, t.grad_output_depth, value_tiles,
            t.sums.values + sum_row * value_tiles * tile_rows, value_tiles * tile_rows);
  add_outer(from.gradients, rows, t.query_depth, key_tiles,
            t.sums.keys + sum_row * key_tiles * tile_rows, key_tiles * tile_rows);
  add_transposed<tile_vectors>(t.packed.transposed + row * key_tiles * tile_rows, key_tiles,
                               from.gradient_pairs, whole_steps(block.keys), false,
                               t.grad_query);
}

// Few keys: both products with delta's sum.
template <int V>
static void first_passes(BackwardTile& t, const KeyBlock& block) {
  multiply_keys_and_values<V>(t, block);
  recompute_weights<V>(t, block);
  float* gradients = t.grad_scores + block_offset(t, block);
  if (t.args.dropout.threshold) drop_gradients<V>(t, block, gradients);
  // 0 * infinity is NaN, and a blocked value may be so large that its product overflows.
  if (block.blocks) fill_blocked<V>(t.args.mask, t.scores_of.at, block, 0.0f, gradients);
  add_to_delta<V>(t, block);
}

// Then what is left.
template <int V>
static void last_passes(BackwardTile& t, const KeyBlock& block, const RoundedBlock& to) {
  score_gradients<V>(t, block);
  round_block<V>(t, block, to);
}

template <int V>
static void all_passes(BackwardTile& t, const KeyBlock& block, const RoundedBlock& to) {
  recompute_weights<V>(t, block);
  if (t.args.dropout.threshold) drop_gradients<V>(t, block, t.grad_scores);
  last_passes<V>(t, block, to);
}
