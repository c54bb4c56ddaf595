// Which blocks of keys a tile of queries needs, and the masks inside a block. Shared by the
// forward and the backward kernels. Included once per ISA (see vec.h).

constexpr float log2e = 1.44269504088896341f;
constexpr float lowest = -3.402823466e+38f;

// Up to `tile` queries of one head.
struct QueryTile {
  int64_t n, h, first, count;
};

MHA_INLINE QueryTile query_tile(int64_t heads, int64_t queries, int64_t index) {
  const int64_t tiles = ceil_div(queries, tile);
  const int64_t first = index % tiles * tile;
  return {index / tiles / heads, index / tiles % heads, first, min64(tile, queries - first)};
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

// Puts `filler` where a pair of the block is blocked; values[key][query] with rows `tile`
// apart.
template <int V>
static void fill_blocked(const KernelMask& mask, const QueryTile& t, const KeyBlock& block,
                         float filler, float* values) {
  IntVec lane_bit;
  for (int i = 0; i < lanes; ++i) lane_bit[i] = 1 << i;
  const Vec fill = broadcast(filler);
  const SampleBand band = band_of(mask, t.n);
  for (int64_t j = 0; j < block.keys; ++j) {
    const uint64_t bits = open_lanes(mask, band, t, block.first + j, block.pair_bits);
    float* row = values + j * tile + block.first_vector * lanes;
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const auto slice =
          static_cast<int32_t>((bits >> ((block.first_vector + v) * lanes)) & 0xffff);
      const IntVec open = (lane_bit & slice) != 0;
      store(row + v * lanes, open ? load(row + v * lanes) : fill);
    }
  }
}

// scores += added * log2(e), held at the lowest finite number, since a sum of large finite
// terms must not turn into a block. `terms` is scratch for one block.
template <int V>
static void add_terms(const KernelMask& mask, const QueryTile& t, const KeyBlock& block,
                      float* terms, float* scores) {
  const int64_t first_lane = block.first_vector * lanes;
  const int64_t count = min64(t.count - first_lane, V * lanes);
  transpose(mask.added.at(t.n, t.h, t.first + first_lane) + block.first, mask.added.t, count,
            block.keys, terms, tile);
  for (int64_t j = 0; j < block.keys; ++j) {
    float* row = scores + j * tile + first_lane;
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const Vec sum = load(row + v * lanes) + load(terms + j * tile + v * lanes) * log2e;
      store(row + v * lanes, max_keep_nan(broadcast(lowest), sum));
    }
  }
}

// Whether the key mask leaves all, none or some of the keys.
MHA_INLINE uint8_t keys_class(const KernelMask& mask, int64_t n, int64_t first, int64_t keys) {
  if (!mask.keep_keys) return pairs_open;
  const uint8_t* keep = mask.keep_keys + n * mask.keep_keys_n + first;
  int64_t open = 0;
  for (int64_t j = 0; j < keys; ++j) open += keep[j] != 0;
  return open == 0 ? pairs_closed : open == keys ? pairs_open : pairs_mixed;
}

// The keys, of those that the mask speaks of, among which are all that the tile may attend to.
struct KeySpan {
  int64_t begin, end;
};

MHA_INLINE KeySpan key_span(const KernelMask& mask, const QueryTile& t) {
  const int64_t limit = mask.lengths ? min64(mask.keys, mask.lengths[t.n]) : mask.keys;
  const SampleBand band = band_of(mask, t.n);
  // An even key, since bfloat16 takes keys by twos.
  const int64_t begin = max64(0, t.first + band.low) & ~int64_t{1};
  return {begin, max64(begin, min64(limit, t.first + t.count + band.high))};
}

// Calls visit(block) for every block of keys in which a query of the tile may attend to a key,
// in ascending order; `keys` counts the extra keys after those that the mask speaks of.
template <typename Visit>
MHA_INLINE void walk_keys(const KernelMask& mask, const QueryTile& t, int64_t queries,
                          int64_t keys, const Visit& visit) {
  const int64_t last = t.first + t.count - 1, vectors = ceil_div(t.count, lanes);
  const KeySpan span = key_span(mask, t);
  const SampleBand band = band_of(mask, t.n);
  const bool adds = mask.added.data != nullptr;
  const uint64_t* pair_bits = nullptr;
  const uint8_t* pair_classes = nullptr;
  if (mask.pair_bits) {
    const int64_t plane = t.n * mask.pair_plane_n + t.h * mask.pair_plane_h;
    const int64_t row = plane * ceil_div(queries, tile) + t.first / tile;
    pair_bits = mask.pair_bits + row * mask.keys;
    pair_classes = mask.pair_classes + row * ceil_div(mask.keys, key_block);
  }
  int64_t k = span.begin;
  while (k < span.end) {
    int64_t count = min64(key_block - k % key_block, span.end - k);
    const uint8_t pairs = pair_classes ? pair_classes[k / key_block] : pairs_open;
    const uint8_t given = keys_class(mask, t.n, k, count);
    if (pairs != pairs_closed && given != pairs_closed) {
      const uint64_t* bits = pairs == pairs_mixed ? pair_bits : nullptr;
      const bool inside = k - last >= band.low && k + count - 1 - t.first <= band.high;
      if (inside) {
        visit(KeyBlock{k, count, 0, vectors, adds, bits || given == pairs_mixed, bits});
      } else {
        // At the edge of the band, in short steps and only for the vectors that see some of it.
        constexpr int64_t step = 16;
        count = min64(step - k % step, span.end - k);
        const int64_t from = max64(0, k - band.high - t.first) / lanes;
        const int64_t to = min64(vectors - 1, (k + count - 1 - band.low - t.first) / lanes);
        visit(KeyBlock{k, count, from, to - from + 1, adds, true, bits});
      }
    }
    k += count;
  }
  for (k = mask.keys; k < keys; k += key_block) {
    visit(KeyBlock{k, min64(key_block, keys - k), 0, vectors, false, false, nullptr});
  }
}
