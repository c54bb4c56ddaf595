#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernel_call.h"
#include "attention/packed_scores.h"
#include "runtime/recycled.h"

// The arguments of a forward by the float32 kernels, and memory for its results.
namespace mha::detail {

/// Memory laid out as (N, T, H, D), seen as (N, H, T, D), so that merging the heads is free.
at::Tensor merged_heads(int64_t n, int64_t h, int64_t t, int64_t d,
                        Lifetime lifetime = Lifetime::kept);

/// A forward without results, and what keeps its memory alive.
struct ForwardArgs {
  PackedScores scores;
  at::Tensor value, sinks;
  cpu::AttentionForward args{};
};

/// `query` is float32; whether it was bfloat16 is for the caller to say.
ForwardArgs forward_args(const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const ResolvedMask& mask,
                         const AttentionCall& call, const cpu::Kernels& kernels);

/// What does not depend on where queries, keys and values lie.
void set_options(const AttentionCall& call, const at::Tensor& sinks,
                 cpu::AttentionForward& args);

// Memory for results, and where it is.
void add_output(Lifetime lifetime, cpu::AttentionForward& args, KernelResult& result);
void add_weights(Weights wanted, cpu::AttentionForward& args, KernelResult& result);
void add_statistics(cpu::AttentionForward& args, KernelResult& result);

}  // namespace mha::detail
