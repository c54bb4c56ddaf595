// Included once per ISA (see vec.h).

// Whether none of `count` floats is NaN or infinite.
static bool all_finite(const float* values, int64_t count) {
  // x - x is 0 for a finite x and NaN otherwise, and NaN stays in a sum.
  Vec sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const Vec x = load(values + i + v * lanes);
      sum[v] += x - x;
    }
  }
  Vec total = sum[0] + sum[1] + sum[2] + sum[3];
  for (; i < count; ++i) total[0] += values[i] - values[i];
  return !any(total != Vec{});
}
