// Attention forward, blockwise with a running softmax. Included once per ISA (see vec.h).
//
// Everything of a tile lies transposed, queries in the lanes: query [D][tile], scores and
// weights [key][tile], output [Dv][tile]. So the softmax has no horizontal step, and both
// products are `multiply_add` with keys or values as the broadcast side, read from where they
// lie.
//
// For each block of keys:
//   pass 1  scores = K Q^T, with scale * log4(e) folded into Q; those out of range once more
//   pass 2  soft cap, added terms and blocks where there are some, running maximum per lane
//   pass 3  weights = 4^(scores - maximum), sum per lane
//   pass 4  output += V^T weights, of which dropout may take some
// then output / sum is transposed back into rows.
//
// Weights that the caller wants stay in a strip until the last maximum and the sum are known.
//
// Source: Dao et al., "FlashAttention", 2022.

// One tile's state.
struct ForwardTile {
  const AttentionForward& args;
  QueryTile at;
  int64_t kv_head;
  float *query, *scores, *terms, *dropped;  // scratch
  RunningSoftmax softmax;
  TileDropout dropout;
  WeightStrip strip;
};

// Asks for rows early: they come from farther away than everything else of a tile.
MHA_INLINE void fetch_rows(const float* row, int64_t stride, int64_t count, int64_t dim) {
  for (int64_t i = 0; i < count; ++i, row += stride) {
    for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(row + d);
  }
}

// pass 1 for M keys; keeps the largest score of each lane in `top`.
template <typename Of, int M, int V>
MHA_INLINE void score_rows(const float* key, int64_t key_stride, int64_t depth,
                           const float* query, float factor, float* scores, Vec (&top)[V]) {
  Vec c[M][V] = {};
  multiply_add<M, V, Of>(depth, key, key_stride, 1, query, tile, c);
  if constexpr (Of::pairs) {  // a factor in the query would have been rounded with it
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) c[m][v] *= factor;
    }
  }
  store_block(scores, tile, c);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) top[v] = max_drop_nan(top[v], c[m][v]);
  }
}

template <typename Of, int V>
MHA_APART void score_block(const float* key, int64_t key_stride, int64_t keys, int64_t depth,
                           const float* query, float factor, float* scores, Vec (&top)[V]) {
  const auto rows = [&](auto count, int64_t j) {
    score_rows<Of, decltype(count)::value>(key + j * key_stride, key_stride, depth, query,
                                           factor, scores + j * tile, top);
  };
  for_each_rows(keys, rows);
}

// pass 4 for M value dimensions; the first block starts the sums.
template <typename Of, int M, int V>
MHA_INLINE void output_rows(const float* value, int64_t value_stride, int64_t keys,
                            const float* weights, bool starts, float* output) {
  Vec c[M][V] = {};
  multiply_add<M, V, Of>(keys, value, 1, value_stride, weights, tile, c);
  if (starts) {
    store_block(output, tile, c);
  } else {
    add_block(c, output, tile);
  }
}

template <typename Of, int V>
MHA_APART void output_block(const float* value, int64_t value_stride, int64_t keys,
                            int64_t value_dim, const float* weights, bool starts,
                            float* output) {
  const auto rows = [&](auto count, int64_t d) {
    output_rows<Of, decltype(count)::value, V>(value + d, value_stride, keys, weights, starts,
                                               output + d * tile);
  };
  for_each_rows(value_dim, rows);
}

// pass 3. A lane that has seen no open key has maximum -inf, and only scores of -inf. Scores
// that are not known to be in range may turn out not to be: then nothing is done and the answer
// is no.
template <int V, bool Blocks>
MHA_INLINE bool weigh_block(ForwardTile& t, int64_t keys, int64_t first_vector, bool settled) {
  const Vec minus_infinity = broadcast(-__builtin_inff());
  Vec maximum[V], sum[V], least[V];
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) {
    const Vec m = load(t.softmax.maximum + (first_vector + v) * lanes);
    maximum[v] = m == minus_infinity ? Vec{} : m;
    sum[v] = least[v] = Vec{};
  }
  float* row = t.scores + first_vector * lanes;
  for (int64_t j = 0; j < keys; ++j, row += tile) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const Vec score = load(row + v * lanes);
      if constexpr (!Blocks) least[v] = score < least[v] ? score : least[v];
      Vec weight = exp4(score - maximum[v]);
      if constexpr (Blocks) weight = score == minus_infinity ? Vec{} : weight;
      store(row + v * lanes, weight);
      sum[v] += weight;
    }
  }
  if (!settled) {
    IntVec out{};
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) out |= (sum[v] != sum[v]) | ~in_range(least[v]);
    if (any(out)) return false;
  }
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) {
    float* total = t.softmax.sum + (first_vector + v) * lanes;
    store(total, load(total) + sum[v]);
  }
  return true;
}

