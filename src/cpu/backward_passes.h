// What the backward does with one block of keys, pass by pass (see attention_backward.h).
// Included once per ISA (see vec.h).

constexpr int wide_rows = Isa::wide_rows, wide_vectors = Isa::wide_vectors;

// Up to so many keys that a tile sees, their weights and gradients are kept.
constexpr int64_t few_keys = 256;

// Rows of floats that lie `stride` apart.
struct FloatRows {
  float* data;
  int64_t stride;
  MHA_INLINE_MEMBER float* at(int64_t row) const { return data + row * stride; }
};
struct GivenRows {
  const float* data;
  int64_t stride;
  MHA_INLINE_MEMBER const float* at(int64_t row) const { return data + row * stride; }
};

// The gradients of a chunk's keys and values, at its first key.
struct KeySums {
  FloatRows key, value;
};

struct BackwardTile {
  const AttentionBackward* args;
  QueryTile at;
  int64_t kv_head;
  bool for_mask;  // the gradient of the mask is wanted, not the others
  KeySpan chunk;  // the keys whose gradients are wanted
  KeySums sums;
  GivenRows query_rows, grad_output_rows;
  float *query, *grad_output;            // [D][tile], [Dv][tile]
  float *weights, *grad_scores, *terms;  // [key][tile]
  float* slopes;                         // [key][tile], with a soft cap or rows at the limit
  float* grad_query;                     // [tile][D]
  bool keeps_all;     // weights and grad_scores hold all keys that the tile sees
  int64_t first_key;  // of those
  float maximum[tile], factor[tile], delta[tile];
  bool at_limit;  // a row's maximum is so large that its scores may be held
  TileDropout dropout;
};

// Keys of weights and grad_scores: a tile that sees few keeps them all, else there is one
// block.
MHA_INLINE int64_t kept_keys(const AttentionBackward& args) {
  return few_keys + args.keys - args.mask.keys;
}

template <int M, int V>
MHA_INLINE void add_product_rows(int64_t depth, const float* a, int64_t a_m, int64_t a_k,
                                 const float* b, int64_t b_k, float* sum, int64_t stride) {
  Vec c[M][V] = {};
  multiply_add<M, V>(depth, a, a_m, a_k, b, b_k, c);
  add_block(c, sum, stride);
}

template <int V>
static void add_product_panel(int64_t rows, int64_t depth, const float* a, int64_t a_m,
                              int64_t a_k, const float* b, int64_t b_k, float* sum,
                              int64_t stride) {
  int64_t m = 0;
  for (; m + wide_rows <= rows; m += wide_rows) {
    add_product_rows<wide_rows, V>(depth, a + m * a_m, a_m, a_k, b, b_k, sum + m * stride,
                                   stride);
  }
  for (; m + 2 <= rows; m += 2) {
    add_product_rows<2, V>(depth, a + m * a_m, a_m, a_k, b, b_k, sum + m * stride, stride);
  }
  for (; m < rows; ++m) {
    add_product_rows<1, V>(depth, a + m * a_m, a_m, a_k, b, b_k, sum + m * stride, stride);
  }
}

// sum[m][c] += a[m * a_m + k * a_k] * b[k][c] over k, for `columns`, a multiple of lanes.
static void add_product(int64_t rows, int64_t columns, int64_t depth, const float* a,
                        int64_t a_m, int64_t a_k, const float* b, int64_t b_k, float* sum,
                        int64_t stride) {
  constexpr int64_t wide = wide_vectors * lanes;
  int64_t c = 0;
  for (; c + wide <= columns; c += wide) {
    add_product_panel<wide_vectors>(rows, depth, a, a_m, a_k, b + c, b_k, sum + c, stride);
  }
  for (; c < columns; c += lanes) {
    add_product_panel<1>(rows, depth, a, a_m, a_k, b + c, b_k, sum + c, stride);
  }
}

