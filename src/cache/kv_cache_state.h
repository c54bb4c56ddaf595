#pragma once

#include <ATen/core/Tensor.h>
#include <mha/kv_cache.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace mha::detail {

/// The sizes of keys and values to append.
struct AppendSizes {
  int64_t batch, kv_heads, tokens, head_dim, value_dim;
};

/// What an append will do, decided before anything is changed.
struct AppendPlan {
  int64_t keys = 0;              ///< S: how many the queries attend to
  std::vector<int64_t> added;    ///< tokens that each sample gets
  std::vector<int64_t> offsets;  ///< where each sample's first new token stands in the S keys
  bool aligned = true;           ///< every sample ends with the last query and the last key
  bool drops = false;            ///< what lies before the window goes first
  int64_t first = 0;             ///< where the S keys begin in memory
};

/// Says which layer's tokens a cache holds. Unlike an address it is never another's later.
using LayerToken = std::weak_ptr<const void>;

/// What a `KVCache` is a handle of: two buffers (N, Hk, capacity, D) with the samples' tokens
/// at their beginning.
class KVCacheState {
 public:
  explicit KVCacheState(KVCacheOptions options);

  /// Checks sizes, new lengths (undefined: all tokens are real) and capacity.
  AppendPlan plan(const AppendSizes& sizes, const at::Tensor& new_lengths) const;
  /// Checks the tensors beyond their sizes, and appends. The last `extra` of the tokens are not
  /// kept: they stand after the S keys of this result alone.
  CachedKeys append(const at::Tensor& key, const at::Tensor& value, const AppendPlan& plan,
                    int64_t extra);

  CachedKeys held() const;
  int64_t longest() const;
  /// The position of each sample's next token, of a batch of n; 0 for what no append has seen.
  std::vector<int64_t> next_positions(int64_t n) const;
  /// Throws if the tokens that are held are those of another layer.
  void check_layer(const LayerToken& other) const;
  /// Forgets of each sample the tokens at positions from that of its own length on.
  void crop(const std::vector<int64_t>& to);
  void reset();
  void reorder(const std::vector<int64_t>& from);
  void to(at::Device device);
  /// Takes what a file holds; `next_positions` - `lengths` tokens were dropped.
  void restore(const CachedKeys& contents, std::vector<int64_t> lengths,
               const std::vector<int64_t>& next_positions);

  KVCacheOptions options;
  std::vector<int64_t> lengths;  ///< tokens held, N of them
  std::vector<int64_t> dropped;  ///< tokens that came before these
  at::Tensor keys, values;       ///< undefined before the first append
  LayerToken layer;              ///< whose call appended last; empty: none's

 private:
  int64_t room() const { return keys.defined() ? keys.size(2) : 0; }
  // Of a sample with this many tokens: how many the next query needs, and how many stay where
  // others are dropped, for `crop`.
  int64_t needed(int64_t length) const;
  int64_t retained(int64_t length) const;
  void drop(int64_t new_room);
  // Moves the last counts[n] tokens of each sample into new buffers, so that what was given out
  // stays as it is.
  void relocate(std::vector<int64_t> counts, int64_t new_room);
  void write(int64_t at_token, const at::Tensor& key, const at::Tensor& value, int64_t from,
             std::optional<int64_t> sample, int64_t count);

  int64_t written_ = 0;  // up to here, memory may have been given out
};

/// Puts a cache back to what it was when this was made, unless `keep` is called: a call that
/// fails half-way may be made again. What a state holds is never written where it was valid.
class CacheRollback {
 public:
  /// Null: nothing to put back.
  explicit CacheRollback(KVCacheState* state) : state_(state) {
    if (state) before_.emplace(*state);
  }
  ~CacheRollback() {
    if (before_) *state_ = std::move(*before_);
  }
  CacheRollback(const CacheRollback&) = delete;
  CacheRollback& operator=(const CacheRollback&) = delete;
  void keep() noexcept { before_.reset(); }

 private:
  KVCacheState* state_;
  std::optional<KVCacheState> before_;
};

}  // namespace mha::detail
