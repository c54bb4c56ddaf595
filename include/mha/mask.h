#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <vector>

namespace mha {

/// Which keys each query may attend to, and what is added to its scores.
///
/// A `Mask` is a value. What a tensor's elements mean is in the name of the constructor and is
/// never guessed from its dtype. `a & b` combines two masks: a key must be allowed by both, and
/// added terms sum. A default-constructed mask allows everything.
///
// clang-format off
/// | constructor           | an element means                                | accepts       |
/// | --------------------- | ----------------------------------------------- | ------------- |
/// | `keep(t)`             | 0 blocks, what is above 0 may attend            | flags         |
/// | `block(t)`            | true blocks                                     | bool          |
/// | `add(t)`              | added to the scaled scores; -inf blocks         | floating      |
/// | `keep_keys(t)`        | 0 marks padding, what is above 0 is a real key  | (N, S) or (S) |
/// | `block_keys(t)`       | true marks padding                              | (N, S) or (S) |
/// | `add_keys(t)`         | added to the scores of a key; -inf blocks       | (N, S) or (S) |
/// | `lengths(t)`          | keys at an index >= length are padding          | (N) integers  |
/// | `real_queries(t)`     | 0 marks a query that is padding                 | (N, L) or (L) |
/// | `query_lengths(t)`    | queries at an index >= length are padding       | (N) integers  |
/// | `causal(alignment)`   | a query sees the keys up to its own position    |               |
/// | `window(left, right)` | a query sees this far to either side of itself  |               |
/// | `documents(ids)`      | a query sees the keys of its own document       | integers      |
/// | `relative(table)`     | added to the scores by distance                 | floating      |
/// | `alibi(slopes)`       | minus slope * distance is added to the scores   | (H) floating  |
// clang-format on
///
/// Where `causal` and `window` take offsets, (N) integers, in place of an alignment, query i of
/// sample n stands at key offsets[n] + i: that of a batch whose caches have different lengths.
/// Masks of position, of documents, of single keys and of single queries never become an L x S
/// tensor on the fused path.
///
/// Tensor shapes: (L, S); (N, L, S); (N*H, L, S) with index n*H + h; (N or 1, H or 1, L, S).
/// The first dimension of a 3-D tensor is the batch or N*H, never the heads alone; where N =
/// N*H the two readings agree. N is the batch size, H the number of heads, L the number of
/// queries, S the number of keys. Nothing else broadcasts. A mask that was expanded, over heads
/// say, takes the memory and the time of what it repeats; only a gradient into it has its size.
///
/// A query that may attend to nothing gets weights 0 and attention output 0, and no gradient
/// flows through it. A blocked key or value never reaches a result or a gradient, even if it is
/// NaN or infinite.
///
/// Tensors are strided, of float32, float64, bfloat16 or float16 where they are floating, and
/// of uint8, int8, int16, int32 or int64 where they are integers. What does not depend on the
/// sizes of a call (dtype, layout, window extent) is checked by the named constructor, the rest
/// by the call that uses the mask. Both throw `c10::Error`.
class Mask {
 public:
  /// How query positions map to key positions when L != S. With `bottom_right` the last query
  /// stands at the last key, which is what decoding with a key/value cache needs. With
  /// `top_left` the first query stands at the first key, as in torch's `is_causal`.
  enum class Alignment { bottom_right, top_left };

  /// Allows everything.
  Mask() = default;

  /// 0 blocks, any value above 0 may attend. Bool, integers, floating or complex, where all but
  /// 0 may. Throws if a value is below 0 or NaN, which is no flag: a mask of 0 and -inf is for
  /// `add`. The meaning of `mask == 0` in from-scratch code and of a bool mask in torch's
  /// `scaled_dot_product_attention`.
  static Mask keep(const at::Tensor& mask);

  /// true blocks. The meaning of a bool `attn_mask` of `torch.nn.MultiheadAttention`.
  /// Throws if the dtype is not bool.
  static Mask block(const at::Tensor& mask);

  /// Added to the scaled scores; -inf blocks. The values are brought to the precision of the
  /// scores, and gradients flow into the tensor. Throws if the dtype is not floating.
  static Mask add(const at::Tensor& mask);

  /// One element a key: 0 is padding, any value above 0 a real key. Dtypes as in `keep`;
  /// (N, S) or (S). The meaning of `attention_mask` in Hugging Face models. Throws if a value
  /// is below 0 or NaN.
  static Mask keep_keys(const at::Tensor& mask);

  /// One element a key: true is padding. (N, S) or (S).
  /// The meaning of `key_padding_mask` in torch. Throws if the dtype is not bool.
  static Mask block_keys(const at::Tensor& mask);

  /// One number a key, added to the scores of every query; -inf is padding. (N, S), (S) or, as
  /// Hugging Face's models extend their mask, (N or 1, 1, 1, S). Gradients flow into the
  /// tensor. The meaning of a floating `key_padding_mask` in torch. Throws if the dtype is not
  /// floating.
  static Mask add_keys(const at::Tensor& mask);

