#pragma once

#include <mha/call_options.h>
#include <mha/multi_head_attention.h>

#include <cstdint>
#include <vector>

#include "module/head_projections.h"
#include "module/module_checks.h"

namespace mha::detail {

/// What the keys of a call are, for its positions.
enum class KeyTokens {
  queries,    ///< the queries' tokens
  others,     ///< tokens of their own
  projected,  ///< those of a memory, which are rotated already
};

/// Rotary positions of a call, or by default: see `CallOptions::positions`. `sizes.keys` are
/// the keys that the call projects, or those of its memory. `cached` tokens of each sample came
/// before; empty: none. Throws `c10::Error` that names the argument.
HeadPositions head_positions(const MultiHeadAttentionOptions& options, const CallOptions& call,
                             const InputSizes& sizes, KeyTokens keys,
                             const std::vector<int64_t>& cached = {});

}  // namespace mha::detail
