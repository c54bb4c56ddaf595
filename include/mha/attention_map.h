#pragma once

#include <ATen/core/Tensor.h>
#include <mha/mask.h>
#include <mha/scaled_dot_product_attention.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace mha {

namespace detail {
struct MapState;
struct MapView;
}  // namespace detail

/// The `k` largest weights of each row and the keys that have them.
struct TopKeys {
  at::Tensor values;  ///< (N, H, L, k), in descending order
  at::Tensor keys;    ///< (N, H, L, k) int64; -1 where no further key has a weight above 0
};

/// What one walk over a map says of it.
struct MapSummary {
  at::Tensor entropy;   ///< (N, H, L), see `AttentionMap::entropy`
  at::Tensor received;  ///< (N, H, S), see `AttentionMap::received`
  at::Tensor distance;  ///< (N, H), see `AttentionMap::distance`
};

/// Indices [begin, end).
struct IndexRange {
  int64_t begin, end;
};

/// How far the scores have come on their way to weights.
enum class ScoreStage {
  scaled,      ///< scale * q . k
  softcapped,  ///< softcap * tanh(scaled / softcap); as scaled without a soft cap
  masked,      ///< with the mask's added terms, and -inf where it blocks
};

/// The attention weights of one call, rebuilt where they are asked for.
///
/// A map keeps the projected queries and keys, the mask and two numbers a row, from which
///
///     weights[n, h, i, j] = exp(scores[n, h, i, j] - log_sum_exp[n, h, i])
///
/// are the weights that the call's output used, before dropout; 0 where the mask blocks and in
/// rows that may attend to nothing. Attention sinks are none of the S keys: their weight is
/// what a row's sum lacks to 1. A map never holds the weights: what summarises them walks over
/// blocks of keys and takes memory for its result and, for each thread, for one block.
///
/// | method        | shape                    |
/// | ------------- | ------------------------ |
/// | `dense`       | (N, H, L, S)             |
/// | `head`        | (N, L, S)                |
/// | `rows`        | (N, H, rows, S)          |
/// | `block`       | (N, rows, keys)          |
/// | `mean`        | (N, L, S) or (N, rows, S)|
/// | `entropy`     | (N, H, L)                |
/// | `received`    | (N, H, S)                |
/// | `distance`    | (N, H)                   |
/// | `top_k`       | (N, H, L, k)             |
/// | `pooled`      | (N, H, rows, columns)    |
/// | `log_sum_exp` | (N, H, L)                |
/// | `scores`      | (N, H, L, S)             |
///
/// N stands for the leading dimensions of the call: absent if it was unbatched, several if
/// the functional form was given several. It comes first whatever the module's layout. S counts
/// the keys that `add_bias_kv` and `add_zero_attn` append after the given ones. Results are
/// float64 for float64 inputs, else float32, which the half types are widened to.
///
/// float32 and the half types on the CPU are computed by the kernels, bit-equal for any number
/// of threads. Elsewhere (float64, other devices, `MHA_PATH=plain`, traces and forward-mode
/// derivatives) the weights are formed for
/// some rows at a time, in memory for a few times 2^21 of them.
///
/// Gradients flow into queries, keys, sinks and added mask terms where these ask for them and
/// the gradient mode is on at the time of the method's call. The backward forms the weights
/// again, some rows at a time as above, so that a method takes no more memory with gradients
/// than without. (A backward that is itself to be differentiated holds them all.)
///
/// `AttentionAttribution` (attention_attribution.h) has the gradient of a loss with respect to
/// the weights in the same forms.
///
/// A `const` map may be used by several threads. Copies share what they keep. Tensors are kept,
/// not copied: a method throws `c10::Error` if one of them was modified in place since. An
/// index outside its range throws `c10::Error` that names it, and so does every method of a map
/// that was moved from.
class AttentionMap {
 public:
  /// The map of queries (..., H, L, D) over keys (..., Hk, S, D), as in
  /// `scaled_dot_product_attention`, which says what is checked. `scale` defaults to 1 /
  /// sqrt(D).
  AttentionMap(const at::Tensor& query, const at::Tensor& key, const Mask& mask = {},
               std::optional<double> scale = std::nullopt);
  /// The same, of a call with these options: of its `scale`, `softcap` and `sinks`.
  AttentionMap(const at::Tensor& query, const at::Tensor& key, const Mask& mask,
               const AttentionOptions& options);

