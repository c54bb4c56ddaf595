// Weights of attention rebuilt from the statistics that the forward left of each row, and what
// can be said of them without holding them. Included once per ISA (see vec.h).
//
// For a tile of queries and each block of keys that it may attend to:
//   pass 1  scores = K Q^T, soft cap, added terms, -inf where blocked   [key][query]
//   pass 2  weights = 4^(scores - row_maximum) * row_factor      [key][query]
// and for what is attributed to the pairs, G being the gradient with respect to the weights,
//   pass 3  G = V dO^T, 0 where blocked; weights = G or weights * G   [key][query]
// then the block is written into rows, summed, or searched, and forgotten. Every sum is formed
// by one thread in one order.

struct MapTile {
  const MapSource& source;
  QueryTile at;
  int64_t kv_head;
  float *query, *weights, *terms;  // scratch: [D][tile], [key][tile], [key][tile]
  float *gradient,
      *grad_output;  // likewise, unless weights are wanted: [key][tile], [Dv][tile]
  float maximum[tile], factor[tile];
  bool at_limit;  // a row's maximum is so large that its scores may be held
};

MHA_INLINE bool wants_weights(const MapSource& source) {
  return source.numbers == MapNumbers::weights;
}

static int64_t map_scratch(const MapSource& source) {
  const int64_t gradient = wants_weights(source) ? 0 : (source.value_dim + key_block) * tile;
  return (source.head_dim + key_block) * tile + terms_size + gradient;
}

// Lanes after the last query get weights 0.
static void start_map_tile(MapTile& t, float* scratch) {
  const MapSource& source = t.source;
  const QueryTile& at = t.at;
  t.query = scratch;
  t.weights = t.query + source.head_dim * tile;
  t.terms = t.weights + key_block * tile;
  t.gradient = t.terms + terms_size;
  t.grad_output = t.gradient + key_block * tile;
  transpose_queries(source, at, source.scale * log4e, t.query);
  if (!wants_weights(source)) {
    transpose_in(source.grad_output.at(at.n, at.h, at.first), source.grad_output.t, at.count,
                 source.value_dim, 1.0f, t.grad_output, tile);
  }
  t.at_limit = false;
  for (int64_t i = 0; i < tile; ++i) {
    const bool given = i < at.count;
    t.maximum[i] = given ? *source.row_maximum.at(at.n, at.h, at.first + i) : 0;
    t.factor[i] = given ? *source.row_factor.at(at.n, at.h, at.first + i) : 0;
    t.at_limit |= is_near_limit(t.maximum[i]);
  }
}

// The gradient of the block, whose final scores are in t.weights. Nothing of the value of a
// blocked pair is left, nor in a row that sees nothing.
template <int V>
static void gradient_block(MapTile& t, const KeyBlock& block) {
  const MapSource& source = t.source;
  const int64_t offset = block.first_vector * lanes;
  const Vec minus_infinity = broadcast(-__builtin_inff());
  Vec factor[V];
  load_lanes(t.factor + offset, factor);
  for_each_score<V>(source.value.at(t.at.n, t.kv_head, block.first), source.value.t, block.keys,
                    source.value_dim, t.grad_output + offset, [&](int64_t j, int v, Vec g) {
                      const int64_t at = j * tile + offset + v * lanes;
                      const IntVec open =
                          (load(t.weights + at) != minus_infinity) & (factor[v] != Vec{});
                      store(t.gradient + at, open ? g : Vec{});
                    });
}

// Puts what is attributed to the pairs of a block in the place of their weights.
template <int V>
static void attribute_block(MapTile& t, const KeyBlock& block) {
  const MapNumbers numbers = t.source.numbers;
  const int64_t offset = block.first_vector * lanes;
  for (int64_t j = 0; j < block.keys; ++j) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const int64_t at = j * tile + offset + v * lanes;
      const Vec gradient = load(t.gradient + at);
      const Vec product = load(t.weights + at) * gradient;
      store(t.weights + at, numbers == MapNumbers::gradient  ? gradient
                            : numbers == MapNumbers::product ? product
                                                             : max_keep_nan(Vec{}, product));
    }
  }
}

