#include "module/head_projections.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

#include <vector>

#include "attention/kernel_attention.h"
#include "module/head_norm.h"
#include "module/off_heads.h"
#include "module/projection.h"
#include "runtime/attention_path.h"
#include "runtime/finite.h"
#include "runtime/recycled.h"
#include "runtime/uncomputed.h"

namespace mha::detail {
namespace {

bool wants_gradient(const at::Tensor& input, const torch::nn::LinearImpl& layer) {
  return at::GradMode::is_enabled() && (input.requires_grad() || layer.weight.requires_grad() ||
                                        (layer.bias.defined() && layer.bias.requires_grad()));
}

bool takes_kernels(const at::Tensor& input, const torch::nn::LinearImpl& layer) {
  return input.numel() > 0 &&
         choose_projection_path(input.device(), layer.weight.scalar_type(),
                                wants_gradient(input, layer),
                                is_followed({input, layer.weight, layer.bias}))
                 .path == Path::fused;
}

// Memory for (N, T + extra, H, D) in an order that suits the attention kernels: heads outside,
// where the projection can write them so.
template <typename Allocate>
at::Tensor allocate_heads(const at::Tensor& tokens, int64_t h, int64_t d, int64_t extra,
                          const Allocate& allocate) {
  const int64_t n = tokens.size(0), t = tokens.size(1) + extra;
  const bool heads_outside = d % 16 == 0;
  return heads_outside ? allocate({n, h, t, d}).transpose(1, 2) : allocate({n, t, h, d});
}

// Without heads outside, rows of all heads are contiguous and need not be split.
at::Tensor whole_rows(const at::Tensor& heads) {
  return heads.stride(1) == heads.size(2) * heads.size(3) ? heads.flatten(2) : heads;
}

HeadNorm query_norm(const MultiHeadAttentionImpl& module) {
  return {module.options.qk_norm(), module.options.qk_norm_eps(), module.q_norm,
          module.q_norm_bias};
}
HeadNorm key_norm(const MultiHeadAttentionImpl& module) {
  return {module.options.qk_norm(), module.options.qk_norm_eps(), module.k_norm,
          module.k_norm_bias};
}

// Normalises and rotates heads (N, T, H, D) in place, float32 on the CPU without gradients.
void condition_in_place(const MultiHeadAttentionImpl& module, const at::Tensor& heads,
                        const HeadNorm& norm, const at::Tensor& positions) {
  const auto& options = module.options;
  const auto rows = heads.transpose(1, 2);
  if (norm.gain.defined()) normalise_in_place(rows, norm);
  if (positions.defined()) rotate_in_place(rows, positions, *options.rotary());
}

// The same with gradients, or in any dtype and on any device.
at::Tensor condition(const MultiHeadAttentionImpl& module, const at::Tensor& heads,
                     const HeadNorm& norm, const at::Tensor& positions) {
  const auto& options = module.options;
  auto rows = heads.transpose(1, 2);
  if (norm.gain.defined()) rows = normalise(rows, norm);
  if (positions.defined()) rows = rotate(rows, positions, *options.rotary());
  return rows.transpose(1, 2);
}

// By the kernels in one pass, without gradients; the appended tokens are written in place.
Heads project_unrecorded(const MultiHeadAttentionImpl& module, PackedWeights& cache,
                         const Tokens& tokens, bool heads_are_passing) {
  const auto& options = module.options;
  const int64_t extra = int64_t{options.add_bias_kv()} + int64_t{options.add_zero_attn()};
  const auto query = tokens.query.to(at::kFloat);
  const auto key = tokens.key.is_same(tokens.query) ? query : tokens.key.to(at::kFloat);
  const auto value = tokens.value.is_same(tokens.key) ? key : tokens.value.to(at::kFloat);
  const int64_t keys = key.size(1);
  const int64_t h = options.num_heads(), kv_heads = module.num_kv_heads(),
                d = module.head_dim();
  // Queries and keys that are kept shall keep no more memory than their own.
  const auto allocate = [&](at::IntArrayRef sizes) {
    return heads_are_passing ? recycled(sizes) : uncomputed(sizes, query.options());
  };
  const auto q = allocate_heads(query, h, d, 0, allocate);
  const auto k = allocate_heads(key, kv_heads, d, extra, allocate);
  const auto v = allocate_heads(value, kv_heads, d, extra, recycled);
  project({{query, module.W_q.get(), 0, whole_rows(q)},
           {key, module.W_k.get(), 1, whole_rows(k.narrow(1, 0, keys))},
           {value, module.W_v.get(), 2, whole_rows(v.narrow(1, 0, keys))}},
          cache);
  condition_in_place(module, q, query_norm(module), tokens.positions.query);
  condition_in_place(module, k.narrow(1, 0, keys), key_norm(module), tokens.positions.key);
  if (options.add_bias_kv()) {
    k.select(1, keys).copy_(module.bias_k.view({1, kv_heads, d}));
    v.select(1, keys).copy_(module.bias_v.view({1, kv_heads, d}));
  }
  if (options.add_zero_attn()) {
    k.select(1, keys + extra - 1).zero_();
    v.select(1, keys + extra - 1).zero_();
  }
  return {q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)};
}

// One layer with gradients: (N, T, H, D).
at::Tensor project_all_to_heads(torch::nn::LinearImpl& layer, size_t slot,
                                const at::Tensor& tokens, const MultiHeadAttentionImpl& module,
                                PackedWeights& cache) {
  const int64_t d = module.head_dim(), h = layer.weight.size(0) / d;
  const std::vector<int64_t> split{h, d};
  if (!takes_kernels(tokens, layer)) return layer.forward(tokens).unflatten(2, split);
  const auto heads = whole_rows(allocate_heads(tokens, h, d, 0, [&](at::IntArrayRef sizes) {
    return uncomputed(sizes, tokens.options().dtype(at::kFloat));
  }));
  const auto output = project_recorded({tokens.to(at::kFloat), &layer, slot, heads}, cache);
  return output.dim() == 4 ? output : output.unflatten(2, split);
}

// The same, to whose gradients heads that are off give nothing.
at::Tensor project_to_heads(torch::nn::LinearImpl& layer, size_t slot, const at::Tensor& tokens,
                            const MultiHeadAttentionImpl& module, PackedWeights& cache,
                            const at::Tensor& off) {
  if (!off.defined()) return project_all_to_heads(layer, slot, tokens, module, cache);
  auto heads = project_without_off_heads(layer, tokens, off);
  heads = heads.defined() ? heads.unflatten(2, {off.size(1), module.head_dim()})
                          : project_all_to_heads(layer, slot, tokens, module, cache);
  return without_off_heads(heads, off);
}

// Layer by layer, with gradients.
Heads project_recorded(MultiHeadAttentionImpl& module, PackedWeights& cache,
                       const Tokens& tokens) {
  const auto& options = module.options;
  const auto off = at::GradMode::is_enabled() ? tokens.off : at::Tensor();
  const auto kv_off = kv_heads_off(off, module.num_kv_heads());
  const auto q =
      condition(module, project_to_heads(*module.W_q, 0, tokens.query, module, cache, off),
                query_norm(module), tokens.positions.query);
  auto k =
      condition(module, project_to_heads(*module.W_k, 1, tokens.key, module, cache, kv_off),
                key_norm(module), tokens.positions.key);
  auto v = project_to_heads(*module.W_v, 2, tokens.value, module, cache, kv_off);
  if (options.add_bias_kv()) {
    const auto append = [&](const at::Tensor& heads, const at::Tensor& bias) {
      const auto token =
          bias.to(heads.scalar_type()).view({1, 1, heads.size(2), heads.size(3)});
      return at::cat({heads, token.expand({heads.size(0), -1, -1, -1})}, 1);
    };
    k = append(k, module.bias_k);
    v = append(v, module.bias_v);
  }
  if (options.add_zero_attn()) {
    k = at::constant_pad_nd(k, {0, 0, 0, 0, 0, 1});
    v = at::constant_pad_nd(v, {0, 0, 0, 0, 0, 1});
  }
  return {q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)};
}

}  // namespace

