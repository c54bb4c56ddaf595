// Attention forward for a few queries over many keys, as in decoding. Included once per ISA.
//
// There the time goes into reading keys and values from memory, so each is read once, for all
// query heads that share it, and the vectors run over the head's dimensions. The keys of a head
// are split into chunks of a fixed length, whatever the number of threads, and the chunks'
// results are merged in order:
//   pass 1  scores, key by key; one transpose turns the sums of some into a vector
//   pass 2  scores out of range once more; soft cap, blocks and added terms, maximum and sum of
//           the chunk
//   pass 3  output = weights V, kept apart for each chunk
//   merge   outputs and sums of all chunks relative to the largest maximum
//
// Source: "Flash-Decoding for long-context inference", Dao et al., 2023.

// More rows fill the tiles of `forward`; fewer keys are not worth the merging of chunks.
constexpr int64_t most_rows = 8, fewest_keys = 257;
// Keys whose values one pass over the rows adds: as many as stay in the first cache.
constexpr int64_t values_together = 16;

MHA_INLINE int64_t decode_rows(const AttentionForward& args) {
  return args.heads / args.kv_heads * args.queries;
}

static bool can_decode(const AttentionForward& args) {
  return decode_rows(args) <= most_rows && args.keys >= fewest_keys && !args.weights.data &&
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

// pass 2 for one row: forms the scores again that are out of range.
template <typename Element>
static void settle_row(const ScoredRows<float, Element>& rows, int64_t count, float* scores) {
  const int64_t whole = count - count % lanes;
  bool settled = all_in_range<1>(scores, whole / lanes, lanes);
  for (int64_t j = whole; j < count; ++j) settled &= in_range(scores[j]);
  if (settled || has_nan(rows.query, rows.depth)) return;
  for (int64_t j = 0; j < count; ++j) {
    if (in_range(scores[j]) || has_nan(rows.key + j * rows.key_stride, rows.depth)) continue;
    scores[j] = exact_score(rows, 0, j);
  }
}

// pass 2 for one row: the terms that the mask adds. Their sum and the scores' are held.
static void add_decode_terms(const KernelMask& mask, const QueryTile& t, int64_t query,
                             int64_t first, int64_t count, float* scores) {
  const float* terms[KernelMask::added_lists];
  int lists = 0;
  for (const auto& list : mask.added) {
    if (list.data) terms[lists++] = list.at(t.n, t.h, query) + first;
  }
  if (lists == 0) return;
  const auto add = [&](Vec score, const auto& term_of) {
    Vec term = term_of(terms[0]);
    for (int i = 1; i < lists; ++i) {
      term = hold(largest_float, term + term_of(terms[i]));
    }
    return hold(score_limit, score + term * log4e);
  };
  int64_t j = 0;
  for (; j + lanes <= count; j += lanes) {
    store(scores + j, add(load(scores + j), [&](const float* of) { return load(of + j); }));
  }
  for (; j < count; ++j) {
    scores[j] = add(broadcast(scores[j]), [&](const float* of) { return broadcast(of[j]); })[0];
  }
}

// pass 2 for one row: -inf where the key is blocked.
static void block_decode_scores(const AttentionForward& args, const QueryTile& t, int64_t query,
                                int64_t first, int64_t count, float* scores) {
  const KernelMask& mask = args.mask;
  const uint64_t* pair_bits = nullptr;
  if (mask.pair_bits) {
    const int64_t plane = t.n * mask.pair_plane_n + t.h * mask.pair_plane_h;
    pair_bits = mask.pair_bits + plane * ceil_div(args.queries, tile) * mask.keys;
  }
  const SampleBand band = band_of(mask, t.n);
  for (int64_t j = 0; j < count; ++j) {
    if (!is_open(mask, band, t, query, first + j, pair_bits)) scores[j] = -__builtin_inff();
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
    const Vec weight = score == minus_infinity ? Vec{} : exp4(score - from);
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

// A factor in a query of bfloat16 would have been rounded with it.
MHA_INLINE void scale_scores(float* scores, float factor) {
  for (int64_t j = 0; j < decode_chunk; j += lanes) {
    store(scores + j, load(scores + j) * factor);
  }
}

// Calls function(integral_constant<int, R>, row) for [0, rows) in steps of R rows, at most
// `Most`.
template <int Most, typename Function>
MHA_INLINE void for_each_group(int64_t rows, const Function& function, int64_t row = 0) {
  for (; row + Most <= rows; row += Most) function(std::integral_constant<int, Most>{}, row);
  if constexpr (Most > 1) for_each_group<Most / 2>(rows, function, row);
}

// R rows of queries as `score_keys` wants them: scaled, or rounded to pairs of bfloat16.
template <typename Of, int R>
static void arrange_queries(const AttentionForward& args, int64_t n, int64_t kv_head,
                            int64_t row, int64_t places, float* to) {
  const int64_t group = args.heads / args.kv_heads;
  const float factor = args.scale * log4e;
  for (int64_t r = 0; r < R; ++r) {
    const int64_t h = kv_head * group + (row + r) / args.queries;
    const float* query = args.query.at(n, h, (row + r) % args.queries);
    for (int64_t first = 0; first < places; first += lanes) {
      float vector[lanes] = {};
      for (int64_t p = first; p < min64(first + lanes, places); ++p) {
        if constexpr (Of::pairs) {
          const uint32_t high = to_bfloat16(query[2 * p + 1]).bits;
          vector[p - first] = float_of_bits(high << 16 | to_bfloat16(query[2 * p]).bits);
        } else {
          vector[p - first] = query[p] * factor;
        }
      }
      store(to + first * R + r * lanes, load(vector));
    }
  }
}

template <typename Of, typename Element>
static void decode_task(const AttentionForward& args, int64_t index, float* scratch,
                        float* partials) {
  const int64_t chunks = decode_chunks(args), rows = decode_rows(args);
  const int64_t n = index / chunks / args.kv_heads, kv_head = index / chunks % args.kv_heads;
  const KernelMask& mask = args.mask;
  const KeySpan seen = seen_of_chunk(args, n, index % chunks * decode_chunk);
  const int64_t first = seen.begin, count = seen.end - seen.begin;
  const int64_t group = args.heads / args.kv_heads;
  const int64_t places = Of::pairs ? args.head_dim / 2 : args.head_dim;
  float* scores = scratch;
  float* queries = scores + rows * decode_chunk;
  const auto* key = args.key.at<Element>(n, kv_head, first);
  for_each_group<4>(rows, [&](auto width, int64_t r) {
    constexpr int R = decltype(width)::value;
    arrange_queries<Of, R>(args, n, kv_head, r, places, queries);
    const auto score = places == 128  ? score_keys<Of, R, 128, Element>
                       : places == 64 ? score_keys<Of, R, 64, Element>
                                      : score_keys<Of, R, 0, Element>;
    score(queries, key, args.key.t, count, places, scores + r * decode_chunk);
  });
  const int64_t masked = max64(0, min64(count, mask.keys - first));  // extra keys are open
  const bool blocks = some_blocked(mask, n, args.queries, first, masked);
  const int64_t size = partial_size(args);
  float* partial = partials + index * rows * size;
  for (int64_t r = 0; r < rows; ++r) {
    float* row = scores + r * decode_chunk;
    if constexpr (Of::pairs) scale_scores(row, args.scale * log4e);
    const QueryTile t{n, kv_head * group + r / args.queries, 0, args.queries};
    settle_row<Element>({args.query.at(n, t.h, r % args.queries), 0, key, args.key.t,
                         args.head_dim, args.scale},
                        count, row);
    if (args.softcap > 0) {
      cap_scores<1>(args.softcap, ceil_div(count, lanes), lanes, row);
    }
    add_decode_terms(mask, t, r % args.queries, first, masked, row);
    if (blocks) block_decode_scores(args, t, r % args.queries, first, masked, row);
    decode_softmax(row, count, partial + r * size, partial + r * size + 1);
    if constexpr (Of::pairs) pair_weights<Of>(row);
    for (int64_t d = 0; d < args.value_dim; ++d) partial[r * size + 2 + d] = 0;
  }
  const auto* value = args.value.at<Element>(n, kv_head, first);
  const int64_t together = rows == 1 && args.value_dim <= 8 * lanes ? count : values_together;
  for (int64_t j = 0; j < count; j += together) {
    const float* weights = scores + (Of::pairs ? j / 2 : j);
    for_each_group<rows_together<Of, Element>>(rows, [&](auto width, int64_t r) {
      add_value_rows<Of, decltype(width)::value>(
          weights + r * decode_chunk, value + j * args.value.t, args.value.t,
          min64(together, count - j), args.value_dim, partial + r * size + 2, size);
    });
  }
}

static int64_t decode_scratch(const AttentionForward& args) {
  return decode_rows(args) * decode_chunk + 4 * ceil_div(args.head_dim, lanes) * lanes;
}

static void decode(const AttentionForward& args, int64_t begin, int64_t end, float* scratch,
                   float* partials) {
  for (int64_t i = begin; i < end; ++i) {
    switch (args.storage) {
      case Storage::float32:
        decode_task<Floats, float>(args, i, scratch, partials);
        break;
      case Storage::bfloat16:
        if constexpr (Isa::Pairs::exist) {
          if (can_dot_chunks(args)) {
            decode_task<Isa::Pairs, BFloat16>(args, i, scratch, partials);
            break;
          }
        }
        decode_task<Floats, BFloat16>(args, i, scratch, partials);
        break;
      case Storage::float16:
        decode_task<Floats, Float16>(args, i, scratch, partials);
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
      float sum = args.sinks ? exp4(broadcast(sink - maximum))[0] : 0.0f;
      for (int64_t c = 0; c < chunks; ++c) {
        const float* partial = first + c * rows * size;
        if (partial[1] == 0) continue;  // the chunk is blocked
        const float factor =
            partial[0] == maximum ? 1.0f : exp4(broadcast(partial[0] - maximum))[0];
        sum += partial[1] * factor;
        for (int64_t d = 0; d < args.value_dim; ++d) output[d] += partial[2 + d] * factor;
      }
      const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
      float wild = 0;
      for (int64_t d = 0; d < args.value_dim; ++d) {
        output[d] *= inverse;
        wild += output[d] * 0.0f;
      }
      if (wild != 0) mark_not_finite(args.not_finite);
    }
  }
}