// Passes 1 to 3. Calls visit(j, v, exponent, weight) for each key j and vector v of the block;
// a weight is 4^exponent * factor, and 0 where blocked, in a row of NaN too.
template <int V, typename Visit>
MHA_INLINE void rebuild_block(MapTile& t, const KeyBlock& block, const Visit& visit) {
  const MapSource& source = t.source;
  const int64_t offset = block.first_vector * lanes;
  const Vec minus_infinity = broadcast(-__builtin_inff());
  float* weights = t.weights + offset;
  Vec wild[V] = {};
  for_each_score<V>(source.key.at(t.at.n, t.kv_head, block.first), source.key.t, block.keys,
                    source.head_dim, t.query + offset, [&](int64_t j, int v, Vec c) {
                      wild[v] = watch(wild[v], c);
                      store(weights + j * tile + v * lanes, c);
                    });
  if (t.at_limit || found_wild(wild)) {
    if (block.blocks) fill_blocked<V>(source.mask, t.at, block, 0.0f, t.weights);
    const float* key = source.key.at(t.at.n, t.kv_head, block.first);
    settle_scores(scored_rows(source, t.at, key, source.key.t), t.at, block, t.weights);
  }
  if (source.softcap > 0) cap_scores<V>(source.softcap, block.keys, tile, weights);
  if (block.adds) add_terms<V>(source.mask, t.at, block, t.terms, t.weights);
  if (block.blocks) fill_blocked<V>(source.mask, t.at, block, -__builtin_inff(), t.weights);
  if (!wants_weights(source)) gradient_block<V>(t, block);
  Vec maximum[V], factor[V];
  load_lanes(t.maximum + offset, maximum);
  load_lanes(t.factor + offset, factor);
  for (int64_t j = 0; j < block.keys; ++j) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const Vec score = load(weights + j * tile + v * lanes);
      const Vec exponent = max_keep_nan(broadcast(-63.5f), score - maximum[v]);
      const Vec weight = score == minus_infinity ? Vec{} : exp4(exponent) * factor[v];
      store(weights + j * tile + v * lanes, weight);
      visit(j, v, exponent, weight);
    }
  }
  if (!wants_weights(source)) attribute_block<V>(t, block);
}

// The same for who reads the numbers afterwards.
template <int V>
MHA_INLINE void rebuild_block(MapTile& t, const KeyBlock& block) {
  rebuild_block<V>(t, block, [](int64_t, int, Vec, Vec) {});
}

// ---- Rows of weights.

struct RowsTile : MapTile {
  const MapRows& wanted;
  float *rows, share;
  bool add;
  int64_t done;  // keys before this one are written
};

// Zeros in rows [first_lane, last_lane), keys [from, to): pairs of blocks that are not visited.
static void clear_rows(const RowsTile& t, int64_t from, int64_t to, int64_t first_lane,
                       int64_t last_lane) {
  if (t.add) return;
  for (int64_t i = first_lane; i < min64(last_lane, t.at.count); ++i) {
    float* row = t.rows + i * t.wanted.weights.t;
    for (int64_t j = from; j < to; ++j) row[j] = 0;
  }
}

template <int V>
static void rows_block(RowsTile& t, const KeyBlock& block) {
  rebuild_block<V>(t, block);
  const int64_t end = block.first + block.keys, offset = block.first_vector * lanes;
  clear_rows(t, t.done, block.first, 0, tile);
  clear_rows(t, block.first, end, 0, offset);
  clear_rows(t, block.first, end, offset + V * lanes, tile);
  t.done = end;
  const int64_t stride = t.wanted.weights.t;
  for (int64_t lane = offset; lane < min64(offset + V * lanes, t.at.count); lane += lanes) {
    float* to = t.rows + lane * stride + block.first;
    const int64_t count = min64(lanes, t.at.count - lane);
    if (t.add) {
      write_block<true>(t.weights + lane, block.keys, count, broadcast(t.share), to, stride);
    } else {
      write_block<false>(t.weights + lane, block.keys, count, broadcast(t.share), to, stride);
    }
  }
}

static void rows_tile(const MapSource& source, const MapRows& wanted, const QueryTile& at,
                      float* scratch) {
  const int64_t kv_head = kv_head_of(source, at.h);
  float* rows = wanted.weights.at(at.n, wanted.averaged ? 0 : at.h, at.first);
  const float share = wanted.averaged ? 1.0f / static_cast<float>(source.heads) : 1.0f;
  RowsTile t{{source, at, kv_head, {}, {}, {}, {}, {}, {}, {}, {}},
             wanted,
             rows,
             share,
             wanted.averaged && at.h > 0,
             0};
  start_map_tile(t, scratch);
  walk_keys(source, at, [&](const KeyBlock& block) {
    MHA_FOR_VECTORS(block.vectors, rows_block, t, block);
  });
  clear_rows(t, t.done, source.keys, 0, tile);
}