  /// All weights.
  at::Tensor dense() const;
  /// The weights of head `h`.
  at::Tensor head(int64_t h) const;
  /// The weights of queries [from, to).
  at::Tensor rows(int64_t from, int64_t to) const;
  /// The weights of some queries over some keys in one head.
  at::Tensor block(int64_t h, IndexRange rows, IndexRange keys) const;

  /// The mean over the heads, of all queries or of queries [from, to).
  at::Tensor mean() const;
  at::Tensor mean(int64_t from, int64_t to) const;

  /// -sum_j weights[j] * ln(weights[j]) of each row, in nats: 0 where one key has all the
  /// weight, ln(S) where all have the same, 0 for a row that may attend to nothing.
  at::Tensor entropy() const;
  /// How much attention each key gets: the sum of its weights over the queries.
  at::Tensor received() const;
  /// How far each head looks, in keys: the mean of |i + S' - L - j| over all queries i and
  /// given keys j, weighted by attention. S' counts the given keys; for L != S' the last query
  /// stands at the last key, and over a cache whose samples have different lengths at that of
  /// its own. Appended keys have no position and are left out. 0 if nothing is seen.
  at::Tensor distance() const;
  /// Entropy, received and distance at the price of one.
  MapSummary summary() const;

  /// The k largest weights of each row, 1 <= k <= S; of equal ones the earlier keys.
  TopKeys top_k(int64_t k) const;

  /// A map of `rows` x `columns` cells, 1 <= rows <= L and 1 <= columns <= S, that share
  /// queries and keys as evenly as they can: cell c of C holds the indices from floor(c * size
  /// / C) to floor((c + 1) * size / C) - 1. A cell is the mean over its queries of the sum over
  /// its keys, so that rows still sum to 1.
  at::Tensor pooled(int64_t rows, int64_t columns) const;

  /// ln(sum_j exp(scores[j])) over the allowed keys of each row and its sink; -inf if there are
  /// none.
  at::Tensor log_sum_exp() const;
  /// What the weights are made from, of all queries or of queries [from, to).
  at::Tensor scores(ScoreStage stage) const;
  at::Tensor scores(ScoreStage stage, int64_t from, int64_t to) const;

  /// The same map, from which no gradient flows.
  AttentionMap detach() const;
  /// The same on another device. Gradients flow back to the tensors of this one.
  AttentionMap to(at::Device device) const;

  int64_t num_heads() const;
  int64_t num_queries() const;
  /// Including appended keys.
  int64_t num_keys() const;
  /// (..., H, L, D) and (..., Hk, S, D), as they are kept.
  at::Tensor query() const;
  at::Tensor key() const;
  /// Multiplies q . k.
  double scale() const;
  /// Of the call's options; 0 and undefined: none.
  double softcap() const;
  at::Tensor sinks() const;
  /// Bytes of what is kept for this map: queries, keys and two float32 numbers a row. A mask's
  /// tensors and the sinks are the caller's and are not counted.
  int64_t nbytes() const;

  /// For the library's own calls.
  explicit AttentionMap(std::shared_ptr<const detail::MapState> state);

 private:
  friend class AttentionAttribution;  // of a map
  const detail::MapState& state() const;

  std::shared_ptr<const detail::MapState> state_;
};

/// What a traced call returns. Unpacks as `auto [output, map] = ...`.
struct TracedAttention {
  at::Tensor output;  ///< that of the call with `Weights::none`, bit for bit
  AttentionMap map;   ///< the weights that the output used, before dropout
};

/// `scaled_dot_product_attention` with the map beside the output. No (L, S) tensor is held
/// where attention is fused. The options that say which weights to return have no effect.
TracedAttention trace_scaled_dot_product_attention(const at::Tensor& query,
                                                   const at::Tensor& key,
                                                   const at::Tensor& value,
                                                   const Mask& mask = {},
                                                   const AttentionOptions& options = {});

/// How much of each input token reaches each output token through a stack of self-attention
/// layers, (N, T, T):
///
///     rollout = A_last @ ... @ A_1 @ A_0,  A = 0.5 * mean over heads + 0.5 * I
///
/// where I stands for the residual connection. `layers` are in the order in which they were
/// applied, each with L = S = T and no appended keys. Rows sum to 1 but for queries that may
/// attend to nothing. The product's last bits may depend on the number of threads.
/// Throws `c10::Error` if there is no layer, or sizes differ.
///
/// Source: Abnar & Zuidema, "Quantifying Attention Flow in Transformers", 2020, section 3.
at::Tensor attention_rollout(const std::vector<AttentionMap>& layers);

}  // namespace mha
