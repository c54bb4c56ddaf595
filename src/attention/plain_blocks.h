#pragma once

#include <cstdint>
#include <vector>

#include "attention/attention.h"

namespace mha::detail {

/// How many queries at a time the composition of ATen calls computes, so that what it holds for
/// them stays within 64 MiB on the CPU and 256 MiB elsewhere, or within `MHA_BLOCK_BYTES` bytes
/// if that is set in the environment; at least one query. As many as there are: all at once.
int64_t plain_block_rows(int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                         at::ScalarType dtype, at::Device device);

/// `plain_attention` in blocks of `rows` queries: the forward and gradients of any order hold
/// (N, H, rows, S) tensors instead of (N, H, L, S), but for weights that are asked for.
///
/// The numbers are those of one block up to the order of the sums in the products and, behind a
/// band that cuts keys off, in the softmax. Dropout keeps the same weights on the CPU, whatever
/// the blocks.
AttentionResult plain_attention_in_blocks(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const ResolvedMask& mask,
                                          const AttentionCall& call, int64_t rows);

/// The same with `plain_block_rows`.
AttentionResult plain_attention_in_blocks(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const ResolvedMask& mask,
                                          const AttentionCall& call);

/// Gradients of `given`, which are query, key, value, the terms that the mask adds and the
/// sinks, if any, from those of output and weights, which may be undefined. They have gradients
/// themselves if gradients are recorded.
std::vector<at::Tensor> plain_gradients(const std::vector<at::Tensor>& given,
                                        const std::vector<at::Tensor>& grad_results,
                                        const ResolvedMask& mask, const AttentionCall& call,
                                        int64_t rows);

}  // namespace mha::detail
