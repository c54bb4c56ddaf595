// Normalised queries and keys. Included once per ISA (see vec.h).

constexpr int64_t norm_tokens = 64;  // of one task, for all heads

// In vectors first: half the roundings of one running sum, and a fraction of its time.
MHA_INLINE float sum_of(const float* x, int64_t count) {
  Vec sums{};
  int64_t d = 0;
  for (; d + lanes <= count; d += lanes) sums += load(x + d);
  float sum = 0;
  for (int i = 0; i < lanes; ++i) sum += sums[i];
  for (; d < count; ++d) sum += x[d];
  return sum;
}
MHA_INLINE float sum_of_squares(const float* x, float mean, int64_t count) {
  Vec sums{};
  int64_t d = 0;
  for (; d + lanes <= count; d += lanes) {
    const Vec centred = load(x + d) - mean;
    sums += centred * centred;
  }
  float sum = 0;
  for (int i = 0; i < lanes; ++i) sum += sums[i];
  for (; d < count; ++d) sum += (x[d] - mean) * (x[d] - mean);
  return sum;
}

static void normalise(const NormArgs& args, int64_t index) {
  const int64_t chunks = ceil_div(args.tokens, norm_tokens), n = index / chunks;
  const int64_t begin = index % chunks * norm_tokens;
  const int64_t end = min64(begin + norm_tokens, args.tokens), count = args.head_dim;
  const float share = 1.0f / static_cast<float>(count);
  for (int64_t h = 0; h < args.heads; ++h) {
    for (int64_t t = begin; t < end; ++t) {
      float* x = args.rows.at(n, h, t);
      const float mean = args.centred ? sum_of(x, count) * share : 0.0f;
      const float variance = sum_of_squares(x, mean, count) * share;
      const float factor = 1.0f / __builtin_sqrtf(variance + args.eps);
      int64_t d = 0;
      for (; d + lanes <= count; d += lanes) {
        const Vec bias = args.bias ? load(args.bias + d) : Vec{};
        store(x + d, (load(x + d) - mean) * factor * load(args.gain + d) + bias);
      }
      for (; d < count; ++d) {
        x[d] = (x[d] - mean) * factor * args.gain[d] + (args.bias ? args.bias[d] : 0.0f);
      }
    }
  }
}
