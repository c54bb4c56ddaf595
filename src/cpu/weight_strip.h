// The weights of one tile, kept until they can be normalised, and their way into rows. Included
// once per ISA (see vec.h).

// A block whose weights lie in the strip, relative to the maximum that was then current.
struct StripBlock {
  int64_t first, keys, first_vector, vectors;
  float maximum[tile];
};

struct WeightStrip {
  float* weights;  // [key][tile]
  StripBlock* blocks;
  int64_t count;
};

// A tile's key blocks are key_block long, 16 at the edges of the band, and shorter only at
// ends.
MHA_INLINE int64_t most_blocks(int64_t keys) {
  return ceil_div(keys, 16) + 4;
}

static int64_t strip_size(int64_t keys) {
  constexpr int64_t block_floats = sizeof(StripBlock) / sizeof(float);
  return keys * tile + most_blocks(keys) * block_floats;
}

MHA_INLINE void start_strip(WeightStrip& strip, int64_t keys, float* scratch) {
  strip.weights = scratch;
  strip.blocks = reinterpret_cast<StripBlock*>(scratch + keys * tile);
  strip.count = 0;
}

MHA_INLINE void remember_block(WeightStrip& strip, const KeyBlock& block,
                               const float* maximum) {
  StripBlock& kept = strip.blocks[strip.count++];
  kept.first = block.first;
  kept.keys = block.keys;
  kept.first_vector = block.first_vector;
  kept.vectors = block.vectors;
  for (int i = 0; i < tile; ++i) kept.maximum[i] = maximum[i];
}

MHA_INLINE bool is_aligned(const float* p) {
  return reinterpret_cast<uintptr_t>(p) % (lanes * sizeof(float)) == 0;
}

// rows[i][0, keys) for one vector of queries: factor times the transposed strip. Written past
// the caches where it can be: a map is larger than they are, and reading its lines before
// overwriting them would cost as much again.
template <bool Add>
static void write_block(const float* strip, int64_t keys, int64_t count, Vec factor,
                        float* rows, int64_t stride) {
  const bool aligned = is_aligned(rows) && (count == 1 || is_aligned(rows + stride));
  int64_t j = 0;
  for (; j + lanes <= keys; j += lanes) {
    Vec r[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) r[i] = load(strip + (j + i) * tile) * factor;
    transpose_step<lanes / 2>(r);
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) {
      if (i >= count) break;
      float* to = rows + i * stride + j;
      if constexpr (Add) {
        store(to, load(to) + r[i]);
      } else if (aligned) {
        stream(to, r[i]);
      } else {
        store(to, r[i]);
      }
    }
  }
  for (; j < keys; ++j) {
    for (int64_t i = 0; i < count; ++i) {
      const float weight = strip[j * tile + i] * factor[i];
      float& to = rows[i * stride + j];
      to = Add ? to + weight : weight;
    }
  }
}

// rows[i][0, keys) = factor * weights, or += with `add`, for the tile's queries; 0 where no
// block was visited. `inverse` is 1 / sum in each lane.
static void write_weights(const WeightStrip& strip, const QueryTile& t, int64_t keys,
                          const float* maximum, const Vec* inverse, float factor, bool add,
                          float* rows, int64_t stride) {
  const auto clear = [&](int64_t from, int64_t to, int64_t first_lane, int64_t last_lane) {
    if (add) return;
    for (int64_t i = first_lane; i < min64(last_lane, t.count); ++i) {
      for (int64_t j = from; j < to; ++j) rows[i * stride + j] = 0;
    }
  };
  int64_t done = 0;
  for (int64_t b = 0; b < strip.count; ++b) {
    const StripBlock& block = strip.blocks[b];
    const int64_t end = block.first + block.keys;
    const int64_t end_vector = block.first_vector + block.vectors;
    clear(done, block.first, 0, tile);
    clear(block.first, end, 0, block.first_vector * lanes);
    clear(block.first, end, end_vector * lanes, tile);
    for (int64_t v = block.first_vector; v < end_vector; ++v) {
      // Maxima are integers but where added terms are huge, so this is a power of four.
      const Vec then = load(block.maximum + v * lanes), now = load(maximum + v * lanes);
      const Vec rescale = then == now ? broadcast(1.0f) : exp4(then - now);
      const Vec blocked = broadcast(-__builtin_inff());
      const Vec by = then == blocked ? Vec{} : rescale * inverse[v] * factor;
      const float* from = strip.weights + block.first * tile + v * lanes;
      float* to = rows + v * lanes * stride + block.first;
      const int64_t count = min64(lanes, t.count - v * lanes);
      if (add) {
        write_block<true>(from, block.keys, count, by, to, stride);
      } else {
        write_block<false>(from, block.keys, count, by, to, stride);
      }
    }
    done = end;
  }
  clear(done, keys, 0, tile);
}
