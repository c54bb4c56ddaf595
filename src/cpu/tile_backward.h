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
