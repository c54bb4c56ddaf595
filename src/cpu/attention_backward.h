// Gradients of attention, blockwise, with the weights recomputed. Included once per ISA.
//
// One task is a key/value head of a sample, or a chunk of its keys where heads are few, with
// all query heads that share it, so that every sum is formed by one thread in one order. For
// each tile of queries, queries in the lanes as in the forward, and each block of keys:
//   pass 1  weights = 4^(K Q^T - row_maximum) * row_factor    [key][query]
//   pass 2  grad_weights = V grad_output^T                      [key][query]
//   pass 3  grad_scores = weights * (grad_weights - delta)      [key][query]
//   pass 4  grad_scores *= slope of the soft cap, if there is one; 0 where a score is held
//           grad_value += weights grad_output
//           grad_key += grad_scores query
//           grad_query += grad_scores^T key
// where delta is the row sum of weights * grad_weights. In pass 4 the tile is the broadcast
// side and the tensors are read as they lie, so only Q and grad_output are transposed, once a
// tile.
//
// With few keys, passes 1 and 2 run over all of them before pass 3, which forms delta from the
// very numbers it is subtracted from: where one key has nearly all the weight, little is left
// of the difference. With many it is the row sum of grad_output * output, which is the same but
// for rounding, and known beforehand.
//
// Source: Dao et al., "FlashAttention", 2022, appendix B.

static float dot(const float* a, const float* b, int64_t count) {
  Vec sum = {};
  for (int64_t i = 0; i < count; i += lanes) sum += load(a + i) * load(b + i);
  float total = 0;
  for (int i = 0; i < lanes; ++i) total += sum[i];
  return total;
}

// Rows of one head are often a power of two apart, and then share few sets of the first-level
// cache, from which the products would lose them. They are read, or summed, side by side: here
// `count` rows of `columns` are copied to `to`, unless they lie so.
static GivenRows rows_side_by_side(const float* from, int64_t stride, int64_t count,
                                   int64_t columns, float* to) {
  if (stride == columns) return {from, stride};
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < columns; c += lanes) {
      store(to + i * columns + c, load(from + i * stride + c));
    }
  }
  return {to, columns};
}

// to = factor * from
static void scale_rows(const FloatRows& from, int64_t count, int64_t columns, float factor,
                       const FloatRows& to) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < columns; c += lanes) {
      store(to.at(i) + c, load(from.at(i) + c) * factor);
    }
  }
}

static void clear_rows(const FloatRows& rows, int64_t count, int64_t columns) {
  Vec zero = {};
  MHA_PIN(zero);  // else each short row becomes a call of memset
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < columns; c += lanes) store(rows.at(i) + c, zero);
  }
}

MHA_INLINE bool in_chunk(const BackwardTile& t, const KeyBlock& block) {
  return block.first >= t.chunk.begin && block.first < t.chunk.end;
}

// Writes the tile's rows of grad_query to `grad_query`, rows `stride` apart.
static void backward_tile(const AttentionBackward& args, const QueryTile& at, bool for_mask,
                          const KeySpan& chunk, const KeySums& sums, float* grad_query,
                          int64_t stride, float* scratch) {
  BackwardTile t{};
  t.args = &args;
  t.at = at;
  t.kv_head = kv_head_of(args, at.h);
  t.for_mask = for_mask;
  t.chunk = chunk;
  t.sums = sums;
  t.query = scratch;
  t.grad_output = t.query + args.head_dim * tile;
  t.grad_query = t.grad_output + args.value_dim * tile;
  t.weights = t.grad_query + args.head_dim * tile;
  t.grad_scores = t.weights + kept_keys(args) * tile;
  t.terms = t.grad_scores + kept_keys(args) * tile;
  t.slopes = t.terms + terms_size;
  float* query_rows = t.slopes + kept_keys(args) * tile;
  const KeySpan span = key_span(args.mask, at);
  const bool sees_given = max64(span.begin, chunk.begin) < min64(span.end, chunk.end);
  if (!sees_given && chunk.end <= args.mask.keys) {
    if (for_mask) return;
    for (int64_t i = 0; i < at.count; ++i) {
      for (int64_t d = 0; d < args.head_dim; d += lanes) {
        store(grad_query + i * stride + d, Vec{});
      }
    }
    return;
  }
  t.keeps_all = span.end - span.begin <= few_keys;
  t.first_key = span.begin;
  transpose_queries(args, at, args.scale * log4e, t.query);
  transpose_in(args.grad_output.at(at.n, at.h, at.first), args.grad_output.t, at.count,
               args.value_dim, 1.0f, t.grad_output, tile);
  if (!for_mask) {
    t.query_rows = rows_side_by_side(args.query.at(at.n, at.h, at.first), args.query.t,
                                     at.count, args.head_dim, query_rows);
    t.grad_output_rows =
        rows_side_by_side(args.grad_output.at(at.n, at.h, at.first), args.grad_output.t,
                          at.count, args.value_dim, query_rows + tile * args.head_dim);
  }
  const int64_t row = first_row(args, at);
  for (int64_t i = 0; i < at.count; ++i) {
    t.maximum[i] = args.row_maximum[row + i];
    t.factor[i] = args.row_factor[row + i];
    t.at_limit |= is_near_limit(t.maximum[i]);
    if (t.keeps_all) continue;
    t.delta[i] = dot(args.grad_output.at(at.n, at.h, at.first + i),
                     args.output.at(at.n, at.h, at.first + i), args.value_dim);
  }
  if (args.dropout.threshold) start_dropout(t.dropout, args.dropout.seed, row, at.count);
  for (int64_t i = 0; i < tile * args.head_dim; ++i) t.grad_query[i] = 0;
  if (t.keeps_all) {
    walk_keys(args, at, [&](const KeyBlock& block) {
      MHA_FOR_VECTORS(block.vectors, first_passes, t, block);
    });
    walk_keys(args, at, [&](const KeyBlock& block) {
      if (in_chunk(t, block)) MHA_FOR_VECTORS(block.vectors, last_passes, t, block);
    });
  } else {
    walk_keys(args, at, [&](const KeyBlock& block) {
      if (in_chunk(t, block)) MHA_FOR_VECTORS(block.vectors, all_passes, t, block);
    });
  }
  if (for_mask) return;
  for (int64_t i = 0; i < at.count; ++i) {
    float* to = grad_query + i * stride;
    for (int64_t d = 0; d < args.head_dim; d += lanes) {
      store(to + d, load(t.grad_query + i * args.head_dim + d) * args.scale);
    }
  }
}

