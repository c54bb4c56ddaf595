#pragma once

#include <cstdint>

#include "attention/attention.h"

namespace mha::detail {

/// What `at::scaled_dot_product_attention` is asked for in place of a call: from the queries
/// after `dead_queries`, with `padding` queries put before them, over the first `keys` keys.
struct TorchForm {
  enum class Pairs {
    all,
    causal,  ///< query i sees the keys up to i, and all of them where i >= keys
    masked,  ///< as a tensor says that broadcasts to them
  };
  Pairs pairs = Pairs::all;
  int64_t dead_queries = 0;  ///< the first, which see no key
  int64_t padding = 0;       ///< numbers of no meaning, whose outputs are dropped
  int64_t keys = 0;
  /// If not 0, the mask is a tensor that takes too much memory for all queries at once, and is
  /// formed for so many.
  int64_t block_queries = 0;
  /// Why it cannot be asked for, a clause that completes "because ..."; null: it can.
  const char* refusal = nullptr;
};

/// Whether LibTorch has fused attention for a device, and what a form says where it has none.
bool has_torch_attention(at::Device device);
constexpr const char* no_torch_attention = "LibTorch has no fused attention for the device";

/// How to ask LibTorch for a call that means the same, with no (L, S) tensor that takes more
/// than `plain_block_bytes`.
TorchForm torch_form(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const ResolvedMask& mask, const AttentionCall& call);

}  // namespace mha::detail
