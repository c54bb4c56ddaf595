#include "attention/kernel_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "attention/mask_gradients.h"
#include "mask/dense_mask.h"
#include "mask/kernel_mask.h"
#include "runtime/cpu_kernels.h"
#include "runtime/finite.h"
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

// Memory laid out as (N, T, H, D), seen as (N, H, T, D).
at::Tensor empty_heads(int64_t n, int64_t h, int64_t t, int64_t d, const at::Tensor& like) {
  return uncomputed({n, t, h, d}, like.options()).transpose(1, 2);
}

// Few queries: chunks of keys are the tasks.
void decode(const cpu::Kernels& kernels, const cpu::AttentionForward& args) {
  const auto partials = recycled({kernels.decode_partials(args)});
  float* data = partials.data_ptr<float>();
  const int64_t chunks = (args.keys + kernels.decode_chunk - 1) / kernels.decode_chunk;
  run_tasks(args.batch * args.kv_heads * chunks, kernels.decode_scratch(args),
            [&](int64_t i, float* scratch) { kernels.decode(args, i, i + 1, scratch, data); });
  kernels.merge_decoded(args, data);
}

void attend(const cpu::Kernels& kernels, const cpu::AttentionForward& args) {
  const int64_t tiles = (args.queries + kernels.tile - 1) / kernels.tile;
  run_tasks(args.averaged ? args.batch * tiles : args.batch * args.heads * tiles,
            kernels.forward_scratch(args),
            [&](int64_t i, float* scratch) { kernels.forward(args, i, i + 1, scratch); });
}

// A call without results, and what keeps its memory alive.
struct PreparedCall {
  cpu::AttentionForward args{};
  at::Tensor query, key, value, sinks;
  PackedMask mask;
};

PreparedCall prepare(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const ResolvedMask& mask, const AttentionCall& call,
                     const cpu::Kernels& kernels) {
  PreparedCall prepared{{}, kernel_view(query),      kernel_view(key), kernel_view(value),
                        {}, pack_mask(mask, kernels)};
  cpu::AttentionForward& args = prepared.args;
  const auto &q = prepared.query, &k = prepared.key, &v = prepared.value;
  args.batch = q.size(0);
  args.heads = q.size(1);
  args.kv_heads = k.size(1);
  args.queries = q.size(2);
  args.keys = k.size(2);
  args.head_dim = q.size(3);
  args.value_dim = v.size(3);
  args.scale = static_cast<float>(call.scoring.scale);
  args.softcap = static_cast<float>(call.scoring.softcap);
  if (call.scoring.sinks.defined()) {
    prepared.sinks = call.scoring.sinks.detach().to(at::kFloat).contiguous();
    args.sinks = prepared.sinks.data_ptr<float>();
  }
  args.query = kernel_rows<const float>(q);
  args.query_is_bfloat16 = call.query_is_bfloat16;
  args.storage = storage_of(k);
  args.key = stored_rows(k);
  args.value = stored_rows(v);
  args.mask = prepared.mask.mask;
  args.dropout = kernel_dropout(call);
  args.averaged = call.weights == Weights::averaged;
  args.weights_after_dropout = call.weights_after_dropout;
  return prepared;
}

// `args` say which results are wanted.
ForwardKernel choose_kernel(const cpu::Kernels& kernels, const cpu::AttentionForward& args) {
  if (kernels.can_decode(args)) return ForwardKernel::chunks;
  if (args.storage == cpu::Storage::float32) return ForwardKernel::tiles;
  return kernels.can_dot(args) ? ForwardKernel::tiles_of_pairs : ForwardKernel::widened_tiles;
}

