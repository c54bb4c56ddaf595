// Scores on tiles, and what masks and options make of them: shared by forward and backward, so
// that both form the same numbers. Included once per ISA (see vec.h).

// Calls function<V>(...) for the number of vectors in a block of tiles.
#define MHA_FOR_TILE_VECTORS(vectors, function, ...) \
  do {                                               \
    if ((vectors) == 2) {                            \
      function<2>(__VA_ARGS__);                      \
    } else {                                         \
      function<1>(__VA_ARGS__);                      \
    }                                                \
  } while (false)

// Where keys lie once they are packed: whole steps of those that the mask speaks of, then those
// of the extra keys.
MHA_INLINE int64_t packed_row(const ScoreArgs& args, int64_t key) {
  const int64_t given = args.mask.keys;
  return key < given ? key : whole_steps(given) * tile_depth + key - given;
}
MHA_INLINE int64_t packed_rows(const ScoreArgs& args) {
  const int64_t given = args.mask.keys;
  return (whole_steps(given) + whole_steps(args.keys - given)) * tile_depth;
}
MHA_INLINE int64_t whole_rows(const KeyBlock& block) {
  return whole_steps(block.keys) * tile_depth;
}

// Calls pack(first, count, row) for every 32 keys.
template <typename Pack>
MHA_INLINE void for_each_key_step(const ScoreArgs& args, const Pack& pack) {
  const int64_t given = args.mask.keys;
  for (int64_t j = 0; j < args.keys;) {
    const int64_t end = min64(j + tile_depth, j < given ? given : args.keys);
    pack(j, end - j, packed_row(args, j));
    j = end;
  }
}

// One tile's scores.
struct TileScores {
  const ScoreArgs& args;
  QueryTile at;
  int64_t kv_head;
  StoredRows query, key;
  BFloat16* packed_query;  // [step][vector], negated for a negative scale
  float* terms;            // scratch
  float factor;            // >= 0, of products, to become scores in units of ln 4
  bool in_range;           // whatever the products, no score leaves float32
};

MHA_INLINE int64_t query_tiles(int64_t dim) {
  return whole_steps(dim) * tile_vectors;
}

// Queries or rows of their kind, a vector of lanes after the other.
MHA_INLINE float pack_queries(const StoredRows& rows, const QueryTile& at, int64_t dim,
                              bool negative, BFloat16* to) {
  const __m512i flip = _mm512_set1_epi16(negative ? INT16_MIN : 0);
  Largest largest;
  for (int v = 0; v < tile_vectors; ++v) {
    const int64_t first = v * lanes, count = max64(0, min64(lanes, at.count - first));
    pack_columns(tile_rows_of(rows, at.n, at.h, at.first + first, count, dim), flip,
                 to + v * tile_size, tile_vectors * tile_size, largest);
  }
  return largest.value();
}

MHA_INLINE void start_scores(TileScores& s, float largest_key) {
  const ScoreArgs& args = s.args;
  const float largest =
      pack_queries(s.query, s.at, args.head_dim, args.scale < 0, s.packed_query);
  s.factor = (args.scale < 0 ? -args.scale : args.scale) * log4e;
  const float sum = largest * largest_key * static_cast<float>(args.head_dim);
  s.in_range =
      s.factor >= 0x1p-126f && sum <= largest_float / 2 && sum * s.factor <= score_limit / 2;
}

template <int V>
static bool all_scores_in_range(const float* scores, int64_t rows) {
  return all_in_range<V>(scores, rows, tile);
}

// What a block holds: products, or scores in units of ln 4.
enum class Held { products, scores };

// log2 of 4^(score - maximum). Scores may be so large that twice of one is infinite; products
// are known not to be.
template <Held What>
MHA_INLINE Vec exponent(Vec held, float factor, Vec maximum) {
  if constexpr (What == Held::products) {
    // Rounded before the difference, as scores are: the same bits.
    Vec twice = held * (2 * factor);
    MHA_PIN(twice);
    return twice - 2.0f * maximum;
  }
  return (held - maximum) * 2.0f;
}

// Makes scores of a block's products, in place, where anything is done to scores. With
// `slopes`, those of cap and limits, if there are any.
template <int V>
static Held finish_scores(const TileScores& s, const KeyBlock& block, float* scores,
                          float* slopes, bool at_limit) {
  const ScoreArgs& args = s.args;
  const bool capped = args.softcap > 0;
  if (s.in_range && !at_limit && !capped && !block.adds && !block.blocks) return Held::products;
  const int64_t offset = block.first_vector * lanes;
  for (int64_t j = 0; j < block.keys; ++j) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      float* place = scores + j * tile + offset + v * lanes;
      store(place, load(place) * s.factor);
    }
  }
  if (!s.in_range && !all_scores_in_range<V>(scores + offset, block.keys)) {
    if (block.blocks) fill_blocked<V>(args.mask, s.at, block, 0.0f, scores);
    settle_scores(
        ScoredRows<BFloat16, BFloat16>{s.query.at<BFloat16>(s.at.n, s.at.h, s.at.first),
                                       s.query.t,
                                       s.key.at<BFloat16>(s.at.n, s.kv_head, block.first),
                                       s.key.t, args.head_dim, args.scale},
        s.at, block, scores);
  }
  if (capped && slopes) {
    cap_scores<V>(args.softcap, block.keys, tile, scores + offset, slopes + offset);
  } else if (capped) {
    cap_scores<V>(args.softcap, block.keys, tile, scores + offset);
  } else if (at_limit) {
    mark_held_scores<V>(scores + offset, block.keys, slopes + offset);
  }
  if (block.adds) {
    add_terms<V>(args.mask, s.at, block, s.terms, scores);
    if (at_limit) mark_held_sums<V>(scores + offset, block.keys, slopes + offset);
  }
  if (block.blocks) fill_blocked<V>(args.mask, s.at, block, -__builtin_inff(), scores);
  return Held::scores;
}