Heads project_heads(MultiHeadAttentionImpl& module, PackedWeights& cache, const Tokens& tokens,
                    bool heads_are_passing) {
  const bool wants = wants_gradient(tokens.query, *module.W_q) ||
                     wants_gradient(tokens.key, *module.W_k) ||
                     wants_gradient(tokens.value, *module.W_v) ||
                     (at::GradMode::is_enabled() && module.options.add_bias_kv() &&
                      (module.bias_k.requires_grad() || module.bias_v.requires_grad())) ||
                     (at::GradMode::is_enabled() &&
                      any_wants_gradient({module.q_norm, module.k_norm, module.q_norm_bias,
                                          module.k_norm_bias}));
  const bool by_kernels = takes_kernels(tokens.query, *module.W_q) &&
                          takes_kernels(tokens.key, *module.W_k) &&
                          takes_kernels(tokens.value, *module.W_v) &&
                          !is_followed({module.bias_k, module.bias_v, module.q_norm,
                                        module.k_norm, module.q_norm_bias, module.k_norm_bias});
  return by_kernels && !wants ? project_unrecorded(module, cache, tokens, heads_are_passing)
                              : project_recorded(module, cache, tokens);
}

namespace {

at::Tensor project_whole_gate(MultiHeadAttentionImpl& module, PackedWeights& cache,
                              const at::Tensor& query) {
  torch::nn::LinearImpl& layer = *module.W_g;
  const int64_t n = query.size(0), l = query.size(1), columns = layer.weight.size(0);
  const std::vector<int64_t> split{module.options.num_heads(),
                                   columns / module.options.num_heads()};
  if (!takes_kernels(query, layer)) return layer.forward(query).unflatten(2, split);
  if (wants_gradient(query, layer)) {
    const auto output = uncomputed({n, l, columns}, query.options());
    return project_recorded({query, &layer, 4, output}, cache).unflatten(2, split);
  }
  const auto output = recycled({n, l, columns});
  project({{query.to(at::kFloat), &layer, 4, output}}, cache);
  return output.unflatten(2, split);
}

at::Tensor project_merged(MultiHeadAttentionImpl& module, PackedWeights& cache,
                          const at::Tensor& merged) {
  if (!takes_kernels(merged, *module.W_o)) {
    return module.W_o->forward(merged.to(module.W_o->weight.scalar_type()));
  }
  const int64_t n = merged.size(0), l = merged.size(1), e = module.options.d_model();
  const auto output = module.options.batch_first()
                          ? uncomputed({n, l, e}, merged.options())
                          : uncomputed({l, n, e}, merged.options()).transpose(0, 1);
  const Projection projection{merged, module.W_o.get(), 3, output};
  if (wants_gradient(merged, *module.W_o)) return detail::project_recorded(projection, cache);
  project({projection}, cache);
  return output.to(module.W_o->weight.scalar_type());
}

}  // namespace

at::Tensor project_gate(MultiHeadAttentionImpl& module, PackedWeights& cache,
                        const at::Tensor& query, const at::Tensor& off) {
  if (!off.defined() || !at::GradMode::is_enabled()) {
    return project_whole_gate(module, cache, query);
  }
  auto gate = project_without_off_heads(*module.W_g, query, off);
  gate = gate.defined() ? gate.unflatten(2, {off.size(1), gate.size(2) / off.size(1)})
                        : project_whole_gate(module, cache, query);
  return without_off_heads(gate, off);
}

at::Tensor project_output(MultiHeadAttentionImpl& module, PackedWeights& cache,
                          const at::Tensor& heads, const at::Tensor& off) {
  const auto merged = heads.transpose(1, 2).flatten(2);
  const auto output = project_merged(module, cache, merged);
  if (!off.defined() || !may_be_non_finite(output)) return output;
  const auto without = merge_without_off_heads(*module.W_o, merged, off);
  return without.defined() ? without : output;
}

}  // namespace mha::detail