KernelResult forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const ResolvedMask& mask, const AttentionCall& call, bool for_backward) {
  const cpu::Kernels& kernels = cpu_kernels();
  auto prepared = prepare(query, key, value, mask, call, kernels);
  cpu::AttentionForward& args = prepared.args;
  const int64_t n = args.batch, h = args.heads, l = args.queries;
  const auto options = query.options();
  // A backward would hold the output past the call.
  KernelResult result{call.output_is_passing && !for_backward
                          ? recycled({n, l, h, args.value_dim}).transpose(1, 2)
                          : empty_heads(n, h, l, args.value_dim, query),
                      {},
                      {},
                      {},
                      true};
  prefer_huge_pages(result.output.data_ptr(), result.output.nbytes());
  args.output = kernel_rows<float>(result.output);
  const auto want_statistics = [&] {
    if (result.row_maximum.defined()) return;
    result.row_maximum = uncomputed({n, h, l}, options);
    result.row_factor = uncomputed({n, h, l}, options);
    args.row_maximum = result.row_maximum.data_ptr<float>();
    args.row_factor = result.row_factor.data_ptr<float>();
  };
  if (for_backward) want_statistics();
  if (args.averaged) {
    result.weights = uncomputed({n, l, args.keys}, options);
    args.weights = {result.weights.data_ptr<float>(), l * args.keys, 0, args.keys};
  } else if (call.weights == Weights::per_head) {
    result.weights = uncomputed({n, h, l, args.keys}, options);
    args.weights = kernel_rows<float>(result.weights);
  }
  if (result.weights.defined()) {
    prefer_huge_pages(result.weights.data_ptr(), result.weights.nbytes());
  }

  const ForwardKernel kernel = choose_kernel(kernels, args);
  // Float32 tiles form them anyway. Chunks leave none, and those of pairs are bfloat16's.
  if (call.row_statistics &&
      (kernel == ForwardKernel::tiles || kernel == ForwardKernel::widened_tiles)) {
    want_statistics();
    *call.row_statistics = {result.row_maximum, result.row_factor};
  }
  int32_t not_finite = 0;
  args.not_finite = &not_finite;
  switch (kernel) {
    case ForwardKernel::chunks:
      decode(kernels, args);
      break;
    case ForwardKernel::tiles:
      attend(kernels, args);
      break;
    case ForwardKernel::tiles_of_pairs: {
      const auto pairs = recycled({kernels.value_pairs(args)});  // words, of the size of floats
      auto* data = reinterpret_cast<uint32_t*>(pairs.data_ptr<float>());
      run_tasks(n * args.kv_heads, 1,
                [&](int64_t i, float*) { kernels.pair_values(args, i, i + 1, data); });
      args.value_pairs = data;
      attend(kernels, args);
      break;
    }
    case ForwardKernel::widened_tiles: {
      const auto wide_key = prepared.key.to(at::kFloat),
                 wide_value = prepared.value.to(at::kFloat);
      args.storage = cpu::Storage::float32;
      args.key = stored_rows(wide_key);
      args.value = stored_rows(wide_value);
      attend(kernels, args);
      break;
    }
  }
  result.is_finite = not_finite == 0;
  return result;
}

// Zeros up to a multiple of 16 in the last dimension change no product.
at::Tensor padded(const at::Tensor& tensor) {
  const int64_t excess = tensor.size(-1) % 16;
  return kernel_view(excess == 0 ? tensor : at::constant_pad_nd(tensor, {0, 16 - excess}));
}

