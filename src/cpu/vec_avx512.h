// AVX-512 F, VL, DQ and BW: 32 registers; and AVX512_BF16 where it is faster. Included once
// per ISA (see vec.h, and vec_generic.h on what each part is for).

constexpr int lanes = 16;

#include "vec.h"

// Products of bfloat16 by twos: a lane holds two numbers, the first in its low half, and the
// product sums over both. As assembly, since only a part of the CPUs with AVX-512 has it.
struct BFloat16Pairs {
  static constexpr bool exist = true, pairs = true;

  // Intel's CPUs multiply pairs in every second cycle and floats in each twice: half the rate.
  MHA_INLINE_MEMBER static bool can_run() {
    return __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel");
  }

  MHA_INLINE_MEMBER static Vec add_product(Vec sum, Vec x, Vec y) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    return sum;
  }

  // Rounds two vectors to bfloat16, one after the other.
  MHA_INLINE_MEMBER static Vec round(Vec first, Vec second) {
    Vec both;
    __asm__("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(second), "v"(first));
    return both;
  }

  // The same, `low` into the low halves.
  MHA_INLINE_MEMBER static Vec round_to_pairs(Vec low, Vec high) {
    alignas(64) static constexpr uint16_t order[32] = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return reinterpret_cast<Vec>(_mm512_permutexvar_epi16(
        _mm512_load_si512(order), reinterpret_cast<__m512i>(round(low, high))));
  }

  // Two rows of bfloat16 become pairs of one number of each, within quarters of a vector.
  MHA_INLINE_MEMBER static void pair_quarters(Vec& a, Vec& b) {
    const auto even = reinterpret_cast<__m512i>(a), odd = reinterpret_cast<__m512i>(b);
    a = reinterpret_cast<Vec>(_mm512_unpacklo_epi16(even, odd));
    b = reinterpret_cast<Vec>(_mm512_unpackhi_epi16(even, odd));
  }

  // Puts what was summed over such pairs in the order of the rows.
  MHA_INLINE_MEMBER static void order_quarters(Vec& a, Vec& b) {
    const Vec first =
        __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    b = __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30,
                                31);
    a = first;
  }
};

struct Avx512 {
  static constexpr int tile_vectors = 3, micro_rows = 8;
  static constexpr int64_t key_block = 96, key_step = 2;
  static constexpr int wide_rows = 6, wide_vectors = 4;
  static constexpr int held_vectors = 4, value_sums = 16;
  static constexpr bool holds_value_rows = true;
  using Pairs = BFloat16Pairs;
};

// Unmasked, g++ 12 warns of a value that the intrinsic leaves undefined.
MHA_INLINE Vec load(const Float16* p) {
  return reinterpret_cast<Vec>(
      _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
MHA_INLINE void store(Float16* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(v),
                                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

MHA_INLINE bool any(IntVec v) {
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(v)) != 0;
}

MHA_INLINE void stream(float* to, Vec v) {
  _mm512_stream_ps(to, reinterpret_cast<__m512>(v));
}
