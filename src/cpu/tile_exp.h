// The numbers of a vector of pairs of bfloat16: of all low halves, of all high ones.
MHA_INLINE Vec low_numbers(Vec pairs) {
  return as_float(as_int(pairs) << 16);
}
MHA_INLINE Vec high_numbers(Vec pairs) {
  constexpr int32_t high_half = -65536;
  return as_float(as_int(pairs) & high_half);
}

// 2^x for weights that are rounded to bfloat16, to 4e-3: in fewer steps than `exp4` takes, by
// AVX-512's own scaling. Included once per ISA (see vec.h).

// Relative error below 3e-6; 0 below -100, where scaling would need the CPU's slow way with
// denormals. NaN gives NaN.
MHA_INLINE Vec short_exp2(Vec x) {
  constexpr int down = 0x09;  // towards -infinity, in silence
  const auto whole = reinterpret_cast<__m512>(x);
  const __mmask16 counts = _mm512_cmp_ps_mask(whole, _mm512_set1_ps(-100.0f), _CMP_NLT_UQ);
  const Vec f = reinterpret_cast<Vec>(_mm512_maskz_reduce_ps(0xffff, whole, down));
  // Minimax for 2^f on [0, 1], relative: 2.6e-6 before rounding.
  Vec p = broadcast(1.3534167911698541e-2f);
  p = p * f + 5.201146061904818e-2f;
  p = p * f + 2.414427568861939e-1f;
  p = p * f + 6.930038344710632e-1f;
  p = p * f + 1.0000025933706653f;
  return reinterpret_cast<Vec>(
      _mm512_maskz_scalef_ps(counts, reinterpret_cast<__m512>(p), whole));
}
