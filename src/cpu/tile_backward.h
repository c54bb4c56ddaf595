// Gradients of attention over bfloat16 on matrix tiles, blockwise with the weights recomputed
// as in attention_backward.h, queries in the lanes. Included once per ISA (see vec.h).
//
//   scores       = K Q^T           [key][query]
//   grad_weights = V grad_output^T [key][query]
//   grad_value  += P grad_output   A: weights P by key, B: grad_output by pairs of queries
//   grad_key    += dS query        A: grad_scores dS by key, B: queries by pairs
//   grad_query  += K^T dS          A: keys transposed, B: dS by pairs of keys; [D][query]
//
// Sums are float32 and rounded once. With few keys, delta is formed from the very numbers that
// it is subtracted from, else it is the row sum of grad_output * output (see
// attention_backward.h).

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

// A tile load waits for vector stores before it to reach the cache: the products of a block's
// rounded numbers come after those of the next block, or after its rounding.
static void walk_blocks(BackwardTile& t) {
  int parity = 0;
  bool waits = false;
  const auto add_waiting = [&] {
    if (waits) add_products(t, t.rounded[1 - parity]);
    waits = false;
  };
  if (t.keeps_all) {
    walk_keys(t.args, t.scores_of.at, [&](const KeyBlock& block) {
      MHA_FOR_TILE_VECTORS(block.vectors, first_passes, t, block);
    });
  }
  walk_keys(t.args, t.scores_of.at, [&](const KeyBlock& block) {
    if (!in_chunk(t, block)) return;
    RoundedBlock& to = t.rounded[parity];
    to.block = block;
    if (t.keeps_all) {
      MHA_FOR_TILE_VECTORS(block.vectors, last_passes, t, block, to);
      add_waiting();
    } else {
      MHA_FOR_TILE_VECTORS(block.vectors, multiply_keys_and_values, t, block);
      add_waiting();
      MHA_FOR_TILE_VECTORS(block.vectors, all_passes, t, block, to);
    }
    waits = true;
    parity = 1 - parity;
  });
  add_waiting();
}

static float dot(const BFloat16* a, const BFloat16* b, int64_t count) {
  Vec sum = {};
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) sum += load(a + i) * load(b + i);
  float total = 0;
  for (int lane = 0; lane < lanes; ++lane) total += sum[lane];
  for (; i < count; ++i) total += to_float(a[i]) * to_float(b[i]);
  return total;
}

static void start_rows(BackwardTile& t) {
  const TileBackward& args = t.args;
  const QueryTile& at = t.scores_of.at;
  start_scores(t.scores_of, *t.packed.largest);
  pack_queries(args.grad_output, at, args.value_dim, false, t.grad_output);
  pack_depth(tile_rows_of(args.query, at.n, at.h, at.first, at.count, args.head_dim),
             t.query_depth);
  pack_depth(tile_rows_of(args.grad_output, at.n, at.h, at.first, at.count, args.value_dim),
             t.grad_output_depth);
  const int64_t row = first_row(args, at);
  for (int64_t i = 0; i < tile; ++i) {
    const bool exists = i < at.count;
    t.maximum[i] = exists ? args.row_maximum[row + i] : 0;
    t.factor[i] = exists ? args.row_factor[row + i] : 0;
    t.at_limit |= is_near_limit(t.maximum[i]);
    t.delta[i] = 0;
    if (t.keeps_all || !exists) continue;
    t.delta[i] = dot(args.grad_output.at<BFloat16>(at.n, at.h, at.first + i),
                     args.output.at<BFloat16>(at.n, at.h, at.first + i), args.value_dim);
  }
  t.has_slopes = args.softcap > 0 || t.at_limit;
  if (args.dropout.threshold) start_dropout(t.dropout, args.dropout.seed, row, at.count);
}

// Cuts scratch into parts.
struct ScratchParts {
  float* next;
  float* floats(int64_t count) {
    float* part = next;
    next += count;
    return part;
  }
  BFloat16* tiles(int64_t count) {
    return reinterpret_cast<BFloat16*>(floats(count * tile_size / 2));
  }
};

static void divide_scratch(BackwardTile& t, float* scratch) {
  const TileBackward& args = t.args;
  ScratchParts parts{scratch};
  t.scores_of.packed_query = parts.tiles(query_tiles(args.head_dim));
  t.grad_output = parts.tiles(query_tiles(args.value_dim));
  t.query_depth = parts.tiles(column_tiles(args.head_dim));
  t.grad_output_depth = parts.tiles(column_tiles(args.value_dim));
  for (RoundedBlock& rounded : t.rounded) {
    rounded.weights = parts.tiles(key_block / tile_rows);
    rounded.gradients = parts.tiles(key_block / tile_rows);
    rounded.gradient_pairs = parts.tiles(key_block / tile_rows);
  }
  t.grad_query = parts.floats(column_tiles(args.head_dim) * tile_rows * tile);
  t.weights = parts.floats(kept_keys(args) * tile);
  t.grad_scores = parts.floats(kept_keys(args) * tile);
  t.slopes = parts.floats(kept_keys(args) * tile);
  t.scores_of.terms = parts.floats(terms_size);
}

MHA_INLINE int64_t tile_scratch(const TileBackward& args) {
  const int64_t tiles = query_tiles(args.head_dim) + query_tiles(args.value_dim) +
                        column_tiles(args.head_dim) + column_tiles(args.value_dim) +
                        6 * (key_block / tile_rows);
  return tiles * tile_size / 2 + column_tiles(args.head_dim) * tile_rows * tile +
         3 * kept_keys(args) * tile + terms_size;
}

