// Attention forward for a few queries over many keys, as in decoding. Included once per ISA.
//
// There the time goes into reading keys and values from memory, so each is read once, for all
// query heads that share it, and the vectors run over the head's dimensions. The keys of a head
// are split into chunks of a fixed length, whatever the number of threads, and the chunks'
// results are merged in order:
//   pass 1  scores of 16 (or as many as there are lanes) keys at a time: products per key, then
//   one
//           transpose turns their sums into a vector
//   pass 2  blocks and added terms, maximum and sum of the chunk
//   pass 3  output = weights V, kept apart for each chunk
//   merge   outputs and sums of all chunks relative to the largest maximum
//
// Source: "Flash-Decoding for long-context inference", Dao et al., 2023.

constexpr int64_t decode_chunk = 256;
constexpr int64_t decode_group = 32;  // keys whose values stay in the first-level cache
constexpr int64_t most_rows = 8;

MHA_INLINE int64_t decode_rows(const AttentionForward& args) {
  return args.heads / args.kv_heads * args.queries;
}

static bool can_decode(const AttentionForward& args) {
  return decode_rows(args) <= most_rows && args.keys > decode_chunk && !args.weights.data &&
         !args.row_maximum && !args.dropout.threshold;
}

MHA_INLINE int64_t decode_chunks(const AttentionForward& args) {
  return ceil_div(args.keys, decode_chunk);
}

// For each row and chunk: maximum, sum, then the output.
MHA_INLINE int64_t partial_size(const AttentionForward& args) {
  return 2 + args.value_dim;
}

static int64_t decode_partials(const AttentionForward& args) {
  return args.batch * args.kv_heads * decode_chunks(args) * decode_rows(args) *
         partial_size(args);
}

// scores[0, lanes) of one query against `count` consecutive keys.
MHA_INLINE Vec decode_scores(const float* query, const float* key, int64_t stride,
                             int64_t count, int64_t dim) {
  Vec sums[lanes];
  const int64_t whole = dim - dim % lanes;
#pragma GCC unroll 16
  for (int j = 0; j < lanes; ++j) {
    const float* row = key + min64(j, count - 1) * stride;
    Vec even = {}, odd = {};
    int64_t d = 0;
    for (; d + 2 * lanes <= whole; d += 2 * lanes) {
      even += load(query + d) * load(row + d);
      odd += load(query + d + lanes) * load(row + d + lanes);
    }
    if (d < whole) even += load(query + d) * load(row + d);
    sums[j] = even + odd;
  }
  transpose_step<lanes / 2>(sums);
  Vec scores = sums[0];
#pragma GCC unroll 16
  for (int j = 1; j < lanes; ++j) scores += sums[j];
  for (int64_t d = whole; d < dim; ++d) {
    for (int64_t j = 0; j < count; ++j) scores[j] += query[d] * key[j * stride + d];
  }
  return scores;
}

// output[d] += weights[j] * value[j][d] over `count` keys.
MHA_INLINE void decode_output(const float* weights, const float* value, int64_t stride,
                              int64_t count, int64_t dim, float* output) {
  int64_t d = 0;
  for (; d + 4 * lanes <= dim; d += 4 * lanes) {
    Vec c[1][4];
    load_block(output + d, 0, c);
    multiply_add<1, 4>(count, weights, 0, 1, value + d, stride, c);
    store_block(output + d, 0, c);
  }
  for (; d + lanes <= dim; d += lanes) {
    Vec c[1][1];
    load_block(output + d, 0, c);
    multiply_add<1, 1>(count, weights, 0, 1, value + d, stride, c);
    store_block(output + d, 0, c);
  }
  for (; d < dim; ++d) {
    for (int64_t j = 0; j < count; ++j) output[d] += weights[j] * value[j * stride + d];
  }
}

// pass 2 for one row: -inf where the key is blocked.
static void decode_mask(const AttentionForward& args, const QueryTile& t, int64_t query,
                        int64_t first, int64_t count, float* scores) {
  const KernelMask& mask = args.mask;
  const uint64_t* pair_bits = nullptr;
  if (mask.pair_bits) {
    const int64_t plane = t.n * mask.pair_plane_n + t.h * mask.pair_plane_h;
    pair_bits = mask.pair_bits + plane * ceil_div(args.queries, tile) * mask.keys;
  }
  for (int64_t j = 0; j < count; ++j) {
    const int64_t key = first + j;
    if (key >= mask.keys) break;  // the extra keys are open
    if (mask.added.data) {
      const float sum = scores[j] + mask.added.at(t.n, t.h, query)[key] * log2e;
      scores[j] = sum < lowest ? lowest : sum;
    }
    const bool in_length = !mask.lengths || key < mask.lengths[t.n];
    const bool open = in_length && (open_lanes(mask, t, key, pair_bits) >> query & 1);
    if (!open) scores[j] = -__builtin_inff();
  }
}

