#pragma once

#include <mha/call_options.h>
#include <mha/multi_head_attention.h>

#include <cstdint>
#include <vector>

#include "module/tokens.h"

namespace mha::detail {

/// Rotary positions of a call's tokens, or by default: see `CallOptions::positions`. `cached`
/// tokens of each sample came before; empty: none. Throws `c10::Error` that names the argument.
HeadPositions head_positions(const MultiHeadAttentionOptions& options, const CallOptions& call,
                             const Tokens& tokens, const std::vector<int64_t>& cached);

}  // namespace mha::detail
