#pragma once

// The interface between the library and its CPU kernels: pointers, sizes and strides, no Torch.
// Strides count elements. Plain structs, so that no code is shared between translation units
// that are compiled for different ISAs.

#include <cstdint>

namespace mha::cpu {

/// Where an element (n, h, t) starts; the innermost dimension is contiguous.
template <typename T>
struct Rows {
  T* data = nullptr;
  int64_t n = 0, h = 0, t = 0;
  T* at(int64_t in, int64_t ih, int64_t it) const { return data + in * n + ih * h + it * t; }
};

/// What keys and values are stored as. Sums are float32 whatever it is.
enum class Storage { float32, bfloat16, float16 };
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

/// Rows of keys or values in one of the storage types.
struct StoredRows {
  const void* data = nullptr;
  int64_t n = 0, h = 0, t = 0;
  template <typename T = float>
  const T* at(int64_t in, int64_t ih, int64_t it) const {
    return static_cast<const T*>(data) + in * n + ih * h + it * t;
  }
};

/// Which keys a query may attend to: all conditions hold together.
struct KernelMask {
  /// low <= key - query <= high, for the keys before `keys`.
  int64_t low, high;
  /// Per sample, in place of the two above. Null: none.
  const int64_t *lows = nullptr, *highs = nullptr;
  /// The keys that the mask speaks of; later ones are open to every query.
  int64_t keys;
  /// Per sample: keys at or after this index are blocked. Null: none.
  const int64_t* lengths = nullptr;
  /// Per key: 0 blocks. Null: all open. Stride 0 shares one row between the samples.
  const uint8_t* keep_keys = nullptr;
  int64_t keep_keys_n = 0;
  /// Pair masks as packed by `pack_pairs`, one plane for each (n, h) that differs. Null: open.
  const uint64_t* pair_bits = nullptr;
  const uint8_t* pair_classes = nullptr;
  int64_t pair_plane_n = 0, pair_plane_h = 0;  // plane = n * pair_plane_n + h * pair_plane_h
  /// Added to the scaled scores, at data[n][h][query][key], one list after the other. t = 0:
  /// one row for all queries; t = -1: a table by distance, its rows over each other. Null:
  /// nothing.
  static constexpr int added_lists = 3;
  Rows<const float> added[added_lists];
  /// Numbers of documents, not negative; a pair is open where they are equal. -1 fills up the
  /// queries by at least one tile. Null: all are open. Stride 0 shares a row between samples.
  const int32_t *query_documents = nullptr, *key_documents = nullptr;
  int64_t query_documents_n = 0, key_documents_n = 0;
  /// Of each query, as they lie: the first key of its document, and the one after its last.
  const int32_t *document_begins = nullptr, *document_ends = nullptr;
};

/// Dropout of weights: one is kept where the hash of (seed, row, key) is at least `threshold`,
/// row = (n * heads + h) * queries + query, and multiplied by `factor`. Threshold 0 keeps all.
struct KernelDropout {
  uint64_t seed = 0;
  uint32_t threshold = 0;
  float factor = 1;
};

/// What the scores of a call are made of, but for queries and keys: those differ in what they
/// are stored as. `keys` counts the extra keys after those that the mask speaks of.
struct ScoreArgs {
  int64_t batch = 0, heads = 0, kv_heads = 0, queries = 0, keys = 0, head_dim = 0;
  float scale = 1;
  /// Scores become softcap * tanh(score / softcap) before terms are added. 0: they stay.
  float softcap = 0;
  KernelMask mask{};
};

/// The same with queries in float32.
struct FloatScoreArgs : ScoreArgs {
  Rows<const float> query;
};

/// Attention forward. `decode` reads keys and values of every storage type, `forward` reads
/// float32, and bfloat16 where `can_dot` says so.
struct AttentionForward : FloatScoreArgs {
  int64_t value_dim = 0;
  /// (heads): one more score of each row, which takes weight and has no value. Null: none.
  const float* sinks = nullptr;
  /// What `query` was before it was widened: only then may products round it to bfloat16.
  bool query_is_bfloat16 = false;
  Storage storage = Storage::float32;
  StoredRows key, value;
  /// For `forward` over bfloat16, as `pair_values` left them.
  const uint32_t* value_pairs = nullptr;
  Rows<float> output;
  /// Becomes 1 if a number of the output is infinite or NaN; else it stays.
  int32_t* not_finite = nullptr;
  /// For the backward, (N, H, L) each: weight = 4^(score * log4(e) - row_maximum) * row_factor.
  /// Two numbers, since in their sum a large maximum would swallow the factor. Null: not
  /// wanted.
  float *row_maximum = nullptr, *row_factor = nullptr;
  /// The weights, at data[n][h][query][key], or averaged over the heads at data[n][query][key].
  /// Null: not wanted.
  Rows<float> weights;
  bool averaged = false, weights_after_dropout = false;
  KernelDropout dropout;
};

/// Gradients of attention over float32.
struct AttentionBackward : FloatScoreArgs {
  int64_t value_dim = 0;  // as head_dim, a multiple of 16
  Rows<const float> key, value, output, grad_output;
  const float *row_maximum = nullptr, *row_factor = nullptr;  // as the forward left them
  Rows<float> grad_query, grad_key, grad_value;
  /// Each key/value head is split into so many chunks of keys, as `backward_chunks` says. With
  /// more than one, a chunk's share of grad_query is the contiguous (N, H, L, D) at
  /// query_shares + chunk * (its size), and grad_query is for the caller to sum.
  int64_t chunks = 1;
  float* query_shares = nullptr;
  /// Of the terms that the mask adds, at data[n][h][query][key], zeros before; stride 0 where
  /// samples or heads share the terms. For `backward_added`.
  Rows<float> grad_added;
  KernelDropout dropout;
};

/// output = input weight^T + bias, row by row.
struct LinearArgs {
  int64_t rows, inner, columns;
  const float* input;
  int64_t input_stride;
  const float* bias = nullptr;  // (columns); null: none
  /// Row r goes to output + (r / rows_per_sample) * output_n + (r % rows_per_sample) *
  /// output_t.
  float* output;
  int64_t rows_per_sample, output_n, output_t;
  /// Column c goes to (c / group) * output_group + c % group of its row. `group` is a multiple
  /// of 16, or all columns.
  int64_t group, output_group;
};

/// output[m][c] = sum over k of a[m * a_m + k * a_k] * panel[k * panel_stride + c], or added to
/// what is there. Each is one running sum, so a long one is for the caller to split.
struct PanelProduct {
  int64_t rows, columns, depth;  // at most `tile` columns
  const float* a;
  int64_t a_m, a_k;
  /// As `copy_panel` left it; or any rows, if `columns` is a multiple of 16.
  const float* panel;
  int64_t panel_stride;
  float* output;
  int64_t output_stride;
  bool adds;
};

/// Turns pairs of elements of rows (batch, heads, tokens, head_dim), into rows of the same
/// storage that may be the same memory: a' = a cos - b sin, b' = b cos + a sin.
struct RotaryArgs {
  int64_t batch, heads, tokens, head_dim, pairs;
  bool interleaved;  // pairs are (2 i, 2 i + 1) instead of (i, i + pairs)
  bool back;         // with -sin
  Storage storage;
  StoredRows input;
  void* output;
  int64_t output_n, output_h, output_t;
  const float* table;        // cos and sin, [row][2][pairs]
  const int64_t* positions;  // rows of the table, at n * positions_n + token
  int64_t positions_n;
};

/// Normalises rows (batch, heads, tokens, head_dim) in place: what is left of each after its
/// mean is off (if `centred`) is divided by sqrt(mean square + eps), multiplied by `gain`, and
/// `bias` added.
struct NormArgs {
  int64_t batch, heads, tokens, head_dim;
  Rows<float> rows;
  const float* gain;
  const float* bias;  // null: none
  float eps;
  bool centred;
};

/// What a map holds for each pair: the weight A; the gradient G with respect to it, which is
/// grad_output . value, 0 where the mask blocks; their product; or max(0, A * G).
enum class MapNumbers { weights, gradient, product, positive_product };

/// Weights of attention over float32 that are rebuilt where they are wanted, or what is made
/// of them.
struct MapSource : FloatScoreArgs {
  Rows<const float> key;
  Rows<const float> row_maximum, row_factor;  // as the forward left them, at data[n][h][query]
  MapNumbers numbers = MapNumbers::weights;
  /// For other numbers than weights: of a key/value head and of a head.
  Rows<const float> value, grad_output;
  int64_t value_dim = 0;
};

/// The numbers, at data[n][h][query][key], or averaged over the heads at data[n][query][key].
struct MapRows {
  Rows<float> weights;
  bool averaged;
};

/// Sums over the keys of each row, (N, H, L), and over the queries of a chunk.
struct MapSums {
  float* by_query;
  int64_t chunk;  // queries of one task, a multiple of the tile
  float* by_key;  // (N, H, chunks, S)
};

/// What one walk over the weights can say: per row, (N, H, L), the entropy in nats, and over
/// the keys that the mask speaks of the sums of weight * |query + shifts[n] - key| and of
/// weight.
struct MapSummary {
  const float* log4_factor;  // (N, H, L), of row_factor; finite where that is 0
  const int64_t* shifts;     // (N)
  float *entropy, *distance, *placed;
  int64_t chunk;    // queries of one task, a multiple of the tile
  float* received;  // (N, H, chunks, S): the sum over a chunk's queries
};

/// Sums over cells: `rows` x `columns` of them share the queries and keys of each head evenly.
struct MapPool {
  int64_t rows, columns;
  int64_t chunk;       // queries of one task, a multiple of the tile
  int64_t chunk_rows;  // rows of cells that a chunk may touch, at most
  float* sums;         // (N, H, chunks, chunk_rows, columns), from the chunk's first row on
};

/// The `count` largest numbers of each row in descending order and their keys, (N, H, L, count)
/// each. Where none is above 0 stand 0 and the key -1; a row with a NaN gives NaN and -1.
struct MapTop {
  int64_t count;
  float* values;
  int64_t* keys;
};

/// How kernels cut up the pairs of queries and keys, and so a mask of pairs.
struct PairBlocks {
  /// Queries that one tile takes, and columns that one panel of a packed weight has.
  int64_t tile;
  /// Keys that one block takes.
  int64_t key_block;
  /// Packs one plane of a pair mask, allowed[query * stride + key] with 0 blocking, into
  /// ceil(queries / tile) * keys words and ceil(queries / tile) * ceil(keys / key_block)
  /// classes.
  void (*pack_pairs)(const uint8_t* allowed, int64_t stride, int64_t queries, int64_t keys,
                     uint64_t* bits, uint8_t* classes);
};

/// The kernels of one ISA; none of the members is 0 or null.
struct Kernels : PairBlocks {
  /// Floats of scratch that a thread needs for `forward`, 64-byte aligned.
  int64_t (*forward_scratch)(const AttentionForward&);
  /// Computes tiles [begin, end) of batch * heads * ceil(queries / tile), tile index fastest;
  /// of batch * ceil(queries / tile) with averaged weights, whose tiles sum over the heads.
  void (*forward)(const AttentionForward&, int64_t begin, int64_t end, float* scratch);
  /// Whether `forward` can multiply bfloat16 without widening it.
  bool (*can_dot)(const AttentionForward&);
  /// Words that `pair_values` writes, and what writes them for key/value heads [begin, end) of
  /// batch * kv_heads: the values of two consecutive keys side by side.
  int64_t (*value_pairs)(const AttentionForward&);
  void (*pair_values)(const AttentionForward&, int64_t begin, int64_t end, uint32_t* pairs);
  /// Whether a call has so few queries that reading keys and values decides, and asks for the
  /// output only. Then `decode` is for it. (The backward repeats `forward`'s sums bit by bit.)
  bool (*can_decode)(const AttentionForward&);
  /// Keys of one task of `decode`.
  int64_t decode_chunk;
  int64_t (*decode_scratch)(const AttentionForward&);
  /// Floats that all tasks leave for `merge_decoded`.
  int64_t (*decode_partials)(const AttentionForward&);
  /// Computes tasks [begin, end) of batch * kv_heads * ceil(keys / decode_chunk).
  void (*decode)(const AttentionForward&, int64_t begin, int64_t end, float* scratch,
                 float* partials);
  /// Writes the output, after all tasks.
  void (*merge_decoded)(const AttentionForward&, const float* partials);
  int64_t (*backward_scratch)(const AttentionBackward&);
  /// Into how many chunks of keys a call is best split: more than one where there are few
  /// heads. Whatever the number of threads, so that results do not depend on it.
  int64_t (*backward_chunks)(const AttentionBackward&);
  /// Computes tasks [begin, end) of batch * kv_heads * chunks.
  void (*backward)(const AttentionBackward&, int64_t begin, int64_t end, float* scratch);
  /// Computes tiles [begin, end) of planes of the added terms * ceil(queries / tile).
  void (*backward_added)(const AttentionBackward&, int64_t begin, int64_t end, float* scratch);
  /// Floats of a packed weight.
  int64_t (*packed_size)(int64_t inner, int64_t columns);
  /// Packs a weight (columns, inner) whose rows are `stride` apart.
  void (*pack_weight)(const float* weight, int64_t stride, int64_t inner, int64_t columns,
                      float* packed);
  /// Computes rows [begin, end) of the `tile` columns from index * tile on, `panel` being their
  /// rows of the weight as `pack_weight` left them.
  void (*linear)(const LinearArgs&, const float* panel, int64_t index, int64_t begin,
                 int64_t end);
  /// panel[row][tile] = from[row * stride], `columns` of each row, at most `tile`, then zeros.
  void (*copy_panel)(const float* from, int64_t stride, int64_t rows, int64_t columns,
                     float* panel);
  /// sums[c] = the sum over a panel's rows, or added to what is there.
  void (*sum_panel)(const float* panel, int64_t rows, int64_t columns, bool adds, float* sums);
  void (*multiply_panel)(const PanelProduct&);
  /// Tokens of one task of `rotate`, and what computes one of batch * ceil(tokens / that).
  int64_t rotary_tokens;
  void (*rotate)(const RotaryArgs&, int64_t index);
  /// Tokens of one task of `normalise`, numbered likewise.
  int64_t norm_tokens;
  void (*normalise)(const NormArgs&, int64_t index);
  /// Widens `count` rows of a half type, `stride` numbers apart, to contiguous ones; and the
  /// way back, rounded to the nearest.
  void (*widen_rows)(Storage, const void* rows, int64_t stride, int64_t count, int64_t columns,
                     float* to);
  void (*round_rows)(Storage, const float* rows, int64_t count, int64_t columns, void* to,
                     int64_t stride);
  /// What dropout multiplies `rows` rows of weights by, into factors[row][key].
  void (*dropout_factors)(uint64_t seed, int64_t first_row, int64_t rows, int64_t keys,
                          uint32_t threshold, float factor, float* factors);
  /// Whether none of `count` floats is NaN or infinite.
  bool (*all_finite)(const float* values, int64_t count);
  /// Floats of scratch for `map_rows`, `map_summary`, `map_sums` and `map_top`; for `map_pool`.
  int64_t (*map_scratch)(const MapSource&);
  int64_t (*map_pool_scratch)(const MapSource&, const MapPool&);
  /// Computes one tile, numbered as those of `forward`.
  void (*map_rows)(const MapSource&, const MapRows&, int64_t index, float* scratch);
  void (*map_top)(const MapSource&, const MapTop&, int64_t index, float* scratch);
  /// Computes one chunk of batch * heads * ceil(queries / chunk), chunk index fastest.
  void (*map_summary)(const MapSource&, const MapSummary&, int64_t index, float* scratch);
  void (*map_sums)(const MapSource&, const MapSums&, int64_t index, float* scratch);
  void (*map_pool)(const MapSource&, const MapPool&, int64_t index, float* scratch);
};

// Their entries. Only a CPU that can run a set may call its own.
const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace mha::cpu