// weights of a block, of which dropout takes some.
template <int V>
static void drop_weights(const ForwardTile& t, const KeyBlock& block, const float* weights,
                         float* dropped) {
  for (int64_t j = 0; j < block.keys; ++j) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const int64_t lane = (block.first_vector + v) * lanes, at = j * tile + lane;
      const IntVec keep =
          kept(t.dropout, block.first_vector + v, block.first + j, t.args.dropout.threshold);
      store(dropped + at, keep ? load(weights + at) : Vec{});
    }
  }
}

// Passes 1 and 2. Whether the scores are known to be in range: those that are plain products
// show in pass 3, and are formed once more to be `settled`.
template <int V, typename Of>
static bool form_scores(ForwardTile& t, const KeyBlock& block, bool settles, Vec (&top)[V]) {
  const AttentionForward& args = t.args;
  const int64_t offset = block.first_vector * lanes;
  constexpr int width = Of::pairs ? 2 : 1;  // numbers in one place
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) top[v] = broadcast(-__builtin_inff());
  const int64_t key_at =
      args.key.n * t.at.n + args.key.h * t.kv_head + args.key.t * block.first;
  score_block<Of, V>(static_cast<const float*>(args.key.data) + key_at / width,
                     args.key.t / width, block.keys, args.head_dim / width, t.query + offset,
                     args.scale * log4e, t.scores + offset, top);
  const bool changes = args.softcap > 0 || block.adds || block.blocks;
  if (!settles) {
    settles =
        out_of_range(top) || (changes && !all_in_range<V>(t.scores + offset, block.keys, tile));
  }
  if (settles) {
    using Element = std::conditional_t<Of::pairs, BFloat16, float>;
    if (block.blocks) fill_blocked<V>(args.mask, t.at, block, 0.0f, t.scores);
    const auto* key = args.key.at<Element>(t.at.n, t.kv_head, block.first);
    settle_scores(scored_rows(args, t.at, key, args.key.t), t.at, block, t.scores);
  }
  if (!settles && !changes) return false;
  if (args.softcap > 0) cap_scores<V>(args.softcap, block.keys, tile, t.scores + offset);
  if (block.adds) add_terms<V>(args.mask, t.at, block, t.terms, t.scores);
  if (block.blocks) fill_blocked<V>(args.mask, t.at, block, -__builtin_inff(), t.scores);
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) top[v] = broadcast(-__builtin_inff());
  for (int64_t j = 0; j < block.keys; ++j) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      top[v] = max_drop_nan(top[v], load(t.scores + j * tile + offset + v * lanes));
    }
  }
  return true;
}

template <int V, typename Of>
static void attend_block(ForwardTile& t, const KeyBlock& block, Of) {
  const AttentionForward& args = t.args;
  const int64_t offset = block.first_vector * lanes;
  if (args.weights.data) t.scores = t.strip.weights + block.first * tile;
  Vec top[V];
  bool settled = form_scores<V, Of>(t, block, false, top);
  raise_maximum<V>(t.softmax, args.value_dim, top, block.first_vector);
  if (block.blocks) {
    weigh_block<V, true>(t, block.keys, block.first_vector, settled);
  } else if (!weigh_block<V, false>(t, block.keys, block.first_vector, settled)) {
    settled = form_scores<V, Of>(t, block, true, top);
    raise_maximum<V>(t.softmax, args.value_dim, top, block.first_vector);
    weigh_block<V, false>(t, block.keys, block.first_vector, settled);
  }
  const float* weights = t.scores;
  if (args.dropout.threshold) {
    float* dropped = args.weights.data && !args.weights_after_dropout ? t.dropped : t.scores;
    drop_weights<V>(t, block, t.scores, dropped);
    weights = dropped;
  }
  const bool starts = !t.softmax.started && V * lanes >= t.at.count;
  if (!t.softmax.started && !starts) clear_output(t.softmax, args.value_dim);
  t.softmax.started = true;
  if constexpr (Of::pairs) {
    float* pairs = args.weights.data ? t.dropped : t.scores;
    pair_rows<Of, V>(weights + offset, block.keys, pairs + offset);
    const int64_t head = t.at.n * args.kv_heads + t.kv_head;
    const uint32_t* value =
        args.value_pairs + head * words_of_values(args) + block.first / 2 * args.value_dim;
    output_block<Of, V>(reinterpret_cast<const float*>(value), args.value_dim,
                        (block.keys + 1) / 2, args.value_dim, pairs + offset, starts,
                        t.softmax.output + offset);
  } else {
    output_block<Of, V>(args.value.at(t.at.n, t.kv_head, block.first), args.value.t, block.keys,
                        args.value_dim, weights + offset, starts, t.softmax.output + offset);
  }
  if (args.weights.data) remember_block(t.strip, block, t.softmax.maximum);
}