// Writes the tile's rows of grad_query, or of this chunk's share of it.
static void write_grad_query(const BackwardTile& t, int64_t chunk) {
  const TileBackward& args = t.args;
  const QueryTile& at = t.scores_of.at;
  if (args.chunks == 1) {
    Vec scale[tile_vectors];
    for (Vec& factor : scale) factor = broadcast(args.scale);
    write_rows(t.grad_query, at.count, args.head_dim, scale,
               args.grad_query.at(at.n, at.h, at.first), args.grad_query.t);
    return;
  }
  const int64_t row =
      ((chunk * args.batch + at.n) * args.heads + at.h) * args.queries + at.first;
  float* to = args.query_shares + row * args.head_dim;
  for (int64_t i = 0; i < at.count; ++i) {
    for (int64_t d = 0; d < args.head_dim; ++d) {
      to[i * args.head_dim + d] = t.grad_query[d * tile + i] * args.scale;
    }
  }
}

static void backward_tile(const TileBackward& args, const QueryTile& at, int64_t chunk,
                          const KeySpan& keys, const KeyGradients& sums, float* scratch) {
  const int64_t kv_head = kv_head_of(args, at.h);
  BackwardTile t{args,
                 {args, at, kv_head, args.query, args.key, {}, {}, {}, {}},
                 backward_keys_of(args, at.n * args.kv_heads + kv_head),
                 keys,
                 sums,
                 {},
                 {},
                 {},
                 {},
                 {},
                 {},
                 {},
                 {},
                 {},
                 {},
                 {},
                 {},
                 {},
                 {},
                 {},
                 {}};
  divide_scratch(t, scratch);
  const KeySpan span = key_span(args.mask, at);
  const bool sees_given = max64(span.begin, keys.begin) < min64(span.end, keys.end);
  __builtin_memset(t.grad_query, 0,
                   static_cast<size_t>(column_tiles(args.head_dim) * tile_rows * tile) * 4);
  if (sees_given || keys.end > args.mask.keys) {
    t.keeps_all = span.end - span.begin <= few_keys;
    t.first_key = span.begin;
    start_rows(t);
    walk_blocks(t);
  }
  write_grad_query(t, chunk);
}

// The keys of one chunk; the extra keys are the last one's.
MHA_INLINE KeySpan chunk_keys(const TileBackward& args, int64_t chunk) {
  const int64_t blocks = ceil_div(args.mask.keys, key_block);
  const int64_t size = ceil_div(blocks, args.chunks) * key_block;
  const bool last = chunk == args.chunks - 1;
  return {min64(chunk * size, args.mask.keys),
          last ? args.keys : min64((chunk + 1) * size, args.mask.keys)};
}

// Of the heads of one sample only: gradients are the same in a batch of any size.
static int64_t backward_chunks(const TileBackward& args) {
  constexpr int64_t heads_enough = 16, shortest = 512, most = 4;
  const int64_t wanted = min64(most, heads_enough / args.kv_heads);
  return max64(1, min64(wanted, args.mask.keys / shortest));
}

// Rows of sums that a chunk needs at most.
MHA_INLINE int64_t chunk_rows(const TileBackward& args) {
  const int64_t blocks = ceil_div(args.mask.keys, key_block);
  return ceil_div(blocks, args.chunks) * key_block +
         whole_steps(args.keys - args.mask.keys) * tile_depth;
}

static int64_t backward_scratch(const TileBackward& args) {
  const int64_t columns =
      (column_tiles(args.head_dim) + column_tiles(args.value_dim)) * tile_rows;
  return chunk_rows(args) * columns + tile_scratch(args);
}

static void write_key_gradient(const float* sums, int64_t columns, float factor, BFloat16* to) {
  int64_t d = 0;
  for (; d + lanes <= columns; d += lanes) {
    const Vec sum = load(sums + d) * factor;
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(to + d),
        _mm512_castsi512_si256(reinterpret_cast<__m512i>(Isa::Pairs::round(sum, sum))));
  }
  for (; d < columns; ++d) to[d] = to_bfloat16(sums[d] * factor);
}

static void backward_chunk(const TileBackward& args, int64_t index, float* scratch) {
  const int64_t chunk = index % args.chunks, head = index / args.chunks;
  const int64_t n = head / args.kv_heads, kv_head = head % args.kv_heads;
  const int64_t group = args.heads / args.kv_heads;
  const KeySpan keys = chunk_keys(args, chunk);
  const int64_t key_width = column_tiles(args.head_dim) * tile_rows,
                value_width = column_tiles(args.value_dim) * tile_rows;
  KeyGradients sums{scratch, scratch + chunk_rows(args) * key_width,
                    packed_row(args, keys.begin)};
  float* tiles = sums.values + chunk_rows(args) * value_width;
  __builtin_memset(scratch, 0, static_cast<size_t>(tiles - scratch) * 4);
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    for (int64_t first = 0; first < args.queries; first += tile) {
      backward_tile(args, {n, h, first, min64(tile, args.queries - first)}, chunk, keys, sums,
                    tiles);
    }
  }
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    const int64_t row = packed_row(args, j) - sums.first_row;
    write_key_gradient(sums.keys + row * key_width, args.head_dim, args.scale,
                       args.grad_key.at(n, kv_head, j));
    write_key_gradient(sums.values + row * value_width, args.value_dim, 1.0f,
                       args.grad_value.at(n, kv_head, j));
  }
}

static void backward(const TileBackward& args, int64_t begin, int64_t end, float* scratch) {
  Tiles::start();
  for (int64_t i = begin; i < end; ++i) backward_chunk(args, i, scratch);
  Tiles::stop();
}
