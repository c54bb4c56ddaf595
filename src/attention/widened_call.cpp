#include "attention/widened_call.h"

#include <ATen/Parallel.h>

#include "attention/forward_args.h"
#include "runtime/cpu_kernels.h"
#include "runtime/kernel_rows.h"
#include "runtime/run_tasks.h"
#include "runtime/uncomputed.h"

namespace mha::detail {
namespace {

// One head's rows in float32, whatever head the kernels ask for.
struct HeadRows {
  float *query, *key, *value, *output, *scratch;

  HeadRows(const cpu::AttentionForward& args, float* memory)
      : query(memory),
        key(query + args.queries * args.head_dim),
        value(key + args.keys * args.head_dim),
        output(value + args.keys * args.value_dim),
        scratch(output + args.queries * args.value_dim) {
    // The kernels' scratch begins at a multiple of 64 bytes.
    scratch += (memory - scratch) & 15;
  }
  static int64_t size(const cpu::AttentionForward& args) {
    return (args.queries + args.keys) * (args.head_dim + args.value_dim) + 16;
  }
};

}  // namespace

bool widens_by_head(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const AttentionCall& call) {
  const auto dtype = query.scalar_type();
  const int64_t heads = key.size(0) * key.size(1), threads = at::get_num_threads();
  return dtype != at::kFloat && key.scalar_type() == dtype && value.scalar_type() == dtype &&
         call.weights != Weights::averaged && (heads % threads == 0 || heads >= 4 * threads);
}

KernelResult forward_by_head(const at::Tensor& given_query, const at::Tensor& given_key,
                             const at::Tensor& given_value, const ResolvedMask& mask,
                             const AttentionCall& call) {
  const cpu::Kernels& kernels = cpu_kernels();
  const auto query = kernel_view(given_query), key = kernel_view(given_key),
             value = kernel_view(given_value);
  const auto packed_mask = pack_mask(mask, kernels);
  const auto sinks = float_sinks(call.scoring);
  const auto storage = storage_of(query);
  cpu::AttentionForward args;
  static_cast<cpu::ScoreArgs&>(args) = score_args(query, key, packed_mask, call.scoring);
  args.value_dim = value.size(3);
  set_options(call, sinks, args);

  KernelResult result;
  result.output =
      uncomputed({args.batch, args.queries, args.heads, args.value_dim}, query.scalar_type())
          .transpose(1, 2);
  add_weights(call.weights, args, result);
  if (call.statistics != Statistics::unwanted) add_statistics(args, result);
  int32_t not_finite = 0;
  args.not_finite = &not_finite;

  const auto q = stored_rows(query), k = stored_rows(key), v = stored_rows(value),
             o = stored_rows(result.output);
  const auto row = [](const cpu::StoredRows& rows, int64_t n, int64_t h) {
    return const_cast<uint16_t*>(rows.at<uint16_t>(n, h, 0));
  };
  const int64_t group = args.heads / std::max<int64_t>(args.kv_heads, 1);
  const int64_t tiles = (args.queries + kernels.tile - 1) / kernels.tile;
  run_tasks(args.batch * args.kv_heads, HeadRows::size(args) + kernels.forward_scratch(args),
            [&](int64_t head, float* memory) {
              const HeadRows rows(args, memory);
              const int64_t n = head / args.kv_heads, kv_head = head % args.kv_heads;
              kernels.widen_rows(storage, row(k, n, kv_head), k.t, args.keys, args.head_dim,
                                 rows.key);
              kernels.widen_rows(storage, row(v, n, kv_head), v.t, args.keys, args.value_dim,
                                 rows.value);
              cpu::AttentionForward own = args;
              own.query = {rows.query, 0, 0, args.head_dim};
              own.key = {rows.key, 0, 0, args.head_dim};
              own.value = {rows.value, 0, 0, args.value_dim};
              own.output = {rows.output, 0, 0, args.value_dim};
              for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
                kernels.widen_rows(storage, row(q, n, h), q.t, args.queries, args.head_dim,
                                   rows.query);
                const int64_t first = (n * args.heads + h) * tiles;
                kernels.forward(own, first, first + tiles, rows.scratch);
                kernels.round_rows(storage, rows.output, args.queries, args.value_dim,
                                   row(o, n, h), o.t);
              }
            });
  result.is_finite = not_finite == 0;
  return result;
}

}  // namespace mha::detail