static void map_rows(const MapSource& source, const MapRows& wanted, int64_t index,
                     float* scratch) {
  QueryTile at = query_tile(wanted.averaged ? 1 : source.heads, source.queries, index);
  if (!wanted.averaged) return rows_tile(source, wanted, at, scratch);
  for (at.h = 0; at.h < source.heads; ++at.h) rows_tile(source, wanted, at, scratch);
}

// ---- Sums over keys and queries.

// The queries of one task: chunk index % chunks of head index / chunks, in whole tiles.
struct QueryChunk {
  int64_t n, h, begin, end;
};

MHA_INLINE QueryChunk query_chunk(const MapSource& source, int64_t chunk, int64_t index) {
  const int64_t chunks = ceil_div(source.queries, chunk), head = index / chunks;
  const int64_t begin = index % chunks * chunk;
  return {head / source.heads, head % source.heads, begin,
          min64(begin + chunk, source.queries)};
}

struct SummaryTile : MapTile {
  const MapSummary& wanted;
  float* received;  // [key]
  float log4_factor[tile], position[tile];
  float entropy[tile], distance[tile], placed[tile];
};

// sums[j] += the weights of key j over the block's lanes.
template <int V>
static void add_key_sums(const float* weights, int64_t keys, float* sums) {
  int64_t j = 0;
  for (; j + lanes <= keys; j += lanes) {
    Vec r[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) {
      const float* row = weights + (j + i) * tile;
      r[i] = load(row);
#pragma GCC unroll 3
      for (int v = 1; v < V; ++v) r[i] += load(row + v * lanes);
    }
    add_across<lanes / 2>(r);
    store(sums + j, load(sums + j) + r[0]);
  }
  for (; j < keys; ++j) {
    float sum = 0;
    for (int64_t i = 0; i < V * lanes; ++i) sum += weights[j * tile + i];
    sums[j] += sum;
  }
}

template <int V>
MHA_INLINE void add_lanes(const Vec (&sums)[V], float* to) {
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) store(to + v * lanes, load(to + v * lanes) + sums[v]);
}

// A block's sums are formed before they are added to the row's, which halves the digits that a
// long row loses.
template <int V>
static void summary_block(SummaryTile& t, const KeyBlock& block) {
  const int64_t offset = block.first_vector * lanes;
  const bool given = block.first < t.source.mask.keys;  // extra keys have no position
  Vec log4_factor[V], ahead[V], entropy[V] = {}, distance[V] = {}, placed[V] = {};
  load_lanes(t.log4_factor + offset, log4_factor);
  load_lanes(t.position + offset, ahead);
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) ahead[v] -= static_cast<float>(block.first);
  rebuild_block<V>(t, block, [&](int64_t, int v, Vec exponent, Vec weight) {
    entropy[v] += weight * (exponent + log4_factor[v]);
    distance[v] += weight * (ahead[v] < Vec{} ? -ahead[v] : ahead[v]);
    placed[v] += weight;
    ahead[v] -= 1.0f;
  });
  add_lanes(entropy, t.entropy + offset);
  if (given) {
    add_lanes(distance, t.distance + offset);
    add_lanes(placed, t.placed + offset);
  }
  add_key_sums<V>(t.weights + offset, block.keys, t.received + block.first);
}

static void map_summary(const MapSource& source, const MapSummary& wanted, int64_t index,
                        float* scratch) {
  constexpr float minus_ln4 = -1.38629436111989062f;
  const QueryChunk chunk = query_chunk(source, wanted.chunk, index);
  float* received = wanted.received + index * source.keys;
  for (int64_t j = 0; j < source.keys; ++j) received[j] = 0;
  for (int64_t first = chunk.begin; first < chunk.end; first += tile) {
    const QueryTile at{chunk.n, chunk.h, first, min64(tile, chunk.end - first)};
    const int64_t kv_head = kv_head_of(source, at.h);
    const int64_t row = first_row(source, at);
    SummaryTile t{{source, at, kv_head, {}, {}, {}, {}, {}, {}, {}, {}},
                  wanted,
                  received,
                  {},
                  {},
                  {},
                  {},
                  {}};
    start_map_tile(t, scratch);
    for (int64_t i = 0; i < tile; ++i) {
      t.log4_factor[i] = i < at.count ? wanted.log4_factor[row + i] : 0;
      t.position[i] = static_cast<float>(first + i + wanted.shifts[at.n]);
    }
    walk_keys(source, at, [&](const KeyBlock& block) {
      MHA_FOR_VECTORS(block.vectors, summary_block, t, block);
    });
    for (int64_t i = 0; i < at.count; ++i) {
      wanted.entropy[row + i] = t.entropy[i] * minus_ln4;
      wanted.distance[row + i] = t.distance[i];
      wanted.placed[row + i] = t.placed[i];
    }
  }
}

