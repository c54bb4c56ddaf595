// AVX2, FMA and F16C: 16 registers. Included once per ISA (see vec.h, and vec_generic.h on what
// each part is for).

constexpr int lanes = 8;

#include "vec.h"

struct Avx2 {
  static constexpr int tile_vectors = 3, micro_rows = 4;
  static constexpr int64_t key_block = 96, key_step = 2;
  static constexpr int wide_rows = 6, wide_vectors = 2;
  static constexpr int held_vectors = 2, value_sums = 8;
  static constexpr bool holds_value_rows = false;
  using Pairs = NoPairs;
};

MHA_INLINE Vec load(const Float16* p) {
  return reinterpret_cast<Vec>(
      _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
MHA_INLINE void store(Float16* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(reinterpret_cast<__m256>(v),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

MHA_INLINE bool any(IntVec v) {
  return _mm256_movemask_ps(reinterpret_cast<__m256>(v)) != 0;
}

MHA_INLINE void stream(float* to, Vec v) {
  _mm256_stream_ps(to, reinterpret_cast<__m256>(v));
}
