// bfloat16 by twos, as AVX512_BF16 multiplies them: each 32-bit place holds two numbers that
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

#if MHA_ISA_AVX512

static bool can_dot(const AttentionForward& args) {
  const bool even = args.head_dim % 2 == 0 && args.key.n % 2 == 0 && args.key.h % 2 == 0 &&
                    args.key.t % 2 == 0 &&
                    (args.mask.keys % 2 == 0 || args.mask.keys == args.keys);
  return args.storage == Storage::bfloat16 && args.query_is_bfloat16 && even &&
         !args.row_maximum && __builtin_cpu_supports("avx512bf16");
}

// Rounds two vectors to bfloat16, one after the other.
MHA_INLINE __m512i narrow(Vec first, Vec second) {
  __m512i both;
  __asm__("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(second), "v"(first));
  return both;
}

// Rounds two vectors to bfloat16, `low` into the low halves.
MHA_INLINE Vec pair(Vec low, Vec high) {
  alignas(64) static constexpr uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                     21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                     11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return reinterpret_cast<Vec>(
      _mm512_permutexvar_epi16(_mm512_load_si512(order), narrow(low, high)));
}

// Rows 2i and 2i + 1 of a tile become row i of `pairs`, which may be the same memory.
template <int V>
static void pair_rows(const float* rows, int64_t count, float* pairs) {
  for (int64_t j = 0; j < count; j += 2, rows += 2 * tile, pairs += tile) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const Vec high = j + 1 < count ? load(rows + tile + v * lanes) : Vec{};
      store(pairs + v * lanes, pair(load(rows + v * lanes), high));
    }
  }
}

#else

static bool can_dot(const AttentionForward&) {
  return false;
}

template <int V>
static void pair_rows(const float* rows, int64_t count, float* pairs);  // for no caller

#endif