// Gradients of query, key, value and of each term that the mask adds.
std::vector<at::Tensor> backward(const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value, const KernelResult& result,
                                 const at::Tensor& grad_output, const ResolvedMask& mask,
                                 const AttentionCall& call) {
  const auto q = padded(query), k = padded(key), v = padded(value);
  const auto o = padded(result.output), go = padded(grad_output);
  const cpu::Kernels& kernels = cpu_kernels();
  const auto packed = pack_mask(mask, kernels);
  const int64_t n = q.size(0), h = q.size(1), kv_h = k.size(1), l = q.size(2), s = k.size(2);
  const auto grad_query = empty_heads(n, h, l, q.size(3), q);
  const auto grad_key = empty_heads(n, kv_h, s, k.size(3), k);
  const auto grad_value = empty_heads(n, kv_h, s, v.size(3), v);

  cpu::AttentionBackward args{};
  args.batch = n;
  args.heads = h;
  args.kv_heads = kv_h;
  args.queries = l;
  args.keys = s;
  args.head_dim = q.size(3);
  args.value_dim = v.size(3);
  args.scale = static_cast<float>(call.scoring.scale);
  args.softcap = static_cast<float>(call.scoring.softcap);
  args.query = kernel_rows<const float>(q);
  args.key = kernel_rows<const float>(k);
  args.value = kernel_rows<const float>(v);
  args.output = kernel_rows<const float>(o);
  args.grad_output = kernel_rows<const float>(go);
  args.row_maximum = result.row_maximum.data_ptr<float>();
  args.row_factor = result.row_factor.data_ptr<float>();
  args.grad_query = kernel_rows<float>(grad_query);
  args.grad_key = kernel_rows<float>(grad_key);
  args.grad_value = kernel_rows<float>(grad_value);
  args.mask = packed.mask;
  args.dropout = kernel_dropout(call);
  const int64_t scratch_size = kernels.backward_scratch(args);
  args.chunks = kernels.backward_chunks(args);
  at::Tensor shares;
  if (args.chunks > 1) {
    shares = recycled({args.chunks, n, h, l, q.size(3)});
    args.query_shares = shares.data_ptr<float>();
  }
  run_tasks(n * kv_h * args.chunks, scratch_size,
            [&](int64_t i, float* scratch) { kernels.backward(args, i, i + 1, scratch); });
  // In order, one after the other: the sum is the same for any number of threads.
  for (int64_t chunk = 0; chunk < args.chunks && shares.defined(); ++chunk) {
    chunk == 0 ? grad_query.copy_(shares[0]) : grad_query.add_(shares[chunk]);
  }
  std::vector<at::Tensor> grads{grad_query.narrow(3, 0, query.size(3)),
                                grad_key.narrow(3, 0, key.size(3)),
                                grad_value.narrow(3, 0, value.size(3))};
  for (auto& grad : mask_gradients(kernels, args, mask)) grads.push_back(std::move(grad));
  return grads;
}

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

// (H, 1): the sinks that are NaN; undefined: none is.
at::Tensor unknown_sinks(const at::Tensor& sinks) {
  if (!sinks.defined() || !may_be_non_finite(sinks)) return {};
  const auto unknown = sinks.detach().isnan();
  return unknown.any().item<bool>() ? unknown.view({-1, 1}) : at::Tensor();
}

Scoring without_unknown(const Scoring& scoring, const at::Tensor& unknown) {
  return {scoring.scale, scoring.softcap,
          scoring.sinks.detach().masked_fill(unknown.squeeze(1), 0)};
}

// The queries (N, H, L) that a sink of NaN reaches: those of its head that see a key.
at::Tensor reached_by(const at::Tensor& unknown, const at::Tensor& query, const at::Tensor& key,
                      const ResolvedMask& mask, const Scoring& scoring) {
  const auto without =
      row_statistics(query, key.to(at::kFloat), mask, {scoring.scale, scoring.softcap});
  return without.factor.ne(0).logical_and(unknown);
}

// A sink of NaN makes every weight NaN that is not 0 for being blocked. The kernels see 0 in
// its place.
KernelResult attend_with_unknown(const at::Tensor& unknown, const at::Tensor& query,
                                 const at::Tensor& key, const at::Tensor& value,
                                 const ResolvedMask& mask, const AttentionCall& call,
                                 bool for_backward) {
  auto known = call;
  known.scoring = without_unknown(call.scoring, unknown);
  auto result = kernel_attention(query, key, value, mask, known, for_backward);
  const auto reached = reached_by(unknown, query, key, mask, call.scoring);
  result.output.masked_fill_(reached.unsqueeze(-1), not_a_number);
  if (call.row_statistics && call.row_statistics->factor.defined()) {
    call.row_statistics->factor.masked_fill_(reached, not_a_number);
  }
  if (result.row_factor.defined()) result.row_factor.masked_fill_(reached, not_a_number);
  if (result.weights.defined()) {
    const auto allowed = allowed_pairs(mask, query.device());
    auto pairs = reached.unsqueeze(-1);
    if (allowed.defined()) pairs = pairs.logical_and(allowed);
    result.weights.masked_fill_(call.weights == Weights::averaged ? pairs.any(1) : pairs,
                                not_a_number);
  }
  return result;
}

}  // namespace