struct SumsTile : MapTile {
  const MapSums& wanted;
  float* by_key;  // [key]
  float by_query[tile];
};

template <int V>
static void sums_block(SumsTile& t, const KeyBlock& block) {
  const int64_t offset = block.first_vector * lanes;
  rebuild_block<V>(t, block);
  Vec sum[V] = {};
  for (int64_t j = 0; j < block.keys; ++j) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) sum[v] += load(t.weights + j * tile + offset + v * lanes);
  }
  add_lanes(sum, t.by_query + offset);
  add_key_sums<V>(t.weights + offset, block.keys, t.by_key + block.first);
}

static void map_sums(const MapSource& source, const MapSums& wanted, int64_t index,
                     float* scratch) {
  const QueryChunk chunk = query_chunk(source, wanted.chunk, index);
  float* by_key = wanted.by_key + index * source.keys;
  for (int64_t j = 0; j < source.keys; ++j) by_key[j] = 0;
  for (int64_t first = chunk.begin; first < chunk.end; first += tile) {
    const QueryTile at{chunk.n, chunk.h, first, min64(tile, chunk.end - first)};
    const int64_t kv_head = kv_head_of(source, at.h);
    SumsTile t{{source, at, kv_head, {}, {}, {}, {}, {}, {}, {}, {}}, wanted, by_key, {}};
    start_map_tile(t, scratch);
    walk_keys(source, at, [&](const KeyBlock& block) {
      MHA_FOR_VECTORS(block.vectors, sums_block, t, block);
    });
    float* by_query = wanted.by_query + first_row(source, at);
    for (int64_t i = 0; i < at.count; ++i) by_query[i] = t.by_query[i];
  }
}

// ---- Sums over cells of the map.

// The cell of 0 .. cells - 1, as even as they can be, that index i of `size` falls into.
MHA_INLINE int64_t cell_of(int64_t i, int64_t cells, int64_t size) {
  return ((i + 1) * cells - 1) / size;
}

static int64_t map_pool_scratch(const MapSource& source, const MapPool& wanted) {
  return map_scratch(source) + wanted.columns * tile;
}

struct PoolTile : MapTile {
  const MapPool& wanted;
  float* sums;  // [column][tile]
};

template <int V>
static void pool_block(PoolTile& t, const KeyBlock& block) {
  const int64_t offset = block.first_vector * lanes, keys = t.source.keys;
  const int64_t columns = t.wanted.columns;
  rebuild_block<V>(t, block);
  int64_t j = 0;
  while (j < block.keys) {
    const int64_t column = cell_of(block.first + j, columns, keys);
    const int64_t end = min64(block.keys, (column + 1) * keys / columns - block.first);
    Vec sum[V] = {};
    for (; j < end; ++j) {
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) sum[v] += load(t.weights + j * tile + offset + v * lanes);
    }
    add_lanes(sum, t.sums + column * tile + offset);
  }
}