// Floats of what a tile needs, and of the gradients of a chunk's keys and values if they are
// summed side by side. They are summed in place where few tiles add to them, or where keys are
// so many that no cache holds them.
static int64_t tile_scratch(const AttentionBackward& args) {
  const int64_t kept = 3 * kept_keys(args);
  return (3 * args.head_dim + 2 * args.value_dim + kept) * tile + terms_size;
}
static int64_t sums_scratch(const AttentionBackward& args) {
  constexpr int64_t fewest_tiles = 8, most = 1 << 20;
  const int64_t tiles = args.heads / args.kv_heads * ceil_div(args.queries, tile);
  const KeySpan first = chunk_keys(args, 0), last = chunk_keys(args, args.chunks - 1);
  const int64_t keys = max64(first.end - first.begin, last.end - last.begin);
  const int64_t size = keys * (args.head_dim + args.value_dim);
  return tiles >= fewest_tiles && size <= most ? size : 0;
}

static int64_t backward_scratch(const AttentionBackward& args) {
  return tile_scratch(args) + sums_scratch(args);
}

static void backward_chunk(const AttentionBackward& args, int64_t index, float* scratch) {
  const int64_t chunk = index % args.chunks, head = index / args.chunks;
  const int64_t n = head / args.kv_heads, kv_head = head % args.kv_heads;
  const int64_t group = args.heads / args.kv_heads, tiles = ceil_div(args.queries, tile);
  const KeySpan keys = chunk_keys(args, chunk);
  const int64_t count = keys.end - keys.begin;
  const KeySums wanted{{args.grad_key.at(n, kv_head, keys.begin), args.grad_key.t},
                       {args.grad_value.at(n, kv_head, keys.begin), args.grad_value.t}};
  KeySums sums = wanted;
  const bool side_by_side = sums_scratch(args) > 0;
  if (side_by_side) {
    sums.key = {scratch + tile_scratch(args), args.head_dim};
    sums.value = {sums.key.at(count), args.value_dim};
  }
  clear_rows(sums.key, count, args.head_dim);
  clear_rows(sums.value, count, args.value_dim);
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t first = i * tile;
      float* grad_query = args.grad_query.at(n, h, first);
      int64_t stride = args.grad_query.t;
      if (args.chunks > 1) {
        const int64_t row = ((chunk * args.batch + n) * args.heads + h) * args.queries + first;
        grad_query = args.query_shares + row * args.head_dim;
        stride = args.head_dim;
      }
      backward_tile(args, {n, h, first, min64(tile, args.queries - first)}, false, keys, sums,
                    grad_query, stride, scratch);
    }
  }
  scale_rows(sums.key, count, args.head_dim, args.scale, wanted.key);
  if (side_by_side) scale_rows(sums.value, count, args.value_dim, 1.0f, wanted.value);
}

static void backward(const AttentionBackward& args, int64_t begin, int64_t end,
                     float* scratch) {
  for (int64_t i = begin; i < end; ++i) backward_chunk(args, i, scratch);
}

// One task is a tile of queries of one plane of the mask, with all samples and heads that share
// it, so that every sum is formed by one thread in one order.
static void backward_added(const AttentionBackward& args, int64_t begin, int64_t end,
                           float* scratch) {
  const int64_t planes_n = args.grad_added.n ? args.batch : 1;
  const int64_t planes_h = args.grad_added.h ? args.heads : 1;
  for (int64_t i = begin; i < end; ++i) {
    const QueryTile plane = query_tile(planes_h, args.queries, i);
    for (int64_t n = plane.n; n < args.batch; n += planes_n) {
      for (int64_t h = plane.h; h < args.heads; h += planes_h) {
        backward_tile(args, {n, h, plane.first, plane.count}, true, {0, args.keys}, {}, nullptr,
                      0, scratch);
      }
    }
  }
}
