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
  cpu::ScoreArgs args;
};

/// `query` (N, H, L, D) float32, `key` (N, Hk, S, D) in any storage.
PackedScores pack_scores(const at::Tensor& query, const at::Tensor& key,
                         const ResolvedMask& mask, const Scoring& scoring,
                         const cpu::Kernels& kernels);

}  // namespace mha::detail
