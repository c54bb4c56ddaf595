#pragma once

#include <iosfwd>

#include "attention/plain_attention.h"

// Random calls of the attention core, below the checks of the public function.
namespace mha::detail {

/// Sizes, mask and options of a call; `extra` keys after `keys` are open to every query.
struct AttentionSetting {
  int64_t batch, heads, kv_heads, queries, keys, extra, head_dim, value_dim;
  Mask mask;
  AttentionCall call;
};
/// With the instruction set in use, which is part of what failed.
std::ostream& operator<<(std::ostream& stream, const AttentionSetting& setting);

/// scale 1/sqrt(D), no dropout, no weights.
AttentionCall call_for(int64_t head_dim);

/// Any sizes, masks, dropout and weights; one in four has few queries and many keys.
AttentionSetting draw_setting(int64_t seed);

ResolvedMask resolved_mask(const AttentionSetting& setting);

}  // namespace mha::detail
