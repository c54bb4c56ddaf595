// Rotary positions. Included once per ISA (see vec.h).

// Tokens of one task: their rows of the table stay in the first-level cache for all heads.
constexpr int64_t rotary_tokens = 64;

template <typename T>
MHA_INLINE void turn_one(const T* a, const T* b, float cosine, float sine, T* a_out, T* b_out) {
  const float x = to_float(*a), y = to_float(*b);
  store_one(a_out, x * cosine - y * sine);
  store_one(b_out, y * cosine + x * sine);
}

// `sign` * sine: -1 turns back, which is the transposed rotation.
template <typename T>
MHA_INLINE void turn_halves(const T* from, const float* row, int64_t pairs, float sign, T* to) {
  int64_t i = 0;
  for (; i + lanes <= pairs; i += lanes) {
    const Vec x = load(from + i), y = load(from + pairs + i);
    const Vec cosine = load(row + i), sine = sign * load(row + pairs + i);
    store(to + i, x * cosine - y * sine);
    store(to + pairs + i, y * cosine + x * sine);
  }
  for (; i < pairs; ++i) {
    turn_one(from + i, from + pairs + i, row[i], sign * row[pairs + i], to + i, to + pairs + i);
  }
}

// The even and the odd elements of two vectors side by side, and the way back.
template <size_t... I>
MHA_INLINE void split_pairs(Vec& a, Vec& b, std::index_sequence<I...>) {
  const Vec even = __builtin_shufflevector(a, b, (2 * I)...);
  const Vec odd = __builtin_shufflevector(a, b, (2 * I + 1)...);
  a = even;
  b = odd;
}
template <size_t... I>
MHA_INLINE void join_pairs(Vec& a, Vec& b, std::index_sequence<I...>) {
  const Vec low = __builtin_shufflevector(a, b, (I / 2 + (I % 2) * lanes)...);
  const Vec high = __builtin_shufflevector(a, b, (lanes / 2 + I / 2 + (I % 2) * lanes)...);
  a = low;
  b = high;
}

template <typename T>
MHA_INLINE void turn_neighbours(const T* from, const float* row, int64_t pairs, float sign,
                                T* to) {
  constexpr auto every_lane = std::make_index_sequence<lanes>{};
  int64_t i = 0;
  for (; i + lanes <= pairs; i += lanes) {
    Vec x = load(from + 2 * i), y = load(from + 2 * i + lanes);
    split_pairs(x, y, every_lane);
    const Vec cosine = load(row + i), sine = sign * load(row + pairs + i);
    Vec a = x * cosine - y * sine, b = y * cosine + x * sine;
    join_pairs(a, b, every_lane);
    store(to + 2 * i, a);
    store(to + 2 * i + lanes, b);
  }
  for (; i < pairs; ++i) {
    turn_one(from + 2 * i, from + 2 * i + 1, row[i], sign * row[pairs + i], to + 2 * i,
             to + 2 * i + 1);
  }
}

template <typename T>
static void rotate_tokens(const RotaryArgs& args, int64_t n, int64_t begin, int64_t end) {
  const int64_t* positions = args.positions + n * args.positions_n;
  const float sign = args.back ? -1.0f : 1.0f;
  for (int64_t h = 0; h < args.heads; ++h) {
    for (int64_t t = begin; t < end; ++t) {
      const T* from = args.input.template at<T>(n, h, t);
      T* to = static_cast<T*>(args.output) + n * args.output_n + h * args.output_h +
              t * args.output_t;
      const float* row = args.table + positions[t] * 2 * args.pairs;
      if (args.interleaved) {
        turn_neighbours(from, row, args.pairs, sign, to);
      } else {
        turn_halves(from, row, args.pairs, sign, to);
      }
      if (from == to) continue;
      for (int64_t d = 2 * args.pairs; d < args.head_dim; ++d) to[d] = from[d];
    }
  }
}

static void rotate(const RotaryArgs& args, int64_t index) {
  const int64_t chunks = ceil_div(args.tokens, rotary_tokens), n = index / chunks;
  const int64_t begin = index % chunks * rotary_tokens;
  const int64_t end = min64(begin + rotary_tokens, args.tokens);
  switch (args.storage) {
    case Storage::float32:
      return rotate_tokens<float>(args, n, begin, end);
    case Storage::bfloat16:
      return rotate_tokens<BFloat16>(args, n, begin, end);
    case Storage::float16:
      return rotate_tokens<Float16>(args, n, begin, end);
  }
}
