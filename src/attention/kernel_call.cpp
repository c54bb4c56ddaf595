#include "attention/kernel_call.h"

#include <ATen/ops/constant_pad_nd.h>

#include <utility>

#include "attention/forward_args.h"
#include "attention/mask_gradients.h"
#include "attention/packed_scores.h"
#include "attention/tile_call.h"
#include "attention/widened_call.h"
#include "runtime/cpu_kernels.h"
#include "runtime/huge_pages.h"
#include "runtime/kernel_rows.h"
#include "runtime/recycled.h"
#include "runtime/run_tasks.h"
#include "runtime/uncomputed.h"

namespace mha::detail {
namespace {

bool all_bfloat16(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  return query.scalar_type() == at::kBFloat16 && key.scalar_type() == at::kBFloat16 &&
         value.scalar_type() == at::kBFloat16;
}

// What the choice of a kernel depends on. `any` is a place to point at, for what is wanted.
cpu::AttentionForward shape_args(const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value, const ResolvedMask& mask,
                                 const AttentionCall& call, float* any) {
  cpu::AttentionForward args;
  PackedMask unpacked{};
  unpacked.mask.keys = key.size(2) - mask.extra_keys;
  static_cast<cpu::ScoreArgs&>(args) = score_args(query, key, unpacked, call.scoring);
  args.value_dim = value.size(3);
  args.query_is_bfloat16 = query.scalar_type() == at::kBFloat16;
  args.storage = storage_of(key);
  args.key = stored_rows(key);
  args.dropout = kernel_dropout(call);
  if (call.statistics == Statistics::needed) args.row_maximum = any;
  if (call.weights != Weights::none) args.weights.data = any;
  return args;
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

ForwardKernel choose_forward_kernel(const at::Tensor& query, const at::Tensor& key,
                                    const at::Tensor& value, const ResolvedMask& mask,
                                    const AttentionCall& call) {
  const cpu::Kernels& kernels = cpu_kernels();
  float any = 0;
  const auto args = shape_args(query, kernel_view(key), value, mask, call, &any);
  if (kernels.can_decode(args)) return ForwardKernel::chunks;
  if (takes_matrix_tiles(query, key, value, call)) return ForwardKernel::matrix_tiles;
  if (args.storage == cpu::Storage::float32) return ForwardKernel::tiles;
  return kernels.can_dot(args) ? ForwardKernel::tiles_of_pairs : ForwardKernel::widened_tiles;
}

bool takes_matrix_tiles(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const AttentionCall& call) {
  return tile_kernels() && call.weights == Weights::none && all_bfloat16(query, key, value);
}

KernelResult kernel_forward(const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const ResolvedMask& mask,
                            const AttentionCall& call) {
  const ForwardKernel kernel = choose_forward_kernel(query, key, value, mask, call);
  if (kernel == ForwardKernel::matrix_tiles) return tile_forward(query, key, value, mask, call);
  if (kernel == ForwardKernel::widened_tiles && widens_by_head(query, key, value, call)) {
    return forward_by_head(query, key, value, mask, call);
  }
  const cpu::Kernels& kernels = cpu_kernels();
  auto prepared = forward_args(query.to(at::kFloat), key, value, mask, call, kernels);
  cpu::AttentionForward& args = prepared.args;
  args.query_is_bfloat16 = query.scalar_type() == at::kBFloat16;
  KernelResult result;
  add_output(call.output, args, result);
  add_weights(call.weights, args, result);
  if (call.statistics == Statistics::needed) add_statistics(args, result);
  // Float32 tiles form them anyway. Chunks leave none, and those of bfloat16's products differ
  // from what a map rebuilds in float32.
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
    case ForwardKernel::matrix_tiles:
      break;
  }
  result.is_finite = not_finite == 0;
  return result;
}

std::vector<at::Tensor> kernel_backward(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value, const KernelResult& result,
                                        const at::Tensor& grad_output, const ResolvedMask& mask,
                                        const AttentionCall& call) {
  if (takes_matrix_tiles(query, key, value, call)) {
    return tile_backward(query, key, value, result, grad_output, mask, call);
  }
  if (query.scalar_type() != at::kFloat) {  // the forward was on tiles, and the set has changed
    const auto wide = [](const at::Tensor& tensor) { return tensor.to(at::kFloat); };
    const KernelResult wide_result{{wide(result.output), {}, result.statistics}};
    auto grads = kernel_backward(wide(query), wide(key), wide(value), wide_result,
                                 wide(grad_output), mask, call);
    for (auto& grad : grads) grad = grad.defined() ? grad.to(query.scalar_type()) : grad;
    return grads;
  }
  const cpu::Kernels& kernels = cpu_kernels();
  const auto scores = pack_scores(padded(query), padded(key), mask, call.scoring, kernels);
  const auto v = kernel_view(padded(value)), o = kernel_view(padded(result.output)),
             go = kernel_view(padded(grad_output));
  cpu::AttentionBackward args{};
  static_cast<cpu::FloatScoreArgs&>(args) = scores.args;
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

}  // namespace mha::detail
