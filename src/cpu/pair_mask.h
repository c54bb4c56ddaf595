// Pair masks as bits. Included once per ISA (see vec.h).

constexpr uint8_t pairs_closed = 0, pairs_open = 1, pairs_mixed = 2;

// Packs one plane, allowed[query * stride + key] (0 blocks), for `attention_forward`: a word
// for each (tile, key) with a bit for each query of the tile, and a class for each (tile, key
// block). A mask plane is shared by many heads, and a closed block costs them nothing.
static void pack_pairs(const uint8_t* allowed, int64_t stride, int64_t queries, int64_t keys,
                       uint64_t* bits, uint8_t* classes) {
  for (int64_t first = 0; first < queries; first += tile, bits += keys) {
    const int64_t count = min64(tile, queries - first);
    for (int64_t j = 0; j < keys; ++j) bits[j] = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* row = allowed + (first + i) * stride;
      for (int64_t j = 0; j < keys; ++j) bits[j] |= static_cast<uint64_t>(row[j] != 0) << i;
    }
    const uint64_t full = (uint64_t{1} << count) - 1;
    for (int64_t j = 0; j < keys; j += key_block) {
      uint64_t in_all = full, in_any = 0;
      for (int64_t b = j; b < min64(j + key_block, keys); ++b) {
        in_all &= bits[b];
        in_any |= bits[b];
      }
      *classes++ = in_any == 0 ? pairs_closed : in_all == full ? pairs_open : pairs_mixed;
    }
  }
}
