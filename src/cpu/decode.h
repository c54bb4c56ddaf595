// Attention forward for a few queries over many keys, as in decoding. Included once per ISA.
//
// There the time goes into reading keys and values from memory, so each is read once, for all
// query heads that share it, and the vectors run over the head's dimensions. The keys of a head
// are split into chunks of a fixed length, whatever the number of threads, and the chunks'
// results are merged in order:
//   pass 1  scores of some keys at a time: products per key, then one transpose turns their
//           sums into a vector
//   pass 2  soft cap, blocks and added terms, maximum and sum of the chunk
//   pass 3  output = weights V, kept apart for each chunk
//   merge   outputs and sums of all chunks relative to the largest maximum
//
// Source: "Flash-Decoding for long-context inference", Dao et al., 2023.

constexpr int64_t decode_chunk = 256;
constexpr int64_t most_rows = 8;
// Rows whose scores one pass over the keys forms, and keys whose values one pass adds: as many
// as the registers hold.
constexpr int most_together = lanes >= 16 ? 4 : lanes >= 8 ? 2 : 1;
constexpr int64_t values_together = 8;

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

// Fetches rows ahead of their use, line by line in memory's order.
template <typename Element>
struct Ahead {
  const Element* row;
  int64_t stride, dim, d;
  MHA_INLINE_MEMBER void fetch() {
    __builtin_prefetch(row + d, 0, 2);
    d += lanes;
    if (d >= dim) {
      d = 0;
      row += stride;
    }
  }
};

// Scores of R queries against lanes / R consecutive keys: lane r * lanes / R + j is key j's
// with query r.
template <int R, typename Element>
MHA_INLINE Vec score_keys(const float* query, const Element* key, int64_t stride, int64_t count,
                          int64_t dim, Ahead<Element>& ahead) {
  constexpr int keys = lanes / R, step = R == 1 ? 1 : keys < 4 ? keys : 4;
  Vec sums[lanes];
#pragma GCC unroll 16
  for (int first = 0; first < keys; first += step) {
    const Element* row[step];
    Vec c[R][step] = {};
#pragma GCC unroll 4
    for (int j = 0; j < step; ++j) row[j] = key + min64(first + j, count - 1) * stride;
#pragma GCC unroll 2
    for (int64_t d = 0; d + lanes <= dim; d += lanes) {
#pragma GCC unroll 4
      for (int j = 0; j < step; ++j) {
        Vec k = load(row[j] + d);
        if constexpr (R > 1) MHA_PIN(k);
        if constexpr (R > 1) ahead.fetch();
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) c[r][j] += load(query + r * dim + d) * k;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < step; ++j) sums[r * keys + first + j] = c[r][j];
    }
  }
  add_across<lanes / 2>(sums);
  if (dim % lanes) {
    float tail[lanes];
    store(tail, sums[0]);
    for (int i = 0; i < lanes; ++i) {
      const Element* row = key + min64(i % keys, count - 1) * stride;
      for (int64_t d = dim - dim % lanes; d < dim; ++d) {
        tail[i] += query[i / keys * dim + d] * to_float(row[d]);
      }
    }
    sums[0] = load(tail);
  }
  return sums[0];
}

// pass 1 for R rows of queries; scores[r][key] with rows `decode_chunk` apart.
template <int R, typename Element>
static void score_chunk(const float* query, const Element* key, int64_t stride, int64_t count,
                        int64_t dim, float* scores) {
  constexpr int keys = lanes / R;
  Ahead<Element> ahead{key + 64 * stride, stride, dim, 0};
  for (int64_t j = 0; j < count; j += keys) {
    float found[lanes];
    store(found, score_keys<R>(query, key + j * stride, stride, count - j, dim, ahead));
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < keys; ++i) scores[r * decode_chunk + j + i] = found[r * keys + i];
    }
  }
}

