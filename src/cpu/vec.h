// A vector of floats as wide as the ISA that this translation unit is compiled for, on the
// compiler's vector types. Included once per ISA, inside that ISA's namespace: nothing here may
// be shared between translation units, or the linker could keep one ISA's copy for all.

#if MHA_ISA_AVX512
constexpr int lanes = 16;
#elif MHA_ISA_AVX2
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif

typedef float Vec __attribute__((vector_size(lanes * 4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(lanes * 4), may_alias));
typedef uint32_t Words __attribute__((vector_size(lanes * 4), may_alias));
typedef uint16_t UnalignedShorts __attribute__((vector_size(lanes * 2), may_alias, aligned(2)));
typedef float UnalignedVec __attribute__((vector_size(lanes * 4), may_alias, aligned(4)));

#define MHA_INLINE static inline __attribute__((always_inline))
// A loop that needs all registers is a function of its own: inlined, the compiler keeps other
// values in them.
#define MHA_APART static __attribute__((noinline))
#define MHA_INLINE_MEMBER inline __attribute__((always_inline))

MHA_INLINE float to_float(float x) {
  return x;
}
MHA_INLINE uint32_t as_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
MHA_INLINE float float_of_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
MHA_INLINE float to_float(BFloat16 x) {
  return float_of_bits(static_cast<uint32_t>(x.bits) << 16);
}
MHA_INLINE float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  // The exponent's bias grows by 112; infinities and NaN keep the largest exponent.
  if (magnitude >= 0x7c00u << 13) return float_of_bits(sign | magnitude | 0x7f800000);
  return float_of_bits(sign | as_bits(float_of_bits(magnitude) * 0x1p112f));
}

MHA_INLINE Vec load(const float* p) {
  return *reinterpret_cast<const UnalignedVec*>(p);
}
MHA_INLINE Vec load(const BFloat16* p) {
  const auto bits = *reinterpret_cast<const UnalignedShorts*>(p);
  return reinterpret_cast<Vec>(__builtin_convertvector(bits, Words) << 16);
}
MHA_INLINE Vec load(const Float16* p) {
#if MHA_ISA_AVX512
  // Unmasked, g++ 12 warns of a value that the intrinsic leaves undefined.
  return reinterpret_cast<Vec>(
      _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif MHA_ISA_AVX2
  return reinterpret_cast<Vec>(
      _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  Vec v;
  for (int i = 0; i < lanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}
MHA_INLINE void store(float* p, Vec v) {
  *reinterpret_cast<UnalignedVec*>(p) = v;
}
MHA_INLINE Vec broadcast(float x) {
  return x - Vec{};
}
MHA_INLINE Vec as_float(IntVec v) {
  return reinterpret_cast<Vec>(v);
}
MHA_INLINE IntVec as_int(Vec v) {
  return reinterpret_cast<IntVec>(v);
}

// Keeps a value in a register: the compiler would else fold its load into every use, which
// halves the rate of a kernel that uses it eight times.
#if defined(__x86_64__)
#define MHA_PIN(v) __asm__("" : "+v"(v))
#else
#define MHA_PIN(v) __asm__("" : "+w"(v))
#endif

// The larger of two; where `x` is NaN, NaN.
MHA_INLINE Vec max_keep_nan(Vec floor, Vec x) {
  return x < floor ? floor : x;
}
// The nearest to `x` of [-limit, limit]; where `x` is NaN, NaN.
MHA_INLINE Vec hold(float limit, Vec x) {
  x = max_keep_nan(broadcast(-limit), x);
  return x > broadcast(limit) ? broadcast(limit) : x;
}
// The larger of two; where `x` is NaN, `floor`.
MHA_INLINE Vec max_drop_nan(Vec floor, Vec x) {
  return x > floor ? x : floor;
}

// Whether a comparison holds in any lane.
MHA_INLINE bool any(IntVec v) {
#if MHA_ISA_AVX512
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(v)) != 0;
#elif MHA_ISA_AVX2
  return _mm256_movemask_ps(reinterpret_cast<__m256>(v)) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < lanes; ++i) found |= v[i];
  return found != 0;
#endif
}

// Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
constexpr float round_magic = 12582912.0f;

// 4^x for x <= 63.5, relative error below 2e-7; 0 below -63.25. NaN gives NaN: the integer part
// becomes a factor, since added to a NaN's exponent it could make it finite.
MHA_INLINE Vec exp4(Vec x) {
  x = max_keep_nan(broadcast(-63.5f), x);
  const Vec shifted = x * 2.0f + (round_magic + 127.0f);
  const Vec f = x * 2.0f - (shifted - (round_magic + 127.0f));
  // Minimax for 2^f on [-1/2, 1/2] with the constant term fixed to 1: 9.1e-8 before rounding.
  Vec p = broadcast(1.326472888795078e-3f);
  p = p * f + 9.6715136371645e-3f;
  p = p * f + 5.5507337483344e-2f;
  p = p * f + 2.4022242070193947e-1f;
  p = p * f + 6.931469775906092e-1f;
  p = p * f + 1.0f;
  return p * as_float(as_int(shifted) << 23);
}

// x rounded up to an integer (to within one for |x| > 2^22).
MHA_INLINE Vec ceil(Vec x) {
  const Vec rounded = (x + round_magic) - round_magic;
  return rounded < x ? rounded + 1.0f : rounded;
}

MHA_INLINE int64_t min64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
MHA_INLINE int64_t max64(int64_t a, int64_t b) {
  return a > b ? a : b;
}
MHA_INLINE int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
