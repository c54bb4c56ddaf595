// Which blocks of keys a tile of queries needs, and the masks inside a block. Shared by the
// forward and the backward kernels. Included once per ISA (see vec.h).

// Scores are held in units of ln 4, in which float32 has room for all that it can hold without:
// in those of ln 2, three numbers in ten would become infinite.
constexpr float log4e = 1.44269504088896341f / 2;
constexpr float largest_float = 3.402823466e+38f, score_limit = largest_float * log4e;

// Up to `tile` queries of one head.
struct QueryTile {
  int64_t n, h, first, count;
};

MHA_INLINE QueryTile query_tile(int64_t heads, int64_t queries, int64_t index) {
  const int64_t tiles = ceil_div(queries, tile);
  const int64_t first = index % tiles * tile;
  return {index / tiles / heads, index / tiles % heads, first, min64(tile, queries - first)};
}

// The key/value head that a head of queries reads.
MHA_INLINE int64_t kv_head_of(const ScoreArgs& args, int64_t head) {
  return head / (args.heads / args.kv_heads);
}

// The row of (N, H, L) that is the tile's first.
MHA_INLINE int64_t first_row(const ScoreArgs& args, const QueryTile& t) {
  return (t.n * args.heads + t.h) * args.queries + t.first;
}

// Puts the tile's queries, times `factor`, into its lanes: to[D][tile].
MHA_INLINE void transpose_queries(const FloatScoreArgs& args, const QueryTile& t, float factor,
                                  float* to) {
  transpose_in(args.query.at(t.n, t.h, t.first), args.query.t, t.count, args.head_dim, factor,
               to, tile);
}

// low <= key - query <= high for the queries of one sample.
struct SampleBand {
  int64_t low, high;
};

MHA_INLINE SampleBand band_of(const KernelMask& mask, int64_t n) {
  return {mask.lows ? mask.lows[n] : mask.low, mask.highs ? mask.highs[n] : mask.high};
}

// Keys [first, first + keys) against the lanes of vectors [first_vector, first_vector +
// vectors).
struct KeyBlock {
  int64_t first, keys, first_vector, vectors;
  bool adds;                  // the mask adds terms here
  bool blocks;                // some pairs are blocked
  const uint64_t* pair_bits;  // of the whole row of keys, where the block needs them
};

// Calls function<V>(...) for the number of vectors in a block.
#define MHA_FOR_VECTORS(vectors, function, ...) \
  do {                                          \
    if ((vectors) == 3) {                       \
      function<3>(__VA_ARGS__);                 \
    } else if ((vectors) == 2) {                \
      function<2>(__VA_ARGS__);                 \
    } else {                                    \
      function<1>(__VA_ARGS__);                 \
    }                                           \
  } while (false)

// Bit i is set where query first + i of the tile may attend to `key`.
MHA_INLINE uint64_t open_lanes(const KernelMask& mask, const SampleBand& band,
                               const QueryTile& t, int64_t key, const uint64_t* pair_bits) {
  if (mask.keep_keys && !mask.keep_keys[t.n * mask.keep_keys_n + key]) return 0;
  const int64_t from = key - band.high - t.first, to = key - band.low - t.first;  // inclusive
  if (to < 0 || from >= 64) return 0;
  uint64_t bits = ~uint64_t{0};
  if (from > 0) bits &= ~uint64_t{0} << from;
  if (to < 63) bits &= (uint64_t{1} << (to + 1)) - 1;
  return pair_bits ? bits & pair_bits[key] : bits;
}

// Whether some of `queries` queries may be kept from one of the keys [first, first + count).
MHA_INLINE bool some_blocked(const KernelMask& mask, int64_t n, int64_t queries, int64_t first,
                             int64_t count) {
  const SampleBand band = band_of(mask, n);
  return mask.key_documents || mask.keep_keys || mask.pair_bits ||
         (mask.lengths && first + count > mask.lengths[n]) ||
         band.low > first - (queries - 1) || band.high < first + count - 1;
}

// Whether query first + i of the tile may attend to `key`, of those that the mask speaks of.
MHA_INLINE bool is_open(const KernelMask& mask, const SampleBand& band, const QueryTile& t,
                        int64_t i, int64_t key, const uint64_t* pair_bits) {
  const bool in_length = !mask.lengths || key < mask.lengths[t.n];
  const bool together = !mask.key_documents ||
                        mask.key_documents[t.n * mask.key_documents_n + key] ==
                            mask.query_documents[t.n * mask.query_documents_n + t.first + i];
  return in_length && together && (open_lanes(mask, band, t, key, pair_bits) >> i & 1);
}

// The documents of the tile's queries.
MHA_INLINE const int32_t* documents_of(const KernelMask& mask, const QueryTile& t) {
  return mask.query_documents + t.n * mask.query_documents_n + t.first;
}

