#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>

#include "attention/attention.h"

namespace mha::detail {

/// Attention as a composition of ATen calls: any device, any floating dtype, every option, and
/// gradients of every order. It holds the whole (N, H, L, S) map: `plain_attention_in_blocks`
/// does not. It is the fallback of the fused paths and the oracle they are tested against.
///
/// Arguments and results are those of `attention`; it forms no statistics.
AttentionResult plain_attention(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const ResolvedMask& mask,
                                const AttentionCall& call);

/// The dtype that the composition computes in.
constexpr at::ScalarType plain_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

/// Which part of a call is computed, and what is known of all of it.
struct PlainPart {
  int64_t first_sample = 0, first_head = 0, first_query = 0, first_key = 0;
  int64_t heads = 0, queries = 0;  ///< of the call
  /// Query, also times the scale, key and value are finite, so that nothing behind a mask needs
  /// to be kept away.
  bool finite = false;
  at::Generator generator =
      {};  ///< of dropout elsewhere than on the CPU; undefined: the default
};

/// The same for a part, of which the arguments are, all in `plain_dtype`, and so the results.
AttentionResult plain_part(const at::Tensor& query, const at::Tensor& key,
                           const at::Tensor& value, const ResolvedMask& mask,
                           const AttentionCall& call, const PlainPart& part);

/// The scores that the weights are the softmax of, with the sinks, (N, H, L, S): -inf where the
/// mask blocks.
/// query and key are both float32 or both float64.
at::Tensor plain_scores(const at::Tensor& query, const at::Tensor& key,
                        const ResolvedMask& mask, const Scoring& scoring);

}  // namespace mha::detail
