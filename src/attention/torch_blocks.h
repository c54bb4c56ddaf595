#pragma once

#include "attention/torch_form.h"

namespace mha::detail {

/// `torch_attention` of `form.block_queries` queries at a time, where the mask would be a
/// tensor of all pairs: it is formed for the pairs of a block and the keys in its band. A
/// backward keeps the given tensors alone, forms each block's mask again and asks LibTorch
/// again.
AttentionResult torch_attention_in_blocks(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const ResolvedMask& mask,
                                          const AttentionCall& call, const TorchForm& form);

}  // namespace mha::detail
