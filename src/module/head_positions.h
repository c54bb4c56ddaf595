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

/// Whether a module asks for its tokens' positions.
bool has_positions(const MultiHeadAttentionOptions& options);

/// The factors of queries at these positions, (1, 1, T, 1) or (N, 1, T, 1) on `device`;
/// undefined without `temperature_tuning`.
at::Tensor query_tuning(const MultiHeadAttentionOptions& options, const at::Tensor& positions,
                        at::Device device);

/// The largest position of a call, of one element, where its rotation depends on it; else, and
/// where the call has no positions, undefined.
at::Tensor longest_position(const MultiHeadAttentionOptions& options,
                            const HeadPositions& positions);

}  // namespace mha::detail