// The forward where values may be infinite or NaN. Such a value times a weight of 0, of a
// blocked pair or underflowed, shows as NaN in the output; then the kernels see zeros in place
// of such numbers, and the queries that may attend to them get what they give afterwards,
// whatever its weight.
KernelResult kernel_attention(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const ResolvedMask& mask,
                              const AttentionCall& call, bool for_backward) {
  if (const auto unknown = unknown_sinks(call.scoring.sinks); unknown.defined()) {
    return attend_with_unknown(unknown, query, key, value, mask, call, for_backward);
  }
  auto result = forward(query, key, value, mask, call, for_backward);
  if (result.is_finite) return result;
  if (!may_be_non_finite(value)) {
    // Sums are divided by those of the weights at their end, and may leave the range before.
    constexpr double down = 0x1p-64;
    // The dtype stays that of the keys.
    const auto lower = forward(query, key, value * down, mask, call, for_backward);
    result.output.copy_(
        at::where(at::isfinite(result.output), result.output, lower.output / down));
    return result;
  }
  const auto finite = at::isfinite(value);
  result =
      forward(query, key, value.masked_fill(finite.logical_not(), 0), mask, call, for_backward);
  const int64_t group = query.size(1) / value.size(1);
  const auto given = value.masked_fill(finite, 0).to(at::kFloat);
  if (mask.allows_everything()) {
    result.output.add_(given.sum(2, /*keepdim=*/true).repeat_interleave(group, 1));
    return result;
  }
  const auto bad = finite.all(-1).logical_not();
  for (const int64_t j : marked_rows(bad)) {
    // (N, H, L): who sees this value.
    const auto sees =
        open_column(mask, j, query.device())
            .logical_and(bad.select(2, j).repeat_interleave(group, 1).unsqueeze(-1));
    const auto seen = given.select(2, j).repeat_interleave(group, 1).unsqueeze(2);
    result.output.copy_(at::where(sees.unsqueeze(-1), seen + result.output, result.output));
  }
  return result;
}

// The backward where pairs are blocked and numbers may be NaN: the kernels see zeros in place
// of such rows, and a factor of NaN makes every weight of the queries that they reach NaN.
std::vector<at::Tensor> kernel_attention_backward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const KernelResult& result, const at::Tensor& grad_output, const ResolvedMask& mask,
    const AttentionCall& call) {
  if (mask.allows_everything() ||
      !(may_be_non_finite(query) || may_be_non_finite(key) || may_be_non_finite(value) ||
        may_be_non_finite(grad_output))) {
    return backward(query, key, value, result, grad_output, mask, call);
  }
  auto reached =
      row_is_finite(query).logical_and(row_is_finite(grad_output)).logical_not();  // (N, H, L)
  const int64_t group = query.size(1) / key.size(1);
  const auto bad = row_is_finite(key).logical_not();
  for (const int64_t j : marked_rows(bad)) {
    reached = reached.logical_or(
        open_column(mask, j, query.device())
            .logical_and(bad.select(2, j).repeat_interleave(group, 1).unsqueeze(-1)));
  }
  auto marked = result;
  marked.row_factor = result.row_factor.masked_fill(reached, not_a_number);
  return backward(finite_rows(query), finite_rows(key), finite_rows(value), marked,
                  finite_rows(grad_output), mask, call);
}

ForwardKernel choose_forward_kernel(const at::Tensor& query, const at::Tensor& key,
                                    const at::Tensor& value, const ResolvedMask& mask,
                                    const AttentionCall& call, bool for_backward) {
  const cpu::Kernels& kernels = cpu_kernels();
  auto args = prepare(query, key, value, mask, call, kernels).args;
  float any = 0;  // a place to point at, for what is wanted
  if (for_backward) args.row_maximum = &any;
  if (call.weights != Weights::none) args.weights.data = &any;
  return choose_kernel(kernels, args);
}

bool any_wants_gradient(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

RowStatistics row_statistics(const at::Tensor& query, const at::Tensor& key,
                             const ResolvedMask& mask, const Scoring& scoring) {
  if (const auto unknown = unknown_sinks(scoring.sinks); unknown.defined()) {
    const auto known = row_statistics(query, key, mask, without_unknown(scoring, unknown));
    const auto reached = reached_by(unknown, query, key, mask, scoring);
    return {known.maximum, known.factor.masked_fill(reached, not_a_number)};
  }
  const AttentionCall call{scoring, 0, 0, Weights::none, false};
  // The output is not wanted, so any values will do: the first column of the keys.
  const auto result = forward(query, key, key.narrow(3, 0, 1), mask, call, true);
  return {result.row_maximum, result.row_factor};
}

}  // namespace mha::detail
