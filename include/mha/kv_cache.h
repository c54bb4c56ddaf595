#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace mha {

namespace detail {
class KVCacheState;
}

/// Options of `KVCache`.
struct KVCacheOptions {
  /// Most tokens of a sample. Their memory is taken at the first append, and an append beyond
  /// it throws. Default: no limit, the memory grows by doubling.
  TORCH_ARG(std::optional<int64_t>, capacity);
  /// Keep what a window of this many keys needs, the query's own among them: the window - 1
  /// keys before the next token. Memory is that of 2 * window tokens. Not with `capacity`.
  /// Default: keep all.
  TORCH_ARG(std::optional<int64_t>, window);
  /// What keys and values are stored as: float32, float64, bfloat16 or float16. Default: the
  /// dtype of the first keys. The module's own cached calls give them in that of its
  /// parameters.
  TORCH_ARG(std::optional<at::ScalarType>, dtype);
};

/// Projected keys and values.
struct CachedKeys {
  at::Tensor key;    ///< (N, Hk, S, D)
  at::Tensor value;  ///< (N, Hk, S, Dv)
};

/// The projected keys and values of the tokens so far, so that the next token costs one row of
/// the projections and one read of the cache.
///
///     mha::KVCache cache;
///     at::NoGradGuard no_grad;
///     attention->attend(prompt, mha::CallOptions(mha::Mask::causal()).cache(cache));
///     attention->attend(next_token, mha::CallOptions().cache(cache));
///
/// Step by step, in chunks or at once: the outputs are those of one causal call to rounding. A
/// module needs a cache of its own: while it holds tokens that one module's calls appended, a
/// call of another that would append throws. A `clone`, what `load` read and an empty cache are
/// free for any. It takes sizes, dtype and device from the first keys.
///
/// | tensor | shape                                                            |
/// | ------ | ---------------------------------------------------------------- |
/// | key    | (N, Hk, S, D), heads outside: a head's keys lie one after another |
/// | value  | (N, Hk, S, Dv)                                                    |
///
/// Samples may have different lengths: tokens of sample n stand at indices 0 to lengths[n] - 1,
/// and what follows up to S, the longest, means nothing.
///
/// A `KVCache` is a handle: copies share the cache, as copies of an `at::Tensor` share memory,
/// and so do the elements of `std::vector<KVCache>(n, KVCache(options))`. `clone` copies the
/// contents. Not for use by two threads at once. One that was moved from throws at every use.
///
/// Tensors that the cache gave out stay as they are while tokens are appended. Tokens that are
/// appended after `crop` or `reset` may take their place; autograd and `AttentionMap` notice.
///
/// No gradient flows into a cache, since it is written in place: where keys or values ask for
/// one, `append` throws. Use `at::NoGradGuard`. Gradients flow into queries.
///
/// Every method throws `c10::Error` that names the argument, what was expected and what was
/// found, and then leaves the cache as it was. So does a module's call that fails, however
/// late.
class KVCache {
 public:
  /// Throws if capacity or window are below 1 or above 2^40, both are given, or the dtype is
  /// not one of those named.
  explicit KVCache(KVCacheOptions options = {});

  const KVCacheOptions& options() const;

  /// Appends L tokens: key (N, Hk, L, D) and value (N, Hk, L, Dv), of any strides and floating
  /// dtype. Returns what the new tokens' queries attend to: the cached tokens and the new ones,
  /// as views. With `window` these are at most window - 1 cached ones a sample; a query amid
  /// the new ones sees too many of them without `Mask::window(window - 1, -1)`, which the
  /// module adds by itself.
  CachedKeys append(const at::Tensor& key, const at::Tensor& value);
  /// Appends to sample n only the first new_lengths[n] of the L tokens; the others are padding.
  /// (N) integers, 0 <= length <= L.
  CachedKeys append(const at::Tensor& key, const at::Tensor& value,
                    const at::Tensor& new_lengths);

  /// All that is held, as a view: S is the longest sample's length. Undefined before the first
  /// append.
  at::Tensor key() const;
  at::Tensor value() const;

  /// N; 0 before the first append.
  int64_t batch_size() const;
  /// Tokens that each sample holds, (N) int64 on the CPU; empty before the first append.
  at::Tensor lengths() const;
  /// The position of each sample's next token, (N) int64 on the CPU: its length and what a
  /// window has dropped. Empty before the first append.
  at::Tensor next_positions() const;

  /// Forgets the tokens at positions >= length, of the samples that have them. A cache with a
  /// window throws if it no longer holds the keys that a query at that position needs; it holds
  /// them at least window / 2 tokens back.
  void crop(int64_t length);
  /// The same with a length for each sample, as where drafts are rejected at different places:
  /// of sample n, forgets the tokens at positions >= lengths[n]. (N) integers from 0 on. If one
  /// sample cannot be cropped, none is.
  void crop(const at::Tensor& lengths);
  /// Forgets all tokens and keeps the memory, for a batch of the same sizes or of others.
  void reset();

  /// Sample i is from now on what sample indices[i] was, as beam search needs it. (M) integers
  /// from 0 to N - 1; M may differ from N.
  void reorder(const at::Tensor& indices);
  /// Repeats each sample: n copies of sample 0, n of sample 1, ... n >= 1, up to 2^24 samples.
  void repeat(int64_t n);

  /// A cache with equal contents and memory of its own.
  KVCache clone() const;

  /// Moves what is held to another device, as `module->to(device)` does with parameters. Keys
  /// that come after must be there too. A cache on meta has shapes alone, and stays there.
  void to(at::Device device);

  /// Bytes of memory taken.
  int64_t nbytes() const;

  /// Writes a safetensors file with `key`, `value`, `lengths` and `next_positions`, whole or
  /// not at all. Throws if the cache is empty or the file cannot be written.
  void save(const std::string& path) const;
  /// Reads what `save` wrote, to the CPU; `to` moves it. Options are the caller's; the dtype
  /// defaults to the file's. The file may be hostile: all that it says is checked before it is
  /// used. Throws if it is no cache, if it does not fit `capacity`, or lacks keys that the
  /// window needs.
  static KVCache load(const std::string& path, const KVCacheOptions& options = {});

  /// For the library's own calls.
  detail::KVCacheState& state() const;

 private:
  std::shared_ptr<detail::KVCacheState> state_;
};

}  // namespace mha