static void map_pool(const MapSource& source, const MapPool& wanted, int64_t index,
                     float* scratch) {
  const QueryChunk chunk = query_chunk(source, wanted.chunk, index);
  float* cells = wanted.sums + index * wanted.chunk_rows * wanted.columns;
  for (int64_t i = 0; i < wanted.chunk_rows * wanted.columns; ++i) cells[i] = 0;
  const int64_t first_cell = cell_of(chunk.begin, wanted.rows, source.queries);
  for (int64_t first = chunk.begin; first < chunk.end; first += tile) {
    const QueryTile at{chunk.n, chunk.h, first, min64(tile, chunk.end - first)};
    const int64_t kv_head = kv_head_of(source, at.h);
    PoolTile t{{source, at, kv_head, {}, {}, {}, {}, {}, {}, {}, {}},
               wanted,
               scratch + map_scratch(source)};
    start_map_tile(t, scratch);
    for (int64_t i = 0; i < wanted.columns * tile; ++i) t.sums[i] = 0;
    walk_keys(source, at, [&](const KeyBlock& block) {
      MHA_FOR_VECTORS(block.vectors, pool_block, t, block);
    });
    for (int64_t i = 0; i < at.count; ++i) {
      float* row = cells + (cell_of(first + i, wanted.rows, source.queries) - first_cell) *
                               wanted.columns;
      for (int64_t c = 0; c < wanted.columns; ++c) row[c] += t.sums[c * tile + i];
    }
  }
}

// ---- The largest numbers of each row.

struct TopTile : MapTile {
  const MapTop& wanted;
  float* values;  // of the tile's first row
  int64_t* keys;
  float threshold[tile];  // a number must be larger to be among the row's largest
  bool unknown[tile];     // the row has a NaN
};

// Rows are heaps with the last in rank at the root. Of equal numbers the earlier key ranks
// first, so a key that comes later must be larger than the root to enter.
MHA_INLINE bool ranks_after(const float* values, const int64_t* keys, int64_t a, int64_t b) {
  return values[a] < values[b] || (values[a] == values[b] && keys[a] > keys[b]);
}

static void sift_down(float* values, int64_t* keys, int64_t count) {
  for (int64_t parent = 0;;) {
    int64_t last = parent;
    for (int64_t child = 2 * parent + 1; child <= 2 * parent + 2; ++child) {
      if (child < count && ranks_after(values, keys, child, last)) last = child;
    }
    if (last == parent) return;
    const float value = values[parent];
    const int64_t key = keys[parent];
    values[parent] = values[last];
    keys[parent] = keys[last];
    values[last] = value;
    keys[last] = key;
    parent = last;
  }
}

template <int V>
static void top_block(TopTile& t, const KeyBlock& block) {
  const int64_t count = t.wanted.count;
  rebuild_block<V>(t, block);
  const auto enter = [&](int64_t lane, int64_t j, float number) {
    t.unknown[lane] |= number != number;
    if (!(number > t.threshold[lane])) return;
    float* values = t.values + lane * count;
    int64_t* keys = t.keys + lane * count;
    values[0] = number;
    keys[0] = block.first + j;
    sift_down(values, keys, count);
    t.threshold[lane] = values[0];
  };
  for (int64_t j = 0; j < block.keys; ++j) {
    for (int v = 0; v < V; ++v) {
      const int64_t lane = (block.first_vector + v) * lanes;
      const Vec number = load(t.weights + j * tile + lane);
      if (!any(~(number <= load(t.threshold + lane)))) continue;  // it may be NaN
      for (int i = 0; i < lanes; ++i) enter(lane + i, j, number[i]);
    }
  }
}

static void map_top(const MapSource& source, const MapTop& wanted, int64_t index,
                    float* scratch) {
  const QueryTile at = query_tile(source.heads, source.queries, index);
  const int64_t count = wanted.count, kv_head = kv_head_of(source, at.h);
  const int64_t row = first_row(source, at);
  TopTile t{{source, at, kv_head, {}, {}, {}, {}, {}, {}, {}, {}},
            wanted,
            wanted.values + row * count,
            wanted.keys + row * count,
            {},
            {}};
  for (int64_t i = 0; i < at.count * count; ++i) {
    t.values[i] = 0;
    t.keys[i] = -1;
  }
  start_map_tile(t, scratch);
  walk_keys(source, at, [&](const KeyBlock& block) {
    MHA_FOR_VECTORS(block.vectors, top_block, t, block);
  });
  for (int64_t i = 0; i < at.count; ++i) {
    float* values = t.values + i * count;
    int64_t* keys = t.keys + i * count;
    const bool unknown = t.unknown[i];
    for (int64_t c = 0; unknown && c < count; ++c) {
      values[c] = __builtin_nanf("");
      keys[c] = -1;
    }
    for (int64_t end = count - 1; end > 0 && !unknown; --end) {
      const float value = values[0];
      const int64_t key = keys[0];
      values[0] = values[end];
      keys[0] = keys[end];
      values[end] = value;
      keys[end] = key;
      sift_down(values, keys, end);
    }
  }
}
