// The softmax over keys that come block by block, of a tile's rows. Included once per ISA (see
// vec.h).
//
// Source: Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018.

// Scores are in units of ln 4. Maxima are integers, so that a step of one multiplies by a power
// of four, exactly.
struct RunningSoftmax {
  float* output;  // [Dv][tile]
  bool started;   // whether output holds sums
  float maximum[tile], sum[tile];
};

// The sink is a score that was seen before all others. Null: none.
static void start_rows(RunningSoftmax& rows, const float* sink) {
  const Vec score = broadcast(sink ? sink_score(*sink) : -__builtin_inff());
  const Vec maximum = sink ? ceil(score) : score;
  const Vec sum = sink ? exp4(score - maximum) : Vec{};
  for (int v = 0; v < tile_vectors; ++v) {
    store(rows.maximum + v * lanes, maximum);
    store(rows.sum + v * lanes, sum);
  }
}

static void clear_output(RunningSoftmax& rows, int64_t value_dim) {
  for (int64_t i = 0; i < value_dim * tile; i += lanes) store(rows.output + i, Vec{});
}

// Moves the running maximum to cover `top`, but only once a lane rose by more than `slack`:
// until then weights grow up to 4^slack, which costs no precision.
template <int V>
MHA_INLINE void raise_maximum(RunningSoftmax& rows, int64_t value_dim, const Vec (&top)[V],
                              int64_t first_vector) {
  constexpr float slack = 4.0f;
  const Vec minus_infinity = broadcast(-__builtin_inff());
  Vec factor[V];
  bool moved = false;
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) {
    float* maximum = rows.maximum + (first_vector + v) * lanes;
    const Vec old = load(maximum);
    const IntVec rises = top[v] > old + slack;
    moved = moved || any(rises & (old != minus_infinity));
    const Vec now = rises ? max_drop_nan(broadcast(-largest_float), ceil(top[v])) : old;
    store(maximum, now);
    // Where nothing was seen before, the sum and output are 0 whatever the factor.
    factor[v] = rises ? (old == minus_infinity ? Vec{} : exp4(old - now)) : broadcast(1.0f);
  }
  if (!moved) return;
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) {
    float* sum = rows.sum + (first_vector + v) * lanes;
    store(sum, load(sum) * factor[v]);
  }
  if (!rows.started) return;
  for (int64_t d = 0; d < value_dim; ++d) {
    float* row = rows.output + d * tile + first_vector * lanes;
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) store(row + v * lanes, load(row + v * lanes) * factor[v]);
  }
}

// What the rows' sums are divided by, as a factor: a lane without any open key or sink has sum
// 0 and gives 0.
MHA_INLINE void inverse_sums(const RunningSoftmax& rows, Vec (&inverse)[tile_vectors]) {
  for (int v = 0; v < tile_vectors; ++v) {
    const Vec sum = load(rows.sum + v * lanes);
    inverse[v] = sum == Vec{} ? Vec{} : 1.0f / sum;
  }
}

// For the backward: weight = 4^(score - maximum) * factor.
MHA_INLINE void keep_statistics(const RunningSoftmax& rows, int64_t count, float* maximum,
                                float* factor) {
  for (int64_t i = 0; i < count; ++i) {
    const bool dead = rows.sum[i] == 0;
    maximum[i] = dead ? 0 : rows.maximum[i];
    factor[i] = dead ? 0 : 1.0f / rows.sum[i];
  }
}

// Any thread may, with the same number. Null: nobody asks.
MHA_INLINE void mark_not_finite(int32_t* place) {
  if (place) __atomic_store_n(place, 1, __ATOMIC_RELAXED);
}