// The lane values of one block's vectors, from an array over the tile's lanes.
template <int V>
MHA_INLINE void load_lanes(const float* values, Vec (&v)[V]) {
#pragma GCC unroll 3
  for (int i = 0; i < V; ++i) v[i] = load(values + i * lanes);
}

// Where a block's rows lie in `weights` and `grad_scores`.
MHA_INLINE int64_t block_offset(const BackwardTile& t, const KeyBlock& block) {
  if (!t.keeps_all) return 0;
  const int64_t given = t.args->mask.keys;
  return block.first < given ? (block.first - t.first_key) * tile
                             : (few_keys + block.first - given) * tile;
}

// No gradient flows through a score that is held at the limit.
template <int V>
static void mark_held_scores(const float* scores, int64_t keys, float* slopes) {
  for (int64_t j = 0; j < keys; ++j, scores += tile, slopes += tile) {
    for (int v = 0; v < V; ++v) {
      const Vec score = load(scores + v * lanes);
      const IntVec held = (score >= score_limit) | (score <= -score_limit);
      store(slopes + v * lanes, held ? Vec{} : broadcast(1.0f));
    }
  }
}

// Nor through a sum with added terms, and then none into the terms either: slope -1.
template <int V>
static void mark_held_sums(const float* sums, int64_t keys, float* slopes) {
  for (int64_t j = 0; j < keys; ++j, sums += tile, slopes += tile) {
    for (int v = 0; v < V; ++v) {
      const Vec sum = load(sums + v * lanes);
      const IntVec held = (sum >= score_limit) | (sum <= -score_limit);
      store(slopes + v * lanes, held ? broadcast(-1.0f) : load(slopes + v * lanes));
    }
  }
}

// pass 1 where scores are capped, added to or perhaps out of range.
template <int V>
static void recompute_masked_weights(BackwardTile& t, const KeyBlock& block,
                                     const Vec (&maximum)[V], const Vec (&factor)[V]) {
  const AttentionBackward& args = *t.args;
  const int64_t offset = block.first_vector * lanes;
  const float* key = args.key.at(t.at.n, t.kv_head, block.first);
  float* block_weights = t.weights + block_offset(t, block);
  float* weights = block_weights + offset;
  Vec wild[V] = {};
  for_each_score<V>(key, args.key.t, block.keys, args.head_dim, t.query + offset,
                    [&](int64_t j, int v, Vec c) {
                      wild[v] = watch(wild[v], c);
                      store(weights + j * tile + v * lanes, c);
                    });
  if (t.at_limit || found_wild(wild)) {
    if (block.blocks) fill_blocked<V>(args.mask, t.at, block, 0.0f, block_weights);
    settle_scores(scored_rows(args, t.at, key, args.key.t), t.at, block, block_weights);
  }
  float* slopes = t.slopes + block_offset(t, block) + offset;
  if (args.softcap > 0) {
    cap_scores<V>(args.softcap, block.keys, tile, weights, slopes);
  } else if (t.at_limit) {
    mark_held_scores<V>(weights, block.keys, slopes);
  }
  if (block.adds) {
    add_terms<V>(args.mask, t.at, block, t.terms, block_weights);
    if (t.at_limit) mark_held_sums<V>(weights, block.keys, slopes);
  }
  for (int64_t j = 0; j < block.keys; ++j) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      float* weight = weights + j * tile + v * lanes;
      store(weight, exp4(load(weight) - maximum[v]) * factor[v]);
    }
  }
}

