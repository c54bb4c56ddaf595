#pragma once

#include <ATen/core/Tensor.h>

// The products of attention where some pairs are blocked and no number may be asked for: on
// other devices than the CPU, which would be waited for, on meta and in traces. What is behind
// a mask is kept away by arithmetic that is the same for any numbers.
namespace mha::detail {

/// left (N, H, L, X) @ right (N, Hk, X, Y) -> (N, H, L, Y). The query heads that share a
/// key/value head become rows of one product, so that the shared head is never copied.
at::Tensor grouped_matmul(const at::Tensor& left, const at::Tensor& right);

/// (N, Hk, ..) -> (N, heads, ..), a copy for each query head.
at::Tensor expand_heads(const at::Tensor& tensor, int64_t heads);

/// scale * query . key, (N, H, L, S), held within the dtype's range.
///
/// A row that is not finite makes its own scores NaN (without gradients: what they come to) and
/// no others, so that blocked ones may be filled; gradients of other rows don't meet it. Takes
/// query and key once more, and no tensor of pairs beside the scores.
at::Tensor unread_scores(const at::Tensor& query, const at::Tensor& key, double scale);

/// weights . value, (N, H, L, Dv), where `weights` are 0 at blocked pairs. `allowed` (N or 1, H
/// or 1, L or 1, S or 1) says which are not: what of their values is not finite makes the
/// result so, though their weight may have underflowed to 0, and no other does.
///
/// Takes value once more, `allowed` in bfloat16, and one product in bfloat16 of twice the
/// values' columns, for each head of `allowed` alone.
at::Tensor unread_output(const at::Tensor& weights, const at::Tensor& value,
                         const at::Tensor& allowed);

/// (N or 1, Hk or 1, S or 1, 1): the keys that no query sees.
at::Tensor unseen_keys(const at::Tensor& allowed, int64_t kv_heads);

/// `output` (N, H, L, Dv) with infinity or NaN, without a gradient, where an open key has it in
/// its column of `value` (N, Hk, S, Dv).
at::Tensor with_unread_values(const at::Tensor& output, const at::Tensor& value,
                              const at::Tensor& allowed);

}  // namespace mha::detail
