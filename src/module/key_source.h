#pragma once

#include <mha/multi_head_attention.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cache/kv_cache_state.h"
#include "module/module_checks.h"
#include "module/tokens.h"

namespace mha::detail {

/// Where a call's keys come from, and what the mask says of them.
struct KeySource {
  /// What is to be projected, as it was given: of self-attention the query. Undefined: nothing.
  at::Tensor key, value;
  InputSizes sizes{};  ///< keys: those given, with the cached ones
  Mask mask;           ///< the caller's, and what the cache's window blocks
  at::Tensor lengths;  ///< (N) keys that each sample has, if not all
  at::Tensor offsets;  ///< (N) where each sample's first query stands, if not by size
  KVCacheState* cache = nullptr;  ///< null: the call's own tokens
  bool appends = false;           ///< the call's tokens join the cache
  /// Positions of each sample's first token, of a memory those after its last; empty: 0.
  std::vector<int64_t> positions;
  AppendPlan plan;
  at::Tensor real_queries;  ///< (N) queries before a sample's padding; undefined: no padding
  LayerToken layer;         ///< whose call it is
};

/// Chooses and checks the inputs of a call, its cache options and what an append would do.
/// Key and value are those given. `layer` is one for each module and all that share its
/// parameters.
KeySource find_keys(const MultiHeadAttentionImpl& module, const LayerToken& layer,
                    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const CallOptions& call);

/// Appends the projected keys and values where the call does, and puts what its queries attend
/// to in their place. The last `extra` tokens belong to this call alone.
void take_cached_keys(const KeySource& source, const MultiHeadAttentionImpl& module,
                      int64_t extra, Heads& heads);

}  // namespace mha::detail
