// Scores held within (-softcap, softcap): softcap * tanh(score / softcap). A pass of its own
// over a block of scores, so that calls without it pay nothing. Included once per ISA (see
// vec.h).

struct Tanh {
  Vec value;
  Vec slope;  // 1 - tanh(x)^2, without the cancellation
};

// Relative error below 2e-7, near 0 too: 1 - 2 e / (1 + e) with e = 4^(-2 log4(e) |x|) has so
// many digits from |x| = 1 on, and below an odd polynomial does.
MHA_INLINE Tanh tanh(Vec x) {
  const Vec magnitude = x < Vec{} ? -x : x;
  const Vec e = exp4(magnitude * -(2.0f * log4e));
  const Vec share = e / (e + 1.0f);
  const Vec far = 1.0f - 2.0f * share;
  const Vec square = x * x;
  // Minimax for (tanh(x) / x - 1) / x^2 on [0, 1]: 4.7e-9 of tanh(x) before rounding.
  Vec p = broadcast(-3.5845201455418727e-4f);
  p = p * square + 2.3013646313574565e-3f;
  p = p * square - 7.9461064702840388e-3f;
  p = p * square + 2.1486657590568805e-2f;
  p = p * square - 5.3879802715260251e-2f;
  p = p * square + 1.3332344573001154e-1f;
  p = p * square - 3.3333295431899362e-1f;
  const Vec near = x + x * square * p;
  const Vec signed_far = x < Vec{} ? -far : far;
  return {magnitude < broadcast(1.0f) ? near : signed_far, 4.0f * share / (e + 1.0f)};
}

// Caps scores[row][V vectors], which come and stay multiplied by log4(e), as everywhere.
template <int V>
MHA_APART void cap_scores(float softcap, int64_t rows, int64_t stride, float* scores) {
  const float cap = softcap * log4e, inverse = 1.0f / cap;
  for (int64_t j = 0; j < rows; ++j, scores += stride) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      store(scores + v * lanes, tanh(load(scores + v * lanes) * inverse).value * cap);
    }
  }
}

// The same, and what a gradient of a capped score is multiplied by to become that of the score.
template <int V>
MHA_APART void cap_scores(float softcap, int64_t rows, int64_t stride, float* scores,
                          float* slopes) {
  const float cap = softcap * log4e, inverse = 1.0f / cap;
  for (int64_t j = 0; j < rows; ++j, scores += stride, slopes += stride) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const Tanh t = tanh(load(scores + v * lanes) * inverse);
      store(scores + v * lanes, t.value * cap);
      store(slopes + v * lanes, t.slope);
    }
  }
}

// A slope of -1 stands for 0 (see `mark_held_sums`).
template <int V>
MHA_APART void multiply_slopes(const float* slopes, int64_t rows, int64_t stride,
                               float* gradients) {
  for (int64_t j = 0; j < rows; ++j, slopes += stride, gradients += stride) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const Vec slope = max_keep_nan(Vec{}, load(slopes + v * lanes));
      store(gradients + v * lanes, load(gradients + v * lanes) * slope);
    }
  }
}
