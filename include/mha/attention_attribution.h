#pragma once

#include <ATen/core/Tensor.h>
#include <mha/attention_map.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <vector>

namespace mha {

namespace detail {
struct AttributionState;
}

/// What is attributed to a query and a key. A is the attention weight, G the gradient of the
/// loss with respect to it.
enum class Attribution {
  gradient,            ///< G
  relevance,           ///< A * G, "gradient x attention"
  positive_relevance,  ///< max(0, A * G)
};
std::ostream& operator<<(std::ostream& stream, Attribution shown);

/// Sums of what is attributed to the pairs of each head.
struct AttributionSums {
  at::Tensor by_head;   ///< (N, H), over all pairs
  at::Tensor by_query;  ///< (N, H, L), over the keys
  at::Tensor by_key;    ///< (N, H, S), over the queries
};

/// The gradient of a loss with respect to the attention weights of one call, and its product
/// with them, rebuilt where they are asked for:
///
///     G[n, h, i, j] = grad_output[n, h, i, :] . value[n, h / (H / Hk), j, :]
///
/// `grad_output` is the gradient of the loss with respect to the heads' output A @ value,
/// before a gate, a head mask and W_o. The product A * G says to first order what a pair gave
/// to the loss: the loss changes by -A * G if the weight alone becomes 0. Summed over a query's
/// keys it is grad_output . output of this query.
///
/// Explanations are of calls in eval mode. With dropout, G is the gradient with respect to the
/// weights that multiplied the values, after dropout, and A the weight before dropout, as in
/// the map.
///
/// | method   | shape                     |
/// | -------- | ------------------------- |
/// | `dense`  | (N, H, L, S)              |
/// | `head`   | (N, L, S)                 |
/// | `rows`   | (N, H, rows, S)           |
/// | `block`  | (N, rows, keys)           |
/// | `mean`   | (N, L, S) or (N, rows, S) |
/// | `pooled` | (N, H, rows, columns)     |
/// | `top_k`  | (N, H, L, k)              |
/// | `sums`   | see `AttributionSums`     |
///
/// N, S, dtypes, indices, devices and threads are those of `AttentionMap`, and so is the
/// memory: that of the result and, for each thread, of one block. No (L, S) tensor is held but
/// where it is the result; elsewhere than on the kernels some rows are formed at a time.
///
/// Where the mask blocks and in rows that may attend to nothing, weight and gradient are 0,
/// whatever lies there; NaN elsewhere reaches the pairs of its query or key. No gradient flows
/// from the results. Sinks have a weight and no value, and so no gradient here.
///
/// The constructor and the methods throw `c10::Error` that names the argument, what was
/// expected and what was found; a method too if a kept tensor was modified in place since, or
/// after the object was moved from.
///
/// Source: Chefer, Gur & Wolf, "Generic Attention-model Explainability for Interpreting
/// Bi-Modal and Encoder-Decoder Transformers", 2021, section 3, for the positive part of A * G
/// averaged over heads.
class AttentionAttribution {
 public:
  /// Of the map's call: `value` (..., Hk, S, Dv) of the dtype of the map's keys and
  /// `grad_output` (..., H, L, Dv) of that of its queries. S includes appended keys. Tensors
  /// are kept, not copied, and without their graph.
  ///
  ///     auto [output, map] = mha::trace_scaled_dot_product_attention(q, k, v);
  ///     output.retain_grad();
  ///     loss(output).backward();
  ///     mha::AttentionAttribution attribution(map, v, output.grad());
  ///
  /// Of modules, `MapRecorder` collects all three. (LibTorch's own way, `retain_grad()` of
  /// returned weights, finds G only where the output is computed from them, which is on the
  /// plain path and in one block: small float64 calls. On the kernels their `grad()` stays
  /// undefined.)
  AttentionAttribution(const AttentionMap& map, const at::Tensor& value,
                       const at::Tensor& grad_output);

  /// All pairs.
  at::Tensor dense(Attribution shown) const;
  /// Those of head `h`.
  at::Tensor head(Attribution shown, int64_t h) const;
  /// Those of queries [from, to).
  at::Tensor rows(Attribution shown, int64_t from, int64_t to) const;
  /// Those of some queries and some keys in one head.
  at::Tensor block(Attribution shown, int64_t h, IndexRange rows, IndexRange keys) const;

  /// The mean over the heads, of all queries or of queries [from, to). Of
  /// `positive_relevance` it is the mean of each head's positive part, as Chefer et al. define
  /// a layer's relevance.
  at::Tensor mean(Attribution shown) const;
  at::Tensor mean(Attribution shown, int64_t from, int64_t to) const;

  /// Cells as in `AttentionMap::pooled`: the mean over a cell's queries of the sum over its
  /// keys.
  at::Tensor pooled(Attribution shown, int64_t rows, int64_t columns) const;

  /// Of each query the k largest numbers and their keys, 1 <= k <= S; of equal ones the earlier
  /// keys. Where no further one is above 0, the value is 0 and the key -1; in a row that has a
  /// NaN they are NaN and -1. The most negative ones are the largest of the attribution with
  /// -grad_output.
  TopKeys top_k(Attribution shown, int64_t k) const;

  /// All three in one walk.
  AttributionSums sums(Attribution shown) const;

  /// The weights A.
  AttentionMap map() const;
  /// The same on another device.
  AttentionAttribution to(at::Device device) const;
  /// (..., Hk, S, Dv) and (..., H, L, Dv), as they are kept.
  at::Tensor value() const;
  at::Tensor grad_output() const;
  /// Bytes of what is kept: those of the map, the values and the gradient.
  int64_t nbytes() const;

  /// For the library's own calls.
  explicit AttentionAttribution(std::shared_ptr<const detail::AttributionState> state);

 private:
  const detail::AttributionState& state() const;

  std::shared_ptr<const detail::AttributionState> state_;
};

/// How much each input token contributed to the loss by way of each output token of a stack of
/// self-attention layers, (N, T, T):
///
///     R = I,  then for each layer  R = R + E @ R,  E = mean over heads of max(0, A * G)
///
/// `layers` are in the order in which they were applied, each with L = S = T and no appended
/// keys, and all with gradients of one loss. The row of the token that a classifier reads
/// (BERT's [CLS]) explains its class; R - I leaves out the token's own part. The product's last
/// bits may depend on the number of threads.
/// Throws `c10::Error` if there is no layer, or sizes differ.
///
/// Source: Chefer, Gur & Wolf, "Generic Attention-model Explainability for Interpreting
/// Bi-Modal and Encoder-Decoder Transformers", 2021, section 3.
at::Tensor attention_relevance(const std::vector<AttentionAttribution>& layers);

}  // namespace mha