// Puts `filler` where a pair of the block is blocked; values[key][query] with rows `tile`
// apart.
template <int V>
static void fill_blocked(const KernelMask& mask, const QueryTile& t, const KeyBlock& block,
                         float filler, float* values) {
  IntVec lane_bit;
  for (int i = 0; i < lanes; ++i) lane_bit[i] = 1 << i;
  const Vec fill = broadcast(filler);
  const SampleBand band = band_of(mask, t.n);
  IntVec documents[V] = {};
  if (mask.key_documents) {
    const int32_t* of_tile = documents_of(mask, t) + block.first_vector * lanes;
    __builtin_memcpy(documents, of_tile, sizeof(documents));
  }
  for (int64_t j = 0; j < block.keys; ++j) {
    const uint64_t bits = open_lanes(mask, band, t, block.first + j, block.pair_bits);
    float* row = values + j * tile + block.first_vector * lanes;
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const auto slice =
          static_cast<int32_t>((bits >> ((block.first_vector + v) * lanes)) & 0xffff);
      IntVec open = (lane_bit & slice) != 0;
      if (mask.key_documents) {
        open &=
            documents[v] == mask.key_documents[t.n * mask.key_documents_n + block.first + j];
      }
      store(row + v * lanes, open ? load(row + v * lanes) : fill);
    }
  }
}

// The terms that the mask adds to a block's scores, at terms[key][lane], with zeros in the
// lanes after the last query.
template <int V>
static void read_terms(const Rows<const float>& added, const QueryTile& t,
                       const KeyBlock& block, float* terms) {
  const int64_t first_lane = block.first_vector * lanes;
  const int64_t count = min64(t.count - first_lane, V * lanes);
  transpose(added.at(t.n, t.h, t.first + first_lane) + block.first, added.t, count, block.keys,
            terms, tile);
  if (count == V * lanes) return;
  for (int64_t j = 0; j < block.keys; ++j) {
    for (int64_t i = count; i < V * lanes; ++i) terms[j * tile + i] = 0;
  }
}

// Floats of scratch for the terms of one block.
constexpr int64_t terms_size = 2 * key_block * tile;

// scores += terms * log4(e). The terms' sum and the scores' are held, since large finite ones
// must neither become a block nor NaN.
template <int V>
static void add_terms(const KernelMask& mask, const QueryTile& t, const KeyBlock& block,
                      float* terms, float* scores) {
  float* others = terms + key_block * tile;
  bool first = true;
  for (const auto& list : mask.added) {
    if (!list.data) continue;
    read_terms<V>(list, t, block, first ? terms : others);
    for (int64_t j = 0; j < block.keys && !first; ++j) {
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) {
        const int64_t at = j * tile + v * lanes;
        store(terms + at, hold(largest_float, load(terms + at) + load(others + at)));
      }
    }
    first = false;
  }
  for (int64_t j = 0; j < block.keys; ++j) {
    float* row = scores + j * tile + block.first_vector * lanes;
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const Vec term = load(terms + j * tile + v * lanes);
      store(row + v * lanes, hold(score_limit, load(row + v * lanes) + term * log4e));
    }
  }
}

// From the lowest to the highest number of a document.
struct DocumentRange {
  int32_t low, high;
};

MHA_INLINE DocumentRange document_range(const int32_t* documents, int64_t count) {
  DocumentRange range{documents[0], documents[0]};
  for (int64_t i = 1; i < count; ++i) {
    range.low = documents[i] < range.low ? documents[i] : range.low;
    range.high = documents[i] > range.high ? documents[i] : range.high;
  }
  return range;
}

// Whether the tile's documents are those of all, none or perhaps some of the keys.
MHA_INLINE uint8_t documents_class(const KernelMask& mask, const QueryTile& t,
                                   const DocumentRange& queries, int64_t first, int64_t keys) {
  if (!mask.key_documents) return pairs_open;
  const DocumentRange range =
      document_range(mask.key_documents + t.n * mask.key_documents_n + first, keys);
  if (range.high < queries.low || range.low > queries.high) return pairs_closed;
  const bool one = range.low == range.high && queries.low == queries.high;
  return one && range.low == queries.low ? pairs_open : pairs_mixed;
}

// Vectors [from, to].
struct VectorSpan {
  int64_t from, to;
};

// Without the vectors at both ends whose documents are none of those of the keys.
static VectorSpan documents_span(const KernelMask& mask, const QueryTile& t, int64_t first,
                                 int64_t keys, VectorSpan span) {
  const DocumentRange range =
      document_range(mask.key_documents + t.n * mask.key_documents_n + first, keys);
  const auto sees = [&](int64_t vector) {
    const int32_t* of_lanes = documents_of(mask, t) + vector * lanes;
    for (int i = 0; i < lanes; ++i) {
      if (of_lanes[i] >= range.low && of_lanes[i] <= range.high) return true;
    }
    return false;
  };
  while (span.from <= span.to && !sees(span.from)) ++span.from;
  while (span.from <= span.to && !sees(span.to)) --span.to;
  return span;
}