// Divides by the sum and writes rows.
static void finish_tile(ForwardTile& t) {
  const AttentionForward& args = t.args;
  Vec inverse[tile_vectors];
  inverse_sums(t.softmax, inverse);
  if (args.weights.data) {
    const float dropout = args.weights_after_dropout ? args.dropout.factor : 1.0f;
    const float share = args.averaged ? 1.0f / static_cast<float>(args.heads) : 1.0f;
    write_weights(t.strip, t.at, args.keys, t.softmax.maximum, inverse, dropout * share,
                  args.averaged && t.at.h > 0,
                  args.weights.at(t.at.n, args.averaged ? 0 : t.at.h, t.at.first),
                  args.weights.t);
  }
  for (int v = 0; v < tile_vectors; ++v) inverse[v] *= args.dropout.factor;
  const Vec wild = transpose_out(t.softmax.output, tile, t.at.count, args.value_dim, inverse,
                                 args.output.at(t.at.n, t.at.h, t.at.first), args.output.t);
  if (any(wild != Vec{})) mark_not_finite(args.not_finite);
  if (!args.row_maximum) return;
  const int64_t row = first_row(args, t.at);
  keep_statistics(t.softmax, t.at.count, args.row_maximum + row, args.row_factor + row);
}

template <typename Of>
static void forward_tile(const AttentionForward& args, const QueryTile& at, float* scratch) {
  ForwardTile t{args, at, kv_head_of(args, at.h), {}, {}, {}, {}, {}, {}, {}};
  t.query = scratch;
  t.scores = t.query + args.head_dim * tile;
  t.softmax.output = t.scores + key_block * tile;
  t.terms = t.softmax.output + args.value_dim * tile;
  t.dropped = t.terms + terms_size;
  if (args.weights.data) start_strip(t.strip, args.keys, t.dropped + key_block * tile);
  if (args.dropout.threshold) {
    start_dropout(t.dropout, args.dropout.seed, first_row(args, at), at.count);
  }
  fetch_rows(args.query.at(at.n, at.h, at.first), args.query.t, at.count, args.head_dim);
  fetch_rows(args.output.at(at.n, at.h, at.first), args.output.t, at.count, args.value_dim);
  transpose_queries(args, at, Of::pairs ? 1.0f : args.scale * log4e, t.query);
  if constexpr (Of::pairs) pair_rows<Of, tile_vectors>(t.query, args.head_dim, t.query);
  start_rows(t.softmax, args.sinks ? args.sinks + at.h : nullptr);
  walk_keys(args, at, [&](const KeyBlock& block) {
    MHA_FOR_VECTORS(block.vectors, attend_block, t, block, Of{});
  });
  if (!t.softmax.started) clear_output(t.softmax, args.value_dim);
  finish_tile(t);
}

static int64_t forward_scratch(const AttentionForward& args) {
  const int64_t strip = args.weights.data ? strip_size(args.keys) : 0;
  return (args.head_dim + args.value_dim + 2 * key_block) * tile + terms_size + strip;
}

template <typename Of>
static void forward_tiles(const AttentionForward& args, int64_t begin, int64_t end,
                          float* scratch) {
  for (int64_t i = begin; i < end; ++i) {
    if (args.averaged) {  // though without keys there is no memory for weights
      QueryTile at = query_tile(1, args.queries, i);
      for (at.h = 0; at.h < args.heads; ++at.h) forward_tile<Of>(args, at, scratch);
    } else {
      forward_tile<Of>(args, query_tile(args.heads, args.queries, i), scratch);
    }
  }
}

static void forward(const AttentionForward& args, int64_t begin, int64_t end, float* scratch) {
  if constexpr (Isa::Pairs::exist) {
    if (args.storage == Storage::bfloat16) {
      return forward_tiles<Isa::Pairs>(args, begin, end, scratch);
    }
  }
  forward_tiles<Floats>(args, begin, end, scratch);
}