// pass 1
template <int V>
static void recompute_weights(BackwardTile& t, const KeyBlock& block) {
  const AttentionBackward& args = *t.args;
  const int64_t offset = block.first_vector * lanes;
  float* block_weights = t.weights + block_offset(t, block);
  float* weights = block_weights + offset;
  Vec maximum[V], factor[V], wild[V] = {};
  load_lanes(t.maximum + offset, maximum);
  load_lanes(t.factor + offset, factor);

  bool plain = !block.adds && args.softcap <= 0 && !t.at_limit;
  if (plain) {
    for_each_score<V>(args.key.at(t.at.n, t.kv_head, block.first), args.key.t, block.keys,
                      args.head_dim, t.query + offset, [&](int64_t j, int v, Vec c) {
                        wild[v] = watch(wild[v], c);
                        store(weights + j * tile + v * lanes, exp4(c - maximum[v]) * factor[v]);
                      });
    plain = !found_wild(wild);
  }
  if (!plain) recompute_masked_weights<V>(t, block, maximum, factor);
  if (block.blocks) fill_blocked<V>(args.mask, t.at, block, 0.0f, block_weights);
}

template <int V, bool DeltaKnown, bool Drops>
static void weight_gradients_where(BackwardTile& t, const KeyBlock& block) {
  const AttentionBackward& args = *t.args;
  const int64_t offset = block.first_vector * lanes;
  float* weights = t.weights + block_offset(t, block) + offset;
  float* gradients = t.grad_scores + block_offset(t, block) + offset;
  Vec delta[V];
  load_lanes(t.delta + offset, delta);
  for_each_score<V>(args.value.at(t.at.n, t.kv_head, block.first), args.value.t, block.keys,
                    args.value_dim, t.grad_output + offset, [&](int64_t j, int v, Vec c) {
                      const int64_t at = j * tile + v * lanes;
                      IntVec keep{};
                      if constexpr (Drops) {
                        keep = kept(t.dropout, block.first_vector + v, block.first + j,
                                    args.dropout.threshold);
                        c = keep ? c * args.dropout.factor : Vec{};
                      }
                      if constexpr (DeltaKnown) {
                        const Vec weight = load(weights + at);
                        c = weight * (c - delta[v]);
                        if constexpr (Drops) {
                          store(weights + at, keep ? weight * args.dropout.factor : Vec{});
                        }
                      }
                      store(gradients + at, c);
                    });
}

// pass 2, and pass 3 at once where delta is known.
template <int V, bool DeltaKnown>
static void weight_gradients(BackwardTile& t, const KeyBlock& block) {
  if (t.args->dropout.threshold) {
    weight_gradients_where<V, DeltaKnown, true>(t, block);
  } else {
    weight_gradients_where<V, DeltaKnown, false>(t, block);
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
  Vec delta[V];
  load_lanes(t.delta + offset, delta);
  for (int64_t j = 0; j < block.keys; ++j) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const int64_t at = j * tile + v * lanes;
      const Vec given = load(weights + at);
      const Vec weight = given == broadcast(below_one) ? broadcast(1.0f) : given;
      store(weights + at, weight);
      delta[v] += weight * load(grad_weights + at);
    }
  }
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) store(t.delta + offset + v * lanes, delta[v]);
}

// pass 3 by itself
template <int V>
static void score_gradients(BackwardTile& t, const KeyBlock& block) {
  const KernelDropout& dropout = t.args->dropout;
  const int64_t offset = block.first_vector * lanes;
  float* weights = t.weights + block_offset(t, block) + offset;
  float* gradients = t.grad_scores + block_offset(t, block) + offset;
  Vec delta[V];
  load_lanes(t.delta + offset, delta);
  for (int64_t j = 0; j < block.keys; ++j) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const int64_t at = j * tile + v * lanes;
      const Vec weight = load(weights + at);
      store(gradients + at, weight * (load(gradients + at) - delta[v]));
      if (!dropout.threshold) continue;
      const IntVec keep =
          kept(t.dropout, block.first_vector + v, block.first + j, dropout.threshold);
      store(weights + at, keep ? weight * dropout.factor : Vec{});
    }
  }
}