// pass 3 for M rows and V vectors of dimensions: output[m][d] += weights[m][j] * value[j][d].
template <int M, int V, typename Element>
MHA_INLINE void add_values(const float* weights, const Element* value, int64_t stride,
                           int64_t keys, float* output, int64_t output_stride,
                           Ahead<Element>& ahead) {
  Vec c[M][V];
  load_block(output, output_stride, c);
  for (int64_t j = 0; j < keys; ++j, value += stride) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      Vec b = load(value + v * lanes);
      if constexpr (M > 1) {
        MHA_PIN(b);
        ahead.fetch();
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) c[m][v] += weights[m * decode_chunk + j] * b;
    }
  }
  store_block(output, output_stride, c);
}

template <int M, typename Element>
static void add_value_rows(const float* weights, const Element* value, int64_t stride,
                           int64_t keys, int64_t dim, float* output, int64_t output_stride,
                           Ahead<Element>& ahead) {
  constexpr int wide = M == 1 ? 8 : lanes >= 16 ? 4 : 2;
  int64_t d = 0;
  for (; d + wide * lanes <= dim; d += wide * lanes) {
    add_values<M, wide>(weights, value + d, stride, keys, output + d, output_stride, ahead);
  }
  for (; d + lanes <= dim; d += lanes) {
    add_values<M, 1>(weights, value + d, stride, keys, output + d, output_stride, ahead);
  }
  for (; d < dim; ++d) {
    for (int m = 0; m < M; ++m) {
      for (int64_t j = 0; j < keys; ++j) {
        output[m * output_stride + d] +=
            weights[m * decode_chunk + j] * to_float(value[j * stride + d]);
      }
    }
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
  const SampleBand band = band_of(mask, t.n);
  for (int64_t j = 0; j < count; ++j) {
    const int64_t key = first + j;
    if (key >= mask.keys) break;  // the extra keys are open
    for (const auto* added : {&mask.added, &mask.relative}) {
      if (!added->data) continue;
      const float sum = scores[j] + added->at(t.n, t.h, query)[key] * log2e;
      scores[j] = sum < lowest ? lowest : sum;
    }
    const bool in_length = !mask.lengths || key < mask.lengths[t.n];
    const bool together =
        !mask.key_documents || mask.key_documents[t.n * mask.key_documents_n + key] ==
                                   mask.query_documents[t.n * mask.query_documents_n + query];
    const bool open =
        in_length && together && (open_lanes(mask, band, t, key, pair_bits) >> query & 1);
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

// The keys of a chunk that some query sees: what lies outside of a window or a document is not
// read.
MHA_INLINE KeySpan seen_of_chunk(const AttentionForward& args, int64_t n, int64_t first) {
  const int64_t end = min64(first + decode_chunk, args.keys);
  if (end > args.mask.keys) return {first, end};  // with extra keys
  const KeySpan span = key_span(args.mask, {n, 0, 0, args.queries});
  const int64_t begin = min64(max64(first, span.begin), end);
  return {begin, max64(begin, min64(end, span.end))};
}

template <typename Element>
static void decode_task(const AttentionForward& args, int64_t index, float* scratch,
                        float* partials) {
  const int64_t chunks = decode_chunks(args), rows = decode_rows(args);
  const int64_t n = index / chunks / args.kv_heads, kv_head = index / chunks % args.kv_heads;
  const KernelMask& mask = args.mask;
  const KeySpan seen = seen_of_chunk(args, n, index % chunks * decode_chunk);
  const int64_t first = seen.begin, count = seen.end - seen.begin;
  const int64_t group = args.heads / args.kv_heads, dim = args.head_dim;
  float* queries = scratch;  // [row][dim], scaled
  float* scores = queries + rows * dim;
  const float factor = args.scale * log2e;
  for (int64_t r = 0; r < rows; ++r) {
    const float* query = args.query.at(n, kv_head * group + r / args.queries, r % args.queries);
    for (int64_t d = 0; d < dim; ++d) queries[r * dim + d] = query[d] * factor;
  }
  const auto* key = args.key.at<Element>(n, kv_head, first);
  const auto score = [&](auto width, int64_t r) {
    score_chunk<decltype(width)::value>(queries + r * dim, key, args.key.t, count, dim,
                                        scores + r * decode_chunk);
    return decltype(width)::value;
  };
  for (int64_t r = 0; r < rows;) {
    if (most_together >= 4 && rows - r >= 4) {
      r += score(std::integral_constant<int, most_together>{}, r);
    } else if (most_together >= 2 && rows - r >= 2) {
      r += score(std::integral_constant < int, most_together<2 ? 1 : 2>{}, r);
    } else {
      r += score(std::integral_constant<int, 1>{}, r);
    }
  }
  const SampleBand band = band_of(mask, n);
  const bool open = !mask.key_documents && !mask.relative.data && !mask.lengths &&
                    !mask.keep_keys && !mask.pair_bits && !mask.added.data &&
                    band.low <= first - (args.queries - 1) && band.high >= first + count - 1;
  const int64_t size = partial_size(args);
  float* partial = partials + index * rows * size;
  for (int64_t r = 0; r < rows; ++r) {
    float* row = scores + r * decode_chunk;
    const QueryTile t{n, kv_head * group + r / args.queries, 0, args.queries};
    if (args.softcap > 0) {
      cap_scores<1>(args.softcap, ceil_div(count, lanes), lanes, row);
    }
    if (!open) decode_mask(args, t, r % args.queries, first, count, row);
    decode_softmax(row, count, partial + r * size, partial + r * size + 1);
    for (int64_t d = 0; d < args.value_dim; ++d) partial[r * size + 2 + d] = 0;
  }
  const auto* value = args.value.at<Element>(n, kv_head, first);
  const bool in_one = rows == 1 && args.value_dim <= 8 * lanes;
  Ahead<Element> ahead{value + 64 * args.value.t, args.value.t, args.value_dim, 0};
  const int64_t together = in_one ? count : values_together;
  for (int64_t j = 0; j < count; j += together) {
    const Element* from = value + j * args.value.t;
    const int64_t keys = min64(together, count - j);
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      add_value_rows<4>(scores + r * decode_chunk + j, from, args.value.t, keys, args.value_dim,
                        partial + r * size + 2, size, ahead);
    }
    for (; r < rows; ++r) {
      add_value_rows<1>(scores + r * decode_chunk + j, from, args.value.t, keys, args.value_dim,
                        partial + r * size + 2, size, ahead);
    }
  }
}

static int64_t decode_scratch(const AttentionForward& args) {
  return decode_rows(args) * (args.head_dim + decode_chunk);
}

static void decode(const AttentionForward& args, int64_t begin, int64_t end, float* scratch,
                   float* partials) {
  for (int64_t i = begin; i < end; ++i) {
    switch (args.storage) {
      case Storage::float32:
        decode_task<float>(args, i, scratch, partials);
        break;
      case Storage::bfloat16:
        decode_task<BFloat16>(args, i, scratch, partials);
        break;
      case Storage::float16:
        decode_task<Float16>(args, i, scratch, partials);
        break;
    }
  }
}

static void merge_decoded(const AttentionForward& args, const float* partials) {
  const int64_t chunks = decode_chunks(args), rows = decode_rows(args),
                size = partial_size(args);
  const int64_t group = args.heads / args.kv_heads;
  for (int64_t head = 0; head < args.batch * args.kv_heads; ++head) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* first = partials + (head * chunks * rows + r) * size;
      const int64_t h = head % args.kv_heads * group + r / args.queries;
      const float sink = args.sinks ? sink_score(args.sinks[h]) : -__builtin_inff();
      float maximum = sink;
      for (int64_t c = 0; c < chunks; ++c) {
        const float m = first[c * rows * size];
        maximum = m > maximum ? m : maximum;
      }
      float* output = args.output.at(head / args.kv_heads, h, r % args.queries);
      for (int64_t d = 0; d < args.value_dim; ++d) output[d] = 0;
      float sum = args.sinks ? exp2(broadcast(sink - maximum))[0] : 0.0f;
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
