// bfloat16 by twos, as `Isa::Pairs` multiplies them: each 32-bit place holds two numbers that
// the product sums over, the first in the low half. Included once per ISA (see vec.h).

// Keys lie so already, two dimensions in a place; queries and weights come from floats, and
// values are put side by side once a call, since all tiles of queries read them.

MHA_INLINE int64_t words_of_values(const AttentionForward& args) {
  return (args.keys + 1) / 2 * args.value_dim;
}

static int64_t value_pairs(const AttentionForward& args) {
  return args.batch * args.kv_heads * words_of_values(args);
}

// pairs[j / 2][d] holds value j and value j + 1, zero after the last.
static void pair_values(const AttentionForward& args, int64_t begin, int64_t end,
                        uint32_t* pairs) {
  for (int64_t i = begin; i < end; ++i) {
    uint32_t* to = pairs + i * words_of_values(args);
    for (int64_t j = 0; j < args.keys; j += 2, to += args.value_dim) {
      const auto* low = args.value.at<BFloat16>(i / args.kv_heads, i % args.kv_heads, j);
      const bool both = j + 1 < args.keys;
      const BFloat16* high = both ? low + args.value.t : low;
      for (int64_t d = 0; d < args.value_dim; ++d) {
        const uint32_t upper = both ? high[d].bits : 0;
        to[d] = upper << 16 | low[d].bits;
      }
    }
  }
}

static bool can_dot(const AttentionForward& args) {
  const bool even = args.head_dim % 2 == 0 && args.key.n % 2 == 0 && args.key.h % 2 == 0 &&
                    args.key.t % 2 == 0 &&
                    (args.mask.keys % 2 == 0 || args.mask.keys == args.keys);
  return args.storage == Storage::bfloat16 && args.query_is_bfloat16 && even &&
         !args.row_maximum && Isa::Pairs::can_run();
}

// Rows 2i and 2i + 1 of a tile become row i of `pairs`, which may be the same memory.
template <typename Of, int V>
static void pair_rows(const float* rows, int64_t count, float* pairs) {
  for (int64_t j = 0; j < count; j += 2, rows += 2 * tile, pairs += tile) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const Vec high = j + 1 < count ? load(rows + tile + v * lanes) : Vec{};
      store(pairs + v * lanes, Of::round_to_pairs(load(rows + v * lanes), high));
    }
  }
}