// pass 2 for one row: scores become weights; gives their maximum and sum.
static void decode_softmax(float* scores, int64_t count, float* maximum, float* sum) {
  const Vec minus_infinity = broadcast(-__builtin_inff());
  for (int64_t j = count; j < decode_chunk; ++j) scores[j] = -__builtin_inff();
  Vec top = minus_infinity;
  for (int64_t j = 0; j < decode_chunk; j += lanes) top = max_drop_nan(top, load(scores + j));
  float largest = top[0];
  for (int i = 1; i < lanes; ++i) largest = top[i] > largest ? top[i] : largest;
  *maximum = largest;
  const Vec from = broadcast(largest == -__builtin_inff() ? 0.0f : largest);
  Vec total = {};
  for (int64_t j = 0; j < decode_chunk; j += lanes) {
    const Vec score = load(scores + j);
    const Vec weight = score == minus_infinity ? Vec{} : exp2(score - from);
    store(scores + j, weight);
    total += weight;
  }
  *sum = total[0];
  for (int i = 1; i < lanes; ++i) *sum += total[i];
}

static void decode_task(const AttentionForward& args, int64_t index, float* scratch,
                        float* partials) {
  const int64_t chunks = decode_chunks(args), rows = decode_rows(args);
  const int64_t n = index / chunks / args.kv_heads, kv_head = index / chunks % args.kv_heads;
  const int64_t first = index % chunks * decode_chunk;
  const int64_t count = min64(decode_chunk, args.keys - first);
  const int64_t group = args.heads / args.kv_heads, dim = args.head_dim;
  float* queries = scratch;  // [row][dim], scaled
  float* scores = queries + rows * dim;
  const float factor = args.scale * log2e;
  for (int64_t r = 0; r < rows; ++r) {
    const float* query = args.query.at(n, kv_head * group + r / args.queries, r % args.queries);
    for (int64_t d = 0; d < dim; ++d) queries[r * dim + d] = query[d] * factor;
  }
  for (int64_t j = 0; j < count; j += lanes) {
    const float* key = args.key.at(n, kv_head, first + j);
    for (int64_t r = 0; r < rows; ++r) {
      store(scores + r * decode_chunk + j,
            decode_scores(queries + r * dim, key, args.key.t, min64(lanes, count - j), dim));
    }
  }
  const KernelMask& mask = args.mask;
  const bool open = !mask.lengths && !mask.keep_keys && !mask.pair_bits && !mask.added.data &&
                    mask.low <= first - (args.queries - 1) && mask.high >= first + count - 1;
  float* partial = partials + index * rows * partial_size(args);
  for (int64_t r = 0; r < rows; ++r, partial += partial_size(args)) {
    float* row = scores + r * decode_chunk;
    const QueryTile t{n, kv_head * group + r / args.queries, 0, args.queries};
    if (!open) decode_mask(args, t, r % args.queries, first, count, row);
    decode_softmax(row, count, partial, partial + 1);
    for (int64_t d = 0; d < args.value_dim; ++d) partial[2 + d] = 0;
  }
  for (int64_t j = 0; j < count; j += decode_group) {
    const float* value = args.value.at(n, kv_head, first + j);
    partial = partials + index * rows * partial_size(args);
    for (int64_t r = 0; r < rows; ++r, partial += partial_size(args)) {
      decode_output(scores + r * decode_chunk + j, value, args.value.t,
                    min64(decode_group, count - j), args.value_dim, partial + 2);
    }
  }
}

static int64_t decode_scratch(const AttentionForward& args) {
  return decode_rows(args) * (args.head_dim + decode_chunk);
}

static void decode(const AttentionForward& args, int64_t begin, int64_t end, float* scratch,
                   float* partials) {
  for (int64_t i = begin; i < end; ++i) decode_task(args, i, scratch, partials);
}

static void merge_decoded(const AttentionForward& args, const float* partials) {
  const int64_t chunks = decode_chunks(args), rows = decode_rows(args),
                size = partial_size(args);
  const int64_t group = args.heads / args.kv_heads;
  for (int64_t head = 0; head < args.batch * args.kv_heads; ++head) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* first = partials + (head * chunks * rows + r) * size;
      float maximum = -__builtin_inff();
      for (int64_t c = 0; c < chunks; ++c) {
        const float m = first[c * rows * size];
        maximum = m > maximum ? m : maximum;
      }
      float* output =
          args.output.at(head / args.kv_heads, head % args.kv_heads * group + r / args.queries,
                         r % args.queries);
      for (int64_t d = 0; d < args.value_dim; ++d) output[d] = 0;
      float sum = 0;
      for (int64_t c = 0; c < chunks; ++c) {
        const float* partial = first + c * rows * size;
        if (partial[1] == 0) continue;  // the chunk is blocked
        const float factor =
            partial[0] == maximum ? 1.0f : exp2(broadcast(partial[0] - maximum))[0];
        sum += partial[1] * factor;
        for (int64_t d = 0; d < args.value_dim; ++d) output[d] += partial[2 + d] * factor;
      }
      const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
      for (int64_t d = 0; d < args.value_dim; ++d) output[d] *= inverse;
    }
  }
}
