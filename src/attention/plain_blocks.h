#pragma once

#include <cstdint>
#include <vector>

#include "attention/attention.h"

namespace mha::detail {

/// What a block has of each dimension.
struct BlockSizes {
  int64_t samples, kv_heads, queries;
};

/// What the composition of ATen calls may hold of pairs of queries and keys at once: 32 MiB on
/// the CPU and 256 MiB elsewhere, or `MHA_BLOCK_BYTES` if that is set in the environment.
int64_t plain_block_bytes(at::Device device);

/// The blocks that the composition of ATen calls is computed in, so that what it holds for one
/// stays within `plain_block_bytes`; at least one query of the heads that share keys. Averaged
/// weights take all heads at once.
BlockSizes plain_block_sizes(const ResolvedMask& mask, int64_t kv_heads, at::ScalarType dtype,
                             at::Device device, Weights weights);

/// Whether all of a call is one block.
bool is_one_block(const BlockSizes& sizes, const ResolvedMask& mask, int64_t kv_heads);

/// `plain_attention` in blocks: the forward and gradients of any order hold tensors of the
/// pairs in a block instead of (N, H, L, S), but for weights that are asked for.
///
/// The numbers are those of one block up to the order of the sums in the products and, behind a
/// band that cuts keys off, in the softmax. Dropout keeps the same weights on the CPU, whatever
/// the blocks.
AttentionResult plain_attention_in_blocks(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const ResolvedMask& mask,
                                          const AttentionCall& call, const BlockSizes& sizes);

/// The same with `plain_block_sizes`.
AttentionResult plain_attention_in_blocks(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const ResolvedMask& mask,
                                          const AttentionCall& call);

}  // namespace mha::detail
