// From and to the half types. Stores round to the nearest, ties to even. Vectors of Float16
// differ by ISA: see vec_<isa>.h. Included once per ISA (see vec.h).

MHA_INLINE float to_float(float x) {
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
MHA_INLINE BFloat16 to_bfloat16(float x) {
  const uint32_t bits = as_bits(x);
  if (x != x) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
MHA_INLINE Float16 to_float16(float x) {
  const uint32_t bits = as_bits(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude >= 0x47800000) {  // 65536
    half = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  } else if (magnitude < 0x38800000) {  // 2^-14: the sum's last bit is that of a subnormal
    half = as_bits(float_of_bits(magnitude) + 0.5f) - as_bits(0.5f);
  } else {
    half = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}
MHA_INLINE void store_one(float* p, float x) {
  *p = x;
}
MHA_INLINE void store_one(BFloat16* p, float x) {
  *p = to_bfloat16(x);
}
MHA_INLINE void store_one(Float16* p, float x) {
  *p = to_float16(x);
}

MHA_INLINE Vec load(const BFloat16* p) {
  const auto bits = *reinterpret_cast<const UnalignedShorts*>(p);
  return reinterpret_cast<Vec>(__builtin_convertvector(bits, Words) << 16);
}
MHA_INLINE void store(BFloat16* p, Vec v) {
  const Words bits = reinterpret_cast<Words>(v);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words kept = v == v ? rounded : Words{} + 0x7fc0;
  *reinterpret_cast<UnalignedShorts*>(p) = __builtin_convertvector(kept, UnalignedShorts);
}