template <int V>
static void drop_held_sums(BackwardTile& t, const KeyBlock& block) {
  const int64_t at = block_offset(t, block) + block.first_vector * lanes;
  for (int64_t j = 0; j < block.keys; ++j) {
    for (int v = 0; v < V; ++v) {
      float* gradient = t.grad_scores + at + j * tile + v * lanes;
      const Vec slope = load(t.slopes + at + j * tile + v * lanes);
      store(gradient, slope < Vec{} ? Vec{} : load(gradient));
    }
  }
}

// The gradient of the terms that the mask adds, as pass 4 of `backward_added`.
template <int V>
static void add_to_mask(BackwardTile& t, const KeyBlock& block) {
  float* gradients = t.grad_scores + block_offset(t, block);
  if (t.at_limit) drop_held_sums<V>(t, block);
  if (block.blocks) fill_blocked<V>(t.args->mask, t.at, block, 0.0f, gradients);
  const Rows<float>& to = t.args->grad_added;
  for (int v = 0; v < V; ++v) {
    const int64_t lane = (block.first_vector + v) * lanes;
    write_block<true>(gradients + lane, block.keys, min64(lanes, t.at.count - lane),
                      broadcast(1.0f), to.at(t.at.n, t.at.h, t.at.first + lane) + block.first,
                      to.t);
  }
}

// pass 4
template <int V>
static void add_products(BackwardTile& t, const KeyBlock& block) {
  const AttentionBackward& args = *t.args;
  const int64_t offset = block.first_vector * lanes;
  const float* weights = t.weights + block_offset(t, block) + offset;
  float* block_gradients = t.grad_scores + block_offset(t, block);
  const float* gradients = block_gradients + offset;
  if (args.softcap > 0 || t.at_limit) {
    multiply_slopes<V>(t.slopes + block_offset(t, block) + offset, block.keys, tile,
                       block_gradients + offset);
  }
  // 0 * NaN is NaN, and the delta of a query that sees NaN is.
  if (block.blocks) fill_blocked<V>(args.mask, t.at, block, 0.0f, block_gradients);

  const int64_t queries = min64(t.at.count - offset, V * lanes);
  const int64_t first = block.first - t.chunk.begin;
  add_product(block.keys, args.value_dim, queries, weights, tile, 1,
              t.grad_output_rows.at(offset), t.grad_output_rows.stride, t.sums.value.at(first),
              t.sums.value.stride);
  add_product(block.keys, args.head_dim, queries, gradients, tile, 1, t.query_rows.at(offset),
              t.query_rows.stride, t.sums.key.at(first), t.sums.key.stride);
  add_product(queries, args.head_dim, block.keys, gradients, 1, tile,
              args.key.at(t.at.n, t.kv_head, block.first), args.key.t,
              t.grad_query + offset * args.head_dim, args.head_dim);
}

// Few keys: passes 1 and 2 with delta's sum, then passes 3 and 4.
template <int V>
static void first_passes(BackwardTile& t, const KeyBlock& block) {
  recompute_weights<V>(t, block);
  weight_gradients<V, false>(t, block);
  // 0 * infinity is NaN, and a blocked value may be so large that its product overflows.
  if (block.blocks) {
    fill_blocked<V>(t.args->mask, t.at, block, 0.0f, t.grad_scores + block_offset(t, block));
  }
  add_to_delta<V>(t, block);
}

// What becomes of the gradients of a block's scores: those of q, k and v, or of the mask. The
// extra keys are none of the mask's.
template <int V>
static void use_gradients(BackwardTile& t, const KeyBlock& block) {
  if (!t.for_mask) {
    add_products<V>(t, block);
  } else if (block.adds) {
    add_to_mask<V>(t, block);
  }
}

template <int V>
static void last_passes(BackwardTile& t, const KeyBlock& block) {
  score_gradients<V>(t, block);
  use_gradients<V>(t, block);
}

template <int V>
static void all_passes(BackwardTile& t, const KeyBlock& block) {
  recompute_weights<V>(t, block);
  weight_gradients<V, true>(t, block);
  use_gradients<V>(t, block);
}
