// What tiles_amx.h and `BFloat16Pairs` do, on any CPU with AVX-512 and bit for bit: for tests.
// Included once per ISA (see vec.h).

// Rounds to bfloat16, where denormals count as zero.
struct EmulatedPairs {
  static __m512i rounded(Vec x) {
    const auto bits = reinterpret_cast<__m512i>(x);
    const __m512i sign = _mm512_and_si512(bits, _mm512_set1_epi32(INT32_MIN));
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(INT32_MAX));
    const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum =
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
    const __mmask16 denormal =
        _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(0x00800000));
    const __mmask16 nan = _mm512_cmpgt_epu32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    __m512i result = _mm512_mask_mov_epi32(sum, denormal, sign);
    result = _mm512_mask_or_epi32(result, nan, bits, _mm512_set1_epi32(0x00400000));
    return _mm512_maskz_srli_epi32(0xffff, result, 16);
  }

  static Vec round(Vec first, Vec second) {
    const __m256i low = _mm512_cvtepi32_epi16(rounded(first));
    const __m256i high = _mm512_cvtepi32_epi16(rounded(second));
    return reinterpret_cast<Vec>(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
  static Vec round_to_pairs(Vec low, Vec high) {
    return reinterpret_cast<Vec>(
        _mm512_or_si512(rounded(low), _mm512_slli_epi32(rounded(high), 16)));
  }
};

struct EmulatedTiles {
  static constexpr int64_t row_bytes = 64, rows = 16;

  struct alignas(64) Tile {
    uint32_t words[16][16];
  };
  static Tile& tile_at(int index) {
    static thread_local Tile tiles[8];
    return tiles[index];
  }
  // Tiles hold what cannot be a result, so that one that was not loaded shows.
  static void forget() {
    for (int t = 0; t < 8; ++t) __builtin_memset(&tile_at(t), 0xff, sizeof(Tile));
  }

  static void start() { forget(); }
  static void stop() { forget(); }

  template <int T>
  static void zero() {
    __builtin_memset(&tile_at(T), 0, sizeof(Tile));
  }
  template <int T>
  static void load(const void* from, int64_t stride) {
    for (int64_t m = 0; m < rows; ++m) {
      __builtin_memcpy(tile_at(T).words[m], static_cast<const char*>(from) + m * stride,
                       row_bytes);
    }
  }
  template <int T>
  static void store(void* to, int64_t stride) {
    for (int64_t m = 0; m < rows; ++m) {
      __builtin_memcpy(static_cast<char*>(to) + m * stride, tile_at(T).words[m], row_bytes);
    }
  }

  // Even and odd places are summed apart over k, each product and sum rounded once, then both
  // and C are added. Denormals count as zero on the way in and out.
  __attribute__((noinline)) static void product(Tile& c, const Tile& a, const Tile& b) {
    constexpr unsigned flush_and_ignore_denormals = 0x8040, all_masked = 0x1f80;
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(all_masked | flush_and_ignore_denormals);
    __asm__ volatile("" : : "r"(&a), "r"(&b), "r"(&c) : "memory");  // nothing is loaded before
    for (int m = 0; m < rows; ++m) {
      __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
      for (int k = 0; k < rows; ++k) {
        const __m512i pair_a = _mm512_set1_epi32(static_cast<int32_t>(a.words[m][k]));
        const __m512i pair_b = _mm512_load_si512(b.words[k]);
        const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
        even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pair_a, 16)),
                               _mm512_castsi512_ps(_mm512_slli_epi32(pair_b, 16)), even);
        odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(pair_a, high)),
                              _mm512_castsi512_ps(_mm512_and_si512(pair_b, high)), odd);
      }
      const __m512 sum = _mm512_add_ps(even, odd);
      _mm512_store_ps(c.words[m], _mm512_add_ps(_mm512_load_ps(c.words[m]), sum));
    }
    __asm__ volatile("" : : "r"(&c) : "memory");  // all is stored
    _mm_setcsr(mode);
  }
  template <int C, int A, int B>
  static void multiply_add() {
    product(tile_at(C), tile_at(A), tile_at(B));
  }
};
