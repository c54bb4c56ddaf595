#include "attention/kernel_call.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "attention/mask_gradients.h"
#include "attention/packed_scores.h"
#include "runtime/cpu_kernels.h"
#include "runtime/huge_pages.h"
#include "runtime/kernel_rows.h"
#include "runtime/recycled.h"
#include "runtime/run_tasks.h"
#include "runtime/uncomputed.h"

namespace mha::detail {
namespace {

cpu::StoredRows stored_rows(const at::Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

cpu::KernelDropout kernel_dropout(const AttentionCall& call) {
  if (call.dropout == 0) return {};
  const double factor = call.dropout == 1 ? 0 : 1 / (1 - call.dropout);
  return {call.dropout_seed, dropout_threshold(call.dropout), static_cast<float>(factor)};
}

// Memory laid out as (N, T, H, D), seen as (N, H, T, D), so that merging the heads is free.
at::Tensor merged_heads(int64_t n, int64_t h, int64_t t, int64_t d,
                        Lifetime lifetime = Lifetime::kept) {
  return allocated({n, t, h, d}, lifetime).transpose(1, 2);
}

// A forward without results, and what keeps its memory alive. The query is float32; whether it
// was bfloat16 is for the caller to say.
struct ForwardArgs {
  PackedScores scores;
  at::Tensor value, sinks;
  cpu::AttentionForward args{};
};

ForwardArgs forward_args(const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const ResolvedMask& mask,
                         const AttentionCall& call, const cpu::Kernels& kernels) {
  ForwardArgs found{
      pack_scores(query, key, mask, call.scoring, kernels), kernel_view(value), {}, {}};
  cpu::AttentionForward& args = found.args;
  static_cast<cpu::ScoreArgs&>(args) = found.scores.args;
  args.value_dim = value.size(3);
  if (call.scoring.sinks.defined()) {
    found.sinks = call.scoring.sinks.detach().to(at::kFloat).contiguous();
    args.sinks = found.sinks.data_ptr<float>();
  }
  args.storage = storage_of(key);
  args.key = stored_rows(found.scores.key);
  args.value = stored_rows(found.value);
  args.dropout = kernel_dropout(call);
  args.averaged = call.weights == Weights::averaged;
  args.weights_after_dropout = call.weights_after_dropout;
  return found;
}

void add_output(Lifetime lifetime, cpu::AttentionForward& args, KernelResult& result) {
  result.output = merged_heads(args.batch, args.heads, args.queries, args.value_dim, lifetime);
  prefer_huge_pages(result.output.data_ptr(), result.output.nbytes());
  args.output = kernel_rows<float>(result.output);
}

void add_weights(Weights wanted, cpu::AttentionForward& args, KernelResult& result) {
  const int64_t n = args.batch, h = args.heads, l = args.queries, s = args.keys;
  if (wanted == Weights::none) return;
  if (wanted == Weights::averaged) {
    result.weights = uncomputed({n, l, s}, at::kFloat);
    args.weights = {result.weights.data_ptr<float>(), l * s, 0, s};
  } else {
    result.weights = uncomputed({n, h, l, s}, at::kFloat);
    args.weights = kernel_rows<float>(result.weights);
  }
  prefer_huge_pages(result.weights.data_ptr(), result.weights.nbytes());
}

void add_statistics(cpu::AttentionForward& args, KernelResult& result) {
  auto& [maximum, factor] = result.statistics;
  maximum = uncomputed({args.batch, args.heads, args.queries}, at::kFloat);
  factor = uncomputed(maximum.sizes(), at::kFloat);
  args.row_maximum = maximum.data_ptr<float>();
  args.row_factor = factor.data_ptr<float>();
}

// `args` say which results are wanted.
ForwardKernel choose_kernel(const cpu::Kernels& kernels, const cpu::AttentionForward& args) {
  if (kernels.can_decode(args)) return ForwardKernel::chunks;
  if (args.storage == cpu::Storage::float32) return ForwardKernel::tiles;
  return kernels.can_dot(args) ? ForwardKernel::tiles_of_pairs : ForwardKernel::widened_tiles;
}

// Chunks of keys are the tasks.
void run_chunks(const cpu::Kernels& kernels, const cpu::AttentionForward& args) {
  const auto partials = recycled({kernels.decode_partials(args)});
  float* data = partials.data_ptr<float>();
  const int64_t chunks = (args.keys + kernels.decode_chunk - 1) / kernels.decode_chunk;
  run_tasks(args.batch * args.kv_heads * chunks, kernels.decode_scratch(args),
            [&](int64_t i, float* scratch) { kernels.decode(args, i, i + 1, scratch, data); });
  kernels.merge_decoded(args, data);
}

void run_tiles(const cpu::Kernels& kernels, const cpu::AttentionForward& args) {
  const int64_t tiles = (args.queries + kernels.tile - 1) / kernels.tile;
  run_tasks(args.averaged ? args.batch * tiles : args.batch * args.heads * tiles,
            kernels.forward_scratch(args),
            [&](int64_t i, float* scratch) { kernels.forward(args, i, i + 1, scratch); });
}

void run_tiles_of_pairs(const cpu::Kernels& kernels, cpu::AttentionForward& args) {
  const auto pairs = recycled({kernels.value_pairs(args)});  // words, of the size of floats
  auto* data = reinterpret_cast<uint32_t*>(pairs.data_ptr<float>());
  run_tasks(args.batch * args.kv_heads, 1,
            [&](int64_t i, float*) { kernels.pair_values(args, i, i + 1, data); });
  args.value_pairs = data;
  run_tiles(kernels, args);
}

void run_widened_tiles(const cpu::Kernels& kernels, const ForwardArgs& stored) {
  const auto key = stored.scores.key.to(at::kFloat), value = stored.value.to(at::kFloat);
  auto args = stored.args;
  args.storage = cpu::Storage::float32;
  args.key = stored_rows(key);
  args.value = stored_rows(value);
  run_tiles(kernels, args);
}

// Zeros up to a multiple of 16 in the last dimension change no product.
at::Tensor padded(const at::Tensor& tensor) {
  const int64_t excess = tensor.size(-1) % 16;
  return excess == 0 ? tensor : at::constant_pad_nd(tensor, {0, 16 - excess});
}

// Computes the gradients of query, key and value. The chunks' shares are summed in order, one
// after the other, so that the sum is the same for any number of threads.
void run_backward(const cpu::Kernels& kernels, const at::Tensor& grad_query,
                  cpu::AttentionBackward& args) {
  args.chunks = kernels.backward_chunks(args);
  const int64_t scratch_size = kernels.backward_scratch(args);  // which depends on them
  at::Tensor shares;
  if (args.chunks > 1) {
    shares = recycled({args.chunks, args.batch, args.heads, args.queries, args.head_dim});
    args.query_shares = shares.data_ptr<float>();
  }
  run_tasks(args.batch * args.kv_heads * args.chunks, scratch_size,
            [&](int64_t i, float* scratch) { kernels.backward(args, i, i + 1, scratch); });
  for (int64_t chunk = 0; chunk < args.chunks && shares.defined(); ++chunk) {
    chunk == 0 ? grad_query.copy_(shares[0]) : grad_query.add_(shares[chunk]);
  }
}

}  // namespace

KernelResult kernel_forward(const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const ResolvedMask& mask,
                            const AttentionCall& call) {
  const cpu::Kernels& kernels = cpu_kernels();
  auto prepared = forward_args(query.to(at::kFloat), key, value, mask, call, kernels);
  cpu::AttentionForward& args = prepared.args;
  args.query_is_bfloat16 = query.scalar_type() == at::kBFloat16;
  KernelResult result;
  add_output(call.output, args, result);
  add_weights(call.weights, args, result);
  if (call.statistics == Statistics::needed) add_statistics(args, result);
  const ForwardKernel kernel = choose_kernel(kernels, args);
  // Float32 tiles form them anyway. Chunks leave none, and those of pairs are bfloat16's.
  if (call.statistics == Statistics::if_formed &&
      (kernel == ForwardKernel::tiles || kernel == ForwardKernel::widened_tiles)) {
    add_statistics(args, result);
  }
  int32_t not_finite = 0;
  args.not_finite = &not_finite;
  switch (kernel) {
    case ForwardKernel::chunks:
      run_chunks(kernels, args);
      break;
    case ForwardKernel::tiles:
      run_tiles(kernels, args);
      break;
    case ForwardKernel::tiles_of_pairs:
      run_tiles_of_pairs(kernels, args);
      break;
    case ForwardKernel::widened_tiles:
      run_widened_tiles(kernels, prepared);
      break;
  }
  result.is_finite = not_finite == 0;
  return result;
}

std::vector<at::Tensor> kernel_backward(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value, const KernelResult& result,
                                        const at::Tensor& grad_output, const ResolvedMask& mask,
                                        const AttentionCall& call) {
  const cpu::Kernels& kernels = cpu_kernels();
  const auto scores = pack_scores(padded(query), padded(key), mask, call.scoring, kernels);
  const auto v = kernel_view(padded(value)), o = kernel_view(padded(result.output)),
             go = kernel_view(padded(grad_output));
  cpu::AttentionBackward args{};
  static_cast<cpu::ScoreArgs&>(args) = scores.args;
  args.value_dim = v.size(3);
  args.key = kernel_rows<const float>(scores.key);
  args.value = kernel_rows<const float>(v);
  args.output = kernel_rows<const float>(o);
  args.grad_output = kernel_rows<const float>(go);
  args.row_maximum = result.statistics.maximum.data_ptr<float>();
  args.row_factor = result.statistics.factor.data_ptr<float>();
  args.dropout = kernel_dropout(call);

  const int64_t n = args.batch, kv_heads = args.kv_heads;
  const auto grad_query = merged_heads(n, args.heads, args.queries, args.head_dim);
  const auto grad_key = merged_heads(n, kv_heads, args.keys, args.head_dim);
  const auto grad_value = merged_heads(n, kv_heads, args.keys, args.value_dim);
  args.grad_query = kernel_rows<float>(grad_query);
  args.grad_key = kernel_rows<float>(grad_key);
  args.grad_value = kernel_rows<float>(grad_value);
  run_backward(kernels, grad_query, args);
  std::vector<at::Tensor> grads{grad_query.narrow(3, 0, query.size(3)),
                                grad_key.narrow(3, 0, key.size(3)),
                                grad_value.narrow(3, 0, value.size(3))};
  for (auto& grad : mask_gradients(kernels, args, mask)) grads.push_back(std::move(grad));
  return grads;
}

ForwardKernel choose_forward_kernel(const at::Tensor& query, const at::Tensor& key,
                                    const at::Tensor& value, const ResolvedMask& mask,
                                    const AttentionCall& call) {
  const cpu::Kernels& kernels = cpu_kernels();
  const auto wide = at::empty({query.size(3)}, at::kFloat).expand(query.sizes());
  auto args = forward_args(wide, key, value, mask, call, kernels).args;
  args.query_is_bfloat16 = query.scalar_type() == at::kBFloat16;
  float any = 0;  // a place to point at, for what is wanted
  if (call.statistics == Statistics::needed) args.row_maximum = &any;
  if (call.weights != Weights::none) args.weights.data = &any;
  return choose_kernel(kernels, args);
}

}  // namespace mha::detail
