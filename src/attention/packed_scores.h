#pragma once

#include <ATen/core/Tensor.h>

#include "attention/attention.h"
#include "cpu/kernels.h"
#include "mask/kernel_mask.h"

namespace mha::detail {

/// What scores are made of in the form the kernels read, and the memory that it points to.
struct PackedScores {
  at::Tensor query, key;
  PackedMask mask;
  cpu::FloatScoreArgs args;
};

/// What scores are made of but for queries and keys, which are (N, H, L, D) and (N, Hk, S, D).
cpu::ScoreArgs score_args(const at::Tensor& query, const at::Tensor& key,
                          const PackedMask& mask, const Scoring& scoring);

/// As the kernels read them.
cpu::KernelDropout kernel_dropout(const AttentionCall& call);

/// (H) in float32; undefined: there are none.
at::Tensor float_sinks(const Scoring& scoring);

/// `query` (N, H, L, D) float32, `key` (N, Hk, S, D) in any storage.
PackedScores pack_scores(const at::Tensor& query, const at::Tensor& key,
                         const ResolvedMask& mask, const Scoring& scoring,
                         const cpu::Kernels& kernels);

}  // namespace mha::detail
