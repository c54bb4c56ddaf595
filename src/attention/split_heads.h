#pragma once

#include <mha/scaled_dot_product_attention.h>

#include <vector>

#include "mask/resolved_mask.h"

namespace mha::detail {

/// The arguments of a call of the functional form, checked, with memory as their strides say
/// and the dimensions before the heads as one.
struct SplitHeads {
  at::Tensor query, key, value;  ///< (N, H, L, D), (N, Hk, S, D), (N, Hk, S, Dv)
  ResolvedMask mask;
  AttentionOptions options;
  std::vector<int64_t> leading;  ///< the dimensions before the heads, whose product is N
};

/// Checks all arguments against each other. Throws `c10::Error` naming the argument, what was
/// expected and what was found.
SplitHeads split_heads(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       const Mask& mask, const AttentionOptions& options);

/// `tensor` (N, ...), which may be undefined, with the dimensions `leading` in place of N.
at::Tensor with_leading(const at::Tensor& tensor, at::IntArrayRef leading);

}  // namespace mha::detail
