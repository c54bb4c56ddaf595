// Stores that round to a half type, to the nearest, ties to even. Included once per ISA.

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

MHA_INLINE void store(BFloat16* p, Vec v) {
  const Words bits = reinterpret_cast<Words>(v);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words kept = v == v ? rounded : Words{} + 0x7fc0;
  *reinterpret_cast<UnalignedShorts*>(p) = __builtin_convertvector(kept, UnalignedShorts);
}
MHA_INLINE void store(Float16* p, Vec v) {
#if MHA_ISA_AVX512
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(v),
                                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif MHA_ISA_AVX2
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(reinterpret_cast<__m256>(v),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < lanes; ++i) p[i] = to_float16(v[i]);
#endif
}