  /// Keys of sample n at index >= lengths[n] are padding. (N) integers, 0 <= length <= S.
  /// Throws if the dtype is not an integer type.
  static Mask lengths(const at::Tensor& lengths);

  /// One element a query: 0 is padding, which attends to none of the S keys, so that its row is
  /// zeros and passes no gradient. Dtypes as in `keep`; (N, L) or (L). Keys that a module
  /// appends (`add_bias_kv`, `add_zero_attn`) stay open to it, as under every mask. Throws if a
  /// value is below 0 or NaN.
  static Mask real_queries(const at::Tensor& mask);

  /// The same: queries of sample n at index >= lengths[n] are padding. (N) integers, 0 <=
  /// length
  /// <= L. Throws if the dtype is not an integer type.
  static Mask query_lengths(const at::Tensor& lengths);

  /// A query sees no key after its own position i': key j is allowed where j <= i',
  /// i' = i + S - L with `bottom_right` and i' = i with `top_left`.
  static Mask causal(Alignment alignment = Alignment::bottom_right);

  /// The same with positions of each sample's own: i' = i + offsets[n]. (N) integers. An offset
  /// may be negative, or so large that i' >= S. Throws if the dtype is not an integer type.
  static Mask causal(const at::Tensor& offsets);

  /// Key j is allowed where i' - left <= j <= i' + right; -1 leaves that side open. i' is the
  /// aligned query position as in `causal`. Throws if an extent is below -1.
  static Mask window(int64_t left, int64_t right,
                     Alignment alignment = Alignment::bottom_right);

  /// The same with positions of each sample's own, as in `causal(offsets)`.
  static Mask window(int64_t left, int64_t right, const at::Tensor& offsets);

  /// Packed sequences: a query sees the keys whose document id equals its own. (S) or (N, S)
  /// integers where L = S. Ids may come in any order; blocks of keys that belong to none of a
  /// block's documents cost nothing. Throws if the dtype is not an integer type.
  static Mask documents(const at::Tensor& ids);
  /// The same for queries, (L) or (N, L), and keys, (S) or (N, S), with ids of their own.
  static Mask documents(const at::Tensor& query_ids, const at::Tensor& key_ids);
  /// The same by cumulative lengths (documents + 1): 0, then where each document ends, up to
  /// S = L. The `cu_seqlens` of variable-length attention.
  static Mask documents_from_lengths(const at::Tensor& cumulative);

  /// Adds table[h][(j - i) + L - 1] to the score of query i and key j. (H or 1, L + S - 1)
  /// floating; gradients flow into it. Entries are finite or NaN: one of -inf would block, and
  /// throws. Over a cache whose samples have different lengths, query i of sample n stands at
  /// key i', as in `causal`, and the entry is [h][(j - i') + S - 1]: the same by distance.
  static Mask relative(const at::Tensor& table);

  /// Adds -slopes[h] * |i' - j|, where i' is the aligned query position as in `causal`. (H)
  /// floating, as `alibi_slopes` gives them or learned: gradients flow into them.
  /// Source: Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input
  /// Length Extrapolation", 2022.
  static Mask alibi(const at::Tensor& slopes, Alignment alignment = Alignment::bottom_right);
  /// The same with i' = i + offsets[n], as in `causal(offsets)`.
  static Mask alibi(const at::Tensor& slopes, const at::Tensor& offsets);

  /// Both masks hold: a key must be allowed by each, and added terms sum.
  friend Mask operator&(const Mask& a, const Mask& b);

  /// Whether no term was ever given, so that every query may attend to every key.
  bool allows_everything() const { return terms_.empty(); }

  /// One named constructor's call. `Mask` is the list of them that must all hold.
  struct Term {
    enum class Kind {
      keep,
      block,
      add,
      keep_keys,
      block_keys,
      add_keys,
      lengths,
      real_queries,
      query_lengths,
      causal,
      window,
      documents,
      document_lengths,
      relative,
      alibi
    };
    Kind kind;
    at::Tensor tensor;  // of a band: offsets, or undefined
    // What `tensor` isn't: the ids of the keys of documents; offsets of alibi, or undefined.
    at::Tensor second = {};
    int64_t left = -1, right = -1;                  // extent of a band, -1: open
    Alignment alignment = Alignment::bottom_right;  // of a band or alibi
  };
  const std::vector<Term>& terms() const { return terms_; }

  /// The same mask with its tensors on another device, where a call's query is. Gradients flow
  /// back to the tensors it was made of.
  Mask to(at::Device device) const;

 private:
  explicit Mask(Term term);
  std::vector<Term> terms_;
};

/// Writes the terms, for example `causal(bottom_right) & keep_keys(Long [2, 7])`.
std::ostream& operator<<(std::ostream& stream, const Mask& mask);

/// The slopes of `Mask::alibi` as published, (H) float32: 2^(-8 / H), its square, and so on
/// where H is a power of two; otherwise those of the power below, then every other one of twice
/// as many heads. Throws if num_heads is not positive, or above 2^20.
at::Tensor alibi_slopes(int64_t num_heads);

}  // namespace mha
