// Scores whose sums left float32's range. Included once per ISA (see vec.h).
//
// A score is scale * q . k, held within float32 whatever its sum came to on the way. A sum that
// is infinite or NaN, or beyond the limit, says that it may be wrong; then it is formed again
// in float64. Only what a row may not see is left as it is.

// All ones where a score is in range; NaN is not.
MHA_INLINE IntVec in_range(Vec score) {
  const Vec magnitude = as_float(as_int(score) & 0x7fffffff);
  return magnitude <= broadcast(score_limit);
}

// Whether scores[row][V vectors] are all in range.
template <int V>
static bool all_in_range(const float* scores, int64_t rows, int64_t stride) {
  IntVec out{};
  for (int64_t j = 0; j < rows; ++j, scores += stride) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) out |= ~in_range(load(scores + v * lanes));
  }
  return !any(out);
}

// Whether a lane's largest score is out of range.
template <int V>
MHA_INLINE bool out_of_range(const Vec (&top)[V]) {
  IntVec out{};
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) out |= ~in_range(top[v]);
  return any(out);
}

// Becomes NaN, and stays so, once a score is infinite or NaN.
MHA_INLINE Vec watch(Vec wild, Vec score) {
  return wild + score * 0.0f;
}
template <int V>
MHA_INLINE bool found_wild(const Vec (&wild)[V]) {
  IntVec found{};
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) found |= wild[v] != Vec{};
  return any(found);
}

// Whether a row with this maximum may have scores at the limit that have weight.
MHA_INLINE bool is_near_limit(float maximum) {
  return maximum > score_limit / 2 || maximum < -score_limit / 2;
}

MHA_INLINE bool in_range(float score) {
  return score >= -score_limit && score <= score_limit;
}

template <typename Element>
static bool has_nan(const Element* row, int64_t count) {
  bool found = false;
  for (int64_t i = 0; i < count; ++i) found |= to_float(row[i]) != to_float(row[i]);
  return found;
}

// A sink in the units of scores: any number, so that one of -inf is like none.
MHA_INLINE float sink_score(float sink) {
  return hold(score_limit, broadcast(sink * log4e))[0];
}

// Where the rows of a block's scores lie.
template <typename Query, typename Key>
struct ScoredRows {
  const Query* query;
  int64_t query_stride;
  const Key* key;
  int64_t key_stride, depth;
  float scale;
};

template <typename Key>
MHA_INLINE ScoredRows<float, Key> scored_rows(const FloatScoreArgs& args, const QueryTile& at,
                                              const Key* key, int64_t key_stride) {
  const float* query = args.query.at(at.n, at.h, at.first);
  return {query, args.query.t, key, key_stride, args.head_dim, args.scale};
}

template <typename Query, typename Key>
static float exact_score(const ScoredRows<Query, Key>& rows, int64_t query, int64_t key) {
  const Query* q = rows.query + query * rows.query_stride;
  const Key* k = rows.key + key * rows.key_stride;
  double sum = 0;
  for (int64_t d = 0; d < rows.depth; ++d) {
    sum += static_cast<double>(to_float(q[d])) * static_cast<double>(to_float(k[d]));
  }
  sum *= static_cast<double>(rows.scale);
  const double limit = largest_float;
  return static_cast<float>(sum < -limit ? -limit : sum > limit ? limit : sum) * log4e;
}

// Forms the scores of the block again that are out of range; scores[key][tile]. A row of NaN
// is left alone, since that is what it gives.
template <typename Query, typename Key>
static void settle_scores(const ScoredRows<Query, Key>& rows, const QueryTile& at,
                          const KeyBlock& block, float* scores) {
  const int64_t from = block.first_vector * lanes, to = from + block.vectors * lanes;
  bool unknown[tile];
  for (int64_t i = from; i < min64(to, at.count); ++i) {
    unknown[i] = has_nan(rows.query + i * rows.query_stride, rows.depth);
  }
  for (int64_t j = 0; j < block.keys; ++j) {
    float* row = scores + j * tile;
    bool all_in_range = true;
    for (int64_t i = from; i < to; ++i) all_in_range &= in_range(row[i]);
    if (all_in_range) continue;
    const bool unknown_key = has_nan(rows.key + j * rows.key_stride, rows.depth);
    for (int64_t i = from; i < to; ++i) {
      if (in_range(row[i])) continue;
      if (i >= at.count) {
        row[i] = 0;
      } else if (!unknown_key && !unknown[i]) {
        row[i] = exact_score(rows, i, j);
      }
    }
  }
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
