#include "attention/tile_call.h"

#include <ATen/Parallel.h>

#include "attention/packed_scores.h"
#include "runtime/cpu_kernels.h"
#include "runtime/huge_pages.h"
#include "runtime/kernel_rows.h"
#include "runtime/recycled.h"
#include "runtime/run_tasks.h"
#include "runtime/uncomputed.h"

namespace mha::detail {
namespace {

cpu::Rows<cpu::BFloat16> bfloat16_rows(const at::Tensor& tensor) {
  return {static_cast<cpu::BFloat16*>(tensor.data_ptr()), tensor.stride(0), tensor.stride(1),
          tensor.stride(2)};
}

// Memory laid out as (N, T, H, D), seen as (N, H, T, D), so that merging the heads is free.
at::Tensor merged_bfloat16(int64_t n, int64_t h, int64_t t, int64_t d) {
  const auto tensor = uncomputed({n, t, h, d}, at::kBFloat16).transpose(1, 2);
  prefer_huge_pages(tensor.data_ptr(), tensor.nbytes());
  return tensor;
}

// Runs pack(head) and then the tasks of that head, of which each has `per_head`. One thread
// does both where heads are enough to share, since what it packed is then still in its caches.
template <typename Pack, typename Task>
void run_by_head(int64_t heads, int64_t per_head, int64_t scratch_size, const Pack& pack,
                 const Task& task) {
  const int64_t threads = at::get_num_threads();
  if (heads % threads == 0 || heads >= 4 * threads) {
    run_tasks(heads, scratch_size, [&](int64_t head, float* scratch) {
      pack(head);
      task(head * per_head, (head + 1) * per_head, scratch);
    });
    return;
  }
  run_tasks(heads, 1, [&](int64_t head, float*) { pack(head); });
  run_tasks(heads * per_head, scratch_size,
            [&](int64_t i, float* scratch) { task(i, i + 1, scratch); });
}

}  // namespace

KernelResult tile_forward(const at::Tensor& given_query, const at::Tensor& given_key,
                          const at::Tensor& given_value, const ResolvedMask& mask,
                          const AttentionCall& call) {
  const cpu::TileKernels& kernels = *tile_kernels();
  const auto query = kernel_view(given_query), key = kernel_view(given_key),
             value = kernel_view(given_value);
  const auto packed_mask = pack_mask(mask, kernels);
  cpu::TileForward args;
  static_cast<cpu::ScoreArgs&>(args) = score_args(query, key, packed_mask, call.scoring);
  args.value_dim = value.size(3);
  args.query = stored_rows(query);
  args.key = stored_rows(key);
  args.value = stored_rows(value);
  args.dropout = kernel_dropout(call);
  const auto sinks = float_sinks(call.scoring);
  if (sinks.defined()) args.sinks = sinks.data_ptr<float>();

  KernelResult result;
  result.output = merged_bfloat16(args.batch, args.heads, args.queries, args.value_dim);
  args.output = bfloat16_rows(result.output);
  if (call.statistics == Statistics::needed) {
    auto& [maximum, factor] = result.statistics;
    maximum = uncomputed({args.batch, args.heads, args.queries}, at::kFloat);
    factor = uncomputed(maximum.sizes(), at::kFloat);
    args.row_maximum = maximum.data_ptr<float>();
    args.row_factor = factor.data_ptr<float>();
  }
  int32_t not_finite = 0;
  args.not_finite = &not_finite;
  const auto packed = recycled({kernels.packed_keys(args)});
  args.packed = packed.data_ptr<float>();
  const int64_t tiles = (args.queries + kernels.tile - 1) / kernels.tile;
  run_by_head(
      args.batch * args.kv_heads, args.heads / args.kv_heads * tiles,
      kernels.forward_scratch(args),
      [&](int64_t head) { kernels.pack_keys(args, head, head + 1); },
      [&](int64_t begin, int64_t end, float* scratch) {
        kernels.forward(args, begin, end, scratch);
      });
  result.is_finite = not_finite == 0;
  return result;
}

std::vector<at::Tensor> tile_backward(const at::Tensor& given_query,
                                      const at::Tensor& given_key,
                                      const at::Tensor& given_value, const KernelResult& result,
                                      const at::Tensor& given_grad_output,
                                      const ResolvedMask& mask, const AttentionCall& call) {
  const cpu::TileKernels& kernels = *tile_kernels();
  const auto query = kernel_view(given_query), key = kernel_view(given_key),
             value = kernel_view(given_value), output = kernel_view(result.output),
             grad_output = kernel_view(given_grad_output.to(at::kBFloat16));
  const auto packed_mask = pack_mask(mask, kernels);
  cpu::TileBackward args;
  static_cast<cpu::ScoreArgs&>(args) = score_args(query, key, packed_mask, call.scoring);
  args.value_dim = value.size(3);
  args.query = stored_rows(query);
  args.key = stored_rows(key);
  args.value = stored_rows(value);
  args.output = stored_rows(output);
  args.grad_output = stored_rows(grad_output);
  args.row_maximum = result.statistics.maximum.data_ptr<float>();
  args.row_factor = result.statistics.factor.data_ptr<float>();
  args.dropout = kernel_dropout(call);

  const int64_t n = args.batch, kv_heads = args.kv_heads;
  const auto grad_query = merged_bfloat16(n, args.heads, args.queries, args.head_dim);
  const auto grad_key = merged_bfloat16(n, kv_heads, args.keys, args.head_dim);
  const auto grad_value = merged_bfloat16(n, kv_heads, args.keys, args.value_dim);
  args.grad_query = bfloat16_rows(grad_query);
  args.grad_key = bfloat16_rows(grad_key);
  args.grad_value = bfloat16_rows(grad_value);

  const auto packed = recycled({kernels.backward_packed_keys(args)});
  args.packed = packed.data_ptr<float>();
  args.chunks = kernels.backward_chunks(args);
  at::Tensor shares;
  if (args.chunks > 1) {
    shares = recycled({args.chunks, n, args.heads, args.queries, args.head_dim});
    args.query_shares = shares.data_ptr<float>();
  }
  run_by_head(
      n * kv_heads, args.chunks, kernels.backward_scratch(args),
      [&](int64_t head) { kernels.backward_pack_keys(args, head, head + 1); },
      [&](int64_t begin, int64_t end, float* scratch) {
        kernels.backward(args, begin, end, scratch);
      });
  // In order, so that the sum is the same for any number of threads.
  for (int64_t chunk = 1; chunk < args.chunks; ++chunk) shares[0].add_(shares[chunk]);
  if (args.chunks > 1) grad_query.copy_(shares[0]);
  return {grad_query, grad_key, grad_value};
}

}  // namespace mha::detail
