// Which weights dropout keeps: a hash of (seed, row, key), so that nothing is stored between
// the forward and the backward, and no thread or tile can change it. Included once per ISA.

typedef uint32_t UIntVec __attribute__((vector_size(lanes * 4), may_alias));
typedef uint32_t UnalignedUIntVec
    __attribute__((vector_size(lanes * 4), may_alias, aligned(4)));

// Two words for a row of weights, row = (n * heads + h) * queries + query: splitmix64.
struct RowKey {
  uint32_t first, second;
};

MHA_INLINE RowKey row_key(uint64_t seed, uint64_t row) {
  uint64_t x = seed + (row + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)};
}

// 32 random bits; T is uint32_t or a vector of them. A two-round multiply and xor-shift hash,
// keyed before and between the rounds.
template <typename T>
MHA_INLINE T random_bits(T first, T second, uint32_t key) {
  T x = first + key * 0x9e3779b1u;
  x ^= x >> 16;
  x *= 0x21f0aaadu;
  x ^= x >> 15;
  x = (x ^ second) * 0xd35a2d97u;
  return x ^ (x >> 15);
}

// The keys of a tile's rows, in its lanes.
struct TileDropout {
  uint32_t first[tile], second[tile];
};

MHA_INLINE void start_dropout(TileDropout& dropout, uint64_t seed, int64_t first_row,
                              int64_t count) {
  for (int64_t i = 0; i < tile; ++i) {
    const RowKey key = row_key(seed, static_cast<uint64_t>(first_row + min64(i, count - 1)));
    dropout.first[i] = key.first;
    dropout.second[i] = key.second;
  }
}

// All ones in the lanes of vector `v` whose weight for `key` is kept.
MHA_INLINE IntVec kept(const TileDropout& dropout, int64_t v, int64_t key, uint32_t threshold) {
  const UIntVec first = *reinterpret_cast<const UnalignedUIntVec*>(dropout.first + v * lanes);
  const UIntVec second = *reinterpret_cast<const UnalignedUIntVec*>(dropout.second + v * lanes);
  return random_bits(first, second, static_cast<uint32_t>(key)) >= threshold;
}

// The factors of whole rows, for the plain path: `factor` where kept, 0 elsewhere.
static void dropout_factors(uint64_t seed, int64_t first_row, int64_t rows, int64_t keys,
                            uint32_t threshold, float factor, float* factors) {
  for (int64_t i = 0; i < rows; ++i) {
    const RowKey key = row_key(seed, static_cast<uint64_t>(first_row + i));
    for (int64_t j = 0; j < keys; ++j) {
      const uint32_t bits = random_bits(key.first, key.second, static_cast<uint32_t>(j));
      factors[i * keys + j] = bits >= threshold ? factor : 0.0f;
    }
  }
}
