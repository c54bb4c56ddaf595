// A vector of floats on the compiler's vector types, and what is the same for every instruction
// set. vec_<isa>.h says how many `lanes` it has, includes this and adds what differs.
//
// Included once per ISA, inside that ISA's namespace, as everything here is: nothing may be
// shared between translation units, or the linker could keep one ISA's copy for all.

typedef float Vec __attribute__((vector_size(lanes * 4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(lanes * 4), may_alias));
typedef uint32_t Words __attribute__((vector_size(lanes * 4), may_alias));
typedef uint16_t UnalignedShorts __attribute__((vector_size(lanes * 2), may_alias, aligned(2)));
// Two bytes, not four: pairs of bfloat16 are moved as floats, and their rows may start anywhere.
typedef float UnalignedVec __attribute__((vector_size(lanes * 4), may_alias, aligned(2)));

#define MHA_INLINE static inline __attribute__((always_inline))
// A loop that needs all registers is a function of its own: inlined, the compiler keeps other
// values in them.
#define MHA_APART static __attribute__((noinline))
#define MHA_INLINE_MEMBER inline __attribute__((always_inline))

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

MHA_INLINE Vec load(const float* p) {
  return *reinterpret_cast<const UnalignedVec*>(p);
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

// For a set that does not multiply bfloat16 by twos.
struct NoPairs {
  static constexpr bool exist = false;
  static constexpr bool can_run() { return false; }
};

#include "half_types.h"
