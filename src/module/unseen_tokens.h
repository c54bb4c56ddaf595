#pragma once

#include <ATen/core/Tensor.h>
#include <mha/multi_head_attention.h>

#include "mask/resolved_mask.h"
#include "module/key_source.h"
#include "module/tokens.h"

namespace mha::detail {

/// The tokens of a call that its mask leaves without effect. Undefined: there are none.
struct UnseenTokens {
  at::Tensor keys;     ///< (N or 1, S) true: no query sees this given key
  at::Tensor queries;  ///< (N or 1, L) true: this query sees no given key
};

/// Without an L x S tensor, but where the mask itself has one.
UnseenTokens unseen_tokens(const ResolvedMask& mask, at::Device device);

/// Puts zeros in place of the tokens that can have no effect: queries that see nothing or are
/// padding, keys and values that nobody sees. NaN there would reach the gradients of the
/// projections as 0 * NaN, and a finite number may become one in a norm or a gate.
void drop_unseen_tokens(const MultiHeadAttentionImpl& module, const KeySource& source,
                        const ResolvedMask& mask, Tokens& tokens);

}  // namespace mha::detail