// Whether the key mask leaves all, none or some of the keys.
MHA_INLINE uint8_t keys_class(const KernelMask& mask, int64_t n, int64_t first, int64_t keys) {
  if (!mask.keep_keys) return pairs_open;
  const uint8_t* keep = mask.keep_keys + n * mask.keep_keys_n + first;
  int64_t open = 0;
  for (int64_t j = 0; j < keys; ++j) open += keep[j] != 0;
  return open == 0 ? pairs_closed : open == keys ? pairs_open : pairs_mixed;
}

// The keys, of those that the mask speaks of, among which are all that the tile may attend to;
// from a multiple of `key_step` on.
struct KeySpan {
  int64_t begin, end;
};

MHA_INLINE KeySpan key_span(const KernelMask& mask, const QueryTile& t) {
  const int64_t limit = mask.lengths ? min64(mask.keys, mask.lengths[t.n]) : mask.keys;
  const SampleBand band = band_of(mask, t.n);
  int64_t begin = max64(0, t.first + band.low),
          end = min64(limit, t.first + t.count + band.high);
  if (mask.key_documents) {
    const int64_t row = t.n * mask.query_documents_n + t.first;
    int64_t first = mask.keys, last = 0;
    for (int64_t i = 0; i < t.count; ++i) {
      first = min64(first, mask.document_begins[row + i]);
      last = max64(last, mask.document_ends[row + i]);
    }
    begin = max64(begin, first);
    end = min64(end, last);
  }
  begin &= ~(key_step - 1);
  return {begin, max64(begin, end)};
}

// Calls visit(block) for every block of keys in which a query of the tile may attend to a key,
// in ascending order, the extra keys last.
template <typename Visit>
MHA_INLINE void walk_keys(const ScoreArgs& args, const QueryTile& t, const Visit& visit) {
  const KernelMask& mask = args.mask;
  const int64_t last = t.first + t.count - 1, vectors = ceil_div(t.count, lanes);
  const KeySpan span = key_span(mask, t);
  const SampleBand band = band_of(mask, t.n);
  bool adds = false;
  for (const auto& list : mask.added) adds |= list.data != nullptr;
  const DocumentRange documents =
      mask.key_documents ? document_range(documents_of(mask, t), t.count) : DocumentRange{};
  const uint64_t* pair_bits = nullptr;
  const uint8_t* pair_classes = nullptr;
  if (mask.pair_bits) {
    const int64_t plane = t.n * mask.pair_plane_n + t.h * mask.pair_plane_h;
    const int64_t row = plane * ceil_div(args.queries, tile) + t.first / tile;
    pair_bits = mask.pair_bits + row * mask.keys;
    pair_classes = mask.pair_classes + row * ceil_div(mask.keys, key_block);
  }
  // The keys that the band leaves to all queries, in whole steps.
  const int64_t full_begin = (last + band.low + key_step - 1) & ~(key_step - 1);
  const int64_t full_end = (t.first + band.high + 1) & ~(key_step - 1);
  int64_t k = span.begin;
  while (k < span.end) {
    int64_t end = min64(k - k % key_block + key_block, span.end);
    if (k < full_begin) {
      end = min64(end, full_begin);
    } else if (k < full_end) {
      end = min64(end, full_end);
    }
    const uint8_t pairs = pair_classes ? pair_classes[k / key_block] : pairs_open;
    const uint8_t given = keys_class(mask, t.n, k, end - k);
    const uint8_t together = documents_class(mask, t, documents, k, end - k);
    if (pairs != pairs_closed && given != pairs_closed && together != pairs_closed) {
      const uint64_t* bits = pairs == pairs_mixed ? pair_bits : nullptr;
      if (k >= full_begin && k < full_end && together == pairs_open) {
        visit(KeyBlock{k, end - k, 0, vectors, adds, bits || given == pairs_mixed, bits});
      } else {
        // At the edge of the band or of a document, in short steps and only for the vectors
        // that see some of it.
        constexpr int64_t short_step = key_step > 16 ? key_step : 16;
        end = min64(k + short_step, end);
        VectorSpan some{max64(0, k - band.high - t.first) / lanes,
                        min64(vectors - 1, (end - 1 - band.low - t.first) / lanes)};
        if (mask.key_documents) some = documents_span(mask, t, k, end - k, some);
        if (some.from <= some.to) {
          visit(KeyBlock{k, end - k, some.from, some.to - some.from + 1, adds, true, bits});
        }
      }
    }
    k = end;
  }
  for (k = mask.keys; k < args.keys; k += key_block) {
    visit(KeyBlock{k, min64(key_block, args.keys - k), 0, vectors, false, false, nullptr});
  }
}
