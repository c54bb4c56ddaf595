#pragma once

#include <mha/multi_head_attention.h>

#include <memory>

#include "map/map_state.h"
#include "module/packed_weight.h"

namespace mha::detail {

/// Whether a call's map is wanted beside its output.
enum class MapOfCall { unwanted, wanted };

struct ModuleResult {
  at::Tensor output, weights;           ///< in the module's layout; undefined: unwanted
  std::shared_ptr<const MapState> map;  ///< null: unwanted
};

/// One call of a module, from the check of its arguments to its results: what
/// `MultiHeadAttentionImpl::attend` says. `cache` also tells this layer's caches of keys from
/// another's.
ModuleResult call_module(MultiHeadAttentionImpl& module,
                         const std::shared_ptr<PackedWeights>& cache, const at::Tensor& query,
                         const at::Tensor& key, const at::Tensor& value,
                         const CallOptions& call, MapOfCall map = MapOfCall::unwanted);

/// `MultiHeadAttentionImpl::project_keys`.
KVCache project_memory(MultiHeadAttentionImpl& module, PackedWeights& cache,
                       const at::Tensor& key, const at::Tensor& value,
                       const KVCacheOptions& options);

}  // namespace mha::detail
