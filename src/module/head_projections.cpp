#include "module/head_projections.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

#include <vector>

#include "module/head_norm.h"
#include "module/head_positions.h"
#include "module/off_heads.h"
#include "module/projection.h"
#include "rotary/rotary.h"
#include "runtime/attention_path.h"
#include "runtime/cpu_kernels.h"
#include "runtime/finite.h"
#include "runtime/uncomputed.h"
#include "runtime/wants_gradient.h"

namespace mha::detail {
namespace {

bool records(const at::Tensor& input, const torch::nn::LinearImpl& layer) {
  return wants_gradient(input, layer.weight, layer.bias);
}

bool takes_kernels(const at::Tensor& input, const torch::nn::LinearImpl& layer) {
  return input.numel() > 0 &&
         choose_projection_path(input.device(), layer.weight.scalar_type(),
                                is_followed({input, layer.weight, layer.bias}))
                 .path == Path::fused;
}

// What the kernels of projections compute in, of a module whose parameters have `dtype`.
at::ScalarType projected_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 && tile_kernels() ? dtype : at::kFloat;
}
at::ScalarType projected_dtype(const torch::nn::LinearImpl& layer) {
  return projected_dtype(layer.weight.scalar_type());
}

// What is recorded is converted by calls that autograd sees, so that gradients are rounded
// once.
Projection projection_of(const at::Tensor& tokens, const torch::nn::LinearImpl& layer,
                         size_t slot, const at::Tensor& output) {
  const auto dtype = projected_dtype(layer);
  const auto parameter = [&](const at::Tensor& tensor) {
    return records(tokens, layer) && tensor.defined() ? tensor.to(dtype) : tensor;
  };
  return {tokens.to(dtype), parameter(layer.weight), parameter(layer.bias), slot, output};
}

// Memory for (N, T + extra, H, D) of `tokens` in an order that suits the attention kernels:
// heads outside, where the projection can write them so.
at::Tensor allocate_heads(const at::Tensor& tokens, int64_t h, int64_t d, int64_t extra,
                          Lifetime lifetime) {
  const int64_t n = tokens.size(0), t = tokens.size(1) + extra;
  const auto dtype = projected_dtype(tokens.scalar_type());
  const bool heads_outside = d % 16 == 0;
  return heads_outside ? allocated({n, h, t, d}, lifetime, dtype).transpose(1, 2)
                       : allocated({n, t, h, d}, lifetime, dtype);
}

// Without heads outside, rows of all heads are contiguous and need not be split.
at::Tensor whole_rows(const at::Tensor& heads) {
  return heads.stride(1) == heads.size(2) * heads.size(3) ? heads.flatten(2) : heads;
}

// What queries or keys (N, H, T, D) are put through once they are projected, in order.
struct Conditioning {
  const MultiHeadAttentionOptions& options;
  HeadNorm norm;
  at::Tensor positions;  // undefined: those of keys that nothing asks for
  at::Tensor tuning;     // multiplies queries, (1, 1, T, 1) or (N, 1, T, 1)
  at::Tensor longest;    // see `rotate`

  template <typename Normalise, typename Rotate>
  void in_order(const Normalise& to_normal, const Rotate& turn) const {
    const bool has_norm = norm.kind != QKNorm::none;
    const bool before = options.qk_norm_order() == QKNormOrder::before_rotary;
    if (has_norm && before) to_normal();
    if (options.rotary()) turn();
    if (has_norm && !before) to_normal();
  }
};

Conditioning of_queries(const MultiHeadAttentionImpl& module, const Tokens& tokens) {
  return {module.options, query_norm(module), tokens.positions.query,
          query_tuning(module.options, tokens.positions.query, tokens.query.device()),
          longest_position(module.options, tokens.positions)};
}
Conditioning of_keys(const MultiHeadAttentionImpl& module, const Tokens& tokens) {
  return {module.options,
          key_norm(module),
          tokens.positions.key,
          {},
          longest_position(module.options, tokens.positions)};
}

// Heads (N, T, H, D) in place, on the CPU without gradients.
void condition_in_place(const at::Tensor& heads, const Conditioning& by) {
  const auto rows = heads.transpose(1, 2);
  const bool is_float = heads.scalar_type() == at::kFloat;
  const auto& rotary = by.options.rotary();
  by.in_order(
      [&] {
        if (is_float) return normalise_in_place(rows, by.norm);
        rows.copy_(normalise(rows, by.norm));
      },
      [&] {
        if (is_float) return rotate_in_place(rows, by.positions, *rotary, by.longest);
        rows.copy_(rotate(rows, by.positions, *rotary, by.longest));
      });
  if (by.tuning.defined()) rows.mul_(by.tuning);
}

// The same with gradients, or in any dtype and on any device.
at::Tensor condition(const at::Tensor& heads, const Conditioning& by) {
  auto rows = heads.transpose(1, 2);
  by.in_order([&] { rows = normalise(rows, by.norm); },
              [&] { rows = rotate(rows, by.positions, *by.options.rotary(), by.longest); });
  if (by.tuning.defined()) {
    const auto compute = rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    rows = (rows * by.tuning.to(compute)).to(rows.scalar_type());
  }
  return rows.transpose(1, 2);
}

// Values times `value_scale`: in place, or with gradients.
void scale_in_place(const MultiHeadAttentionImpl& module, const at::Tensor& values) {
  if (module.options.value_scale() != 1) values.mul_(module.options.value_scale());
}
at::Tensor scaled(const MultiHeadAttentionImpl& module, const at::Tensor& values) {
  const double scale = module.options.value_scale();
  return scale == 1 ? values : values * scale;
}

// Of what may be absent: (N, T, H, D) as (N, H, T, D).
at::Tensor heads_first(const at::Tensor& heads) {
  return heads.defined() ? heads.transpose(1, 2) : heads;
}

// As the kernels take them, where what is one tensor stays one.
Tokens projectable(const Tokens& tokens) {
  const auto converted = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(projected_dtype(tensor.scalar_type())) : tensor;
  };
  Tokens result = tokens;
  result.query = converted(tokens.query);
  result.key = tokens.key.is_same(tokens.query) ? result.query : converted(tokens.key);
  result.value = tokens.value.is_same(tokens.key) ? result.key : converted(tokens.value);
  return result;
}

// Into the last places of keys and values (N, S + extra, Hk, D).
void append_in_place(const MultiHeadAttentionImpl& module, const at::Tensor& key,
                     const at::Tensor& value) {
  const int64_t keys = key.size(1) - appended_keys(module.options);
  if (module.options.add_bias_kv()) {
    key.select(1, keys).copy_(module.bias_k.view({1, key.size(2), key.size(3)}));
    value.select(1, keys).copy_(module.bias_v.view({1, value.size(2), value.size(3)}));
  }
  if (module.options.add_zero_attn()) {
    key.select(1, key.size(1) - 1).zero_();
    value.select(1, key.size(1) - 1).zero_();
  }
}

// By the kernels in one pass, without gradients; the appended tokens are written in place.
Heads project_unrecorded(const MultiHeadAttentionImpl& module, PackedWeights& cache,
                         const Tokens& tokens, Lifetime lifetime) {
  const int64_t extra = appended_keys(module.options);
  const int64_t h = module.options.num_heads(), kv_heads = module.num_kv_heads(),
                d = module.head_dim();
  const auto [query, key, value, positions, off] = projectable(tokens);
  at::Tensor q, k, v, given_k, given_v;
  std::vector<Projection> projections;
  if (query.defined()) {
    q = allocate_heads(query, h, d, 0, lifetime);
    projections.push_back(projection_of(query, *module.W_q, 0, whole_rows(q)));
  }
  if (key.defined()) {
    k = allocate_heads(key, kv_heads, d, extra, lifetime);
    v = allocate_heads(key, kv_heads, module.v_head_dim(), extra, Lifetime::passing);
    given_k = k.narrow(1, 0, key.size(1));
    given_v = v.narrow(1, 0, key.size(1));
    projections.push_back(projection_of(key, *module.W_k, 1, whole_rows(given_k)));
    projections.push_back(projection_of(value, *module.W_v, 2, whole_rows(given_v)));
  }
  project(projections, cache);
  if (query.defined()) condition_in_place(q, of_queries(module, tokens));
  if (key.defined()) {
    condition_in_place(given_k, of_keys(module, tokens));
    scale_in_place(module, given_v);
    append_in_place(module, k, v);
  }
  return {heads_first(q), heads_first(k), heads_first(v)};
}

// A layer whose output is split into heads.
struct HeadLayer {
  torch::nn::LinearImpl* layer;
  size_t slot;
  int64_t head_dim;
  at::Tensor tokens;  // undefined: nothing is projected
  at::Tensor off;     // to whose gradients heads that are off give nothing
};

// With gradients: (N, T, H, D) each, undefined likewise. What the kernels take is recorded
// together.
std::vector<at::Tensor> project_all_to_heads(const std::vector<HeadLayer>& layers,
                                             PackedWeights& cache) {
  std::vector<at::Tensor> heads(layers.size());
  std::vector<Projection> recorded, others;
  std::vector<size_t> numbers;                                 // of the recorded
  std::vector<std::pair<at::Tensor, at::Tensor>> conversions;  // what is one tensor stays one
  const auto converted = [&](const at::Tensor& tokens) {
    for (const auto& [from, to] : conversions) {
      if (from.is_same(tokens)) return to;
    }
    conversions.emplace_back(tokens, tokens.to(projected_dtype(tokens.scalar_type())));
    return conversions.back().second;
  };
  for (size_t i = 0; i < layers.size(); ++i) {
    auto& [layer, slot, d, tokens, off] = layers[i];
    if (!tokens.defined()) continue;
    const int64_t h = layer->weight.size(0) / d;
    if (!takes_kernels(tokens, *layer)) {
      heads[i] = layer->forward(tokens).unflatten(2, {h, d});
      continue;
    }
    heads[i] = allocate_heads(tokens, h, d, 0, Lifetime::kept);
    const auto projection =
        projection_of(converted(tokens), *layer, slot, whole_rows(heads[i]));
    if (records(tokens, *layer)) {
      recorded.push_back(projection);
      numbers.push_back(i);
    } else {
      others.push_back(projection);
    }
  }
  if (!others.empty()) project(others, cache);
  if (recorded.empty()) return heads;
  const auto outputs = project_recorded(recorded, cache);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto& output = outputs[i];
    const int64_t d = layers[numbers[i]].head_dim;
    heads[numbers[i]] =
        output.dim() == 4 ? output : output.unflatten(2, {output.size(2) / d, d});
  }
  return heads;
}

// The same, where heads may be off.
std::vector<at::Tensor> project_to_heads(std::vector<HeadLayer> layers, PackedWeights& cache) {
  std::vector<at::Tensor> without(layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    auto& [layer, slot, d, tokens, off] = layers[i];
    if (!tokens.defined() || !off.defined()) continue;
    without[i] = project_without_off_heads(*layer, tokens, off);
    if (!without[i].defined()) continue;
    if (takes_kernels(tokens, *layer)) without[i] = without[i].to(projected_dtype(*layer));
    tokens = at::Tensor();
  }
  auto heads = project_all_to_heads(layers, cache);
  for (size_t i = 0; i < layers.size(); ++i) {
    const at::Tensor& off = layers[i].off;
    if (without[i].defined()) {
      heads[i] = without[i].unflatten(2, {off.size(1), layers[i].head_dim});
    }
    if (heads[i].defined() && off.defined()) heads[i] = without_off_heads(heads[i], off);
  }
  return heads;
}

// (N, S, Hk, D) with the appended tokens of keys or of values.
at::Tensor with_appended(const at::Tensor& heads, const MultiHeadAttentionOptions& options,
                         const at::Tensor& bias) {
  auto all = heads;
  if (options.add_bias_kv()) {
    const auto token = bias.to(all.scalar_type()).view({1, 1, all.size(2), all.size(3)});
    all = at::cat({all, token.expand({all.size(0), -1, -1, -1})}, 1);
  }
  return options.add_zero_attn() ? at::constant_pad_nd(all, {0, 0, 0, 0, 0, 1}) : all;
}

// With gradients.
Heads project_with_gradients(MultiHeadAttentionImpl& module, PackedWeights& cache,
                             const Tokens& tokens) {
  const auto& options = module.options;
  const auto off = at::GradMode::is_enabled() ? tokens.off : at::Tensor();
  const auto kv_off = kv_heads_off(off, module.num_kv_heads());
  // A norm over all heads has the others depend on one that is off.
  const bool are_apart =
      options.qk_norm() == QKNorm::none || options.qk_norm_scope() == QKNormScope::head;
  const auto apart = [&](const at::Tensor& of) { return are_apart ? of : at::Tensor(); };
  const int64_t d = module.head_dim(), dv = module.v_head_dim();
  auto heads = project_to_heads({{module.W_q.get(), 0, d, tokens.query, apart(off)},
                                 {module.W_k.get(), 1, d, tokens.key, apart(kv_off)},
                                 {module.W_v.get(), 2, dv, tokens.value, kv_off}},
                                cache);
  auto &q = heads[0], &k = heads[1], &v = heads[2];
  if (q.defined()) q = condition(q, of_queries(module, tokens));
  if (k.defined()) {
    k = condition(k, of_keys(module, tokens));
    k = with_appended(k, options, module.bias_k);
    v = with_appended(scaled(module, v), options, module.bias_v);
  }
  return {heads_first(q), heads_first(k), heads_first(v)};
}

// Whether one pass of the kernels gives the heads of these tokens, which may be absent.
bool takes_one_pass(const MultiHeadAttentionImpl& module, const Tokens& tokens) {
  const auto takes = [](const at::Tensor& input, const torch::nn::Linear& layer) {
    return !input.defined() || (takes_kernels(input, *layer) && !records(input, *layer));
  };
  const bool record_query =
      tokens.query.defined() && wants_gradient(module.q_norm, module.q_norm_bias);
  const bool record_key =
      tokens.key.defined() &&
      wants_gradient(module.k_norm, module.k_norm_bias, module.bias_k, module.bias_v);
  return takes(tokens.query, module.W_q) && takes(tokens.key, module.W_k) &&
         takes(tokens.value, module.W_v) && !record_query && !record_key &&
         !is_followed({module.bias_k, module.bias_v, module.q_norm, module.k_norm,
                       module.q_norm_bias, module.k_norm_bias});
}

}  // namespace

int64_t appended_keys(const MultiHeadAttentionOptions& options) {
  return int64_t{options.add_bias_kv()} + int64_t{options.add_zero_attn()};
}

Heads project_heads(MultiHeadAttentionImpl& module, PackedWeights& cache, const Tokens& tokens,
                    Lifetime lifetime) {
  return takes_one_pass(module, tokens) ? project_unrecorded(module, cache, tokens, lifetime)
                                        : project_with_gradients(module, cache, tokens);
}

namespace {

at::Tensor project_whole_gate(MultiHeadAttentionImpl& module, PackedWeights& cache,
                              const at::Tensor& query) {
  torch::nn::LinearImpl& layer = *module.W_g;
  const int64_t n = query.size(0), l = query.size(1), columns = layer.weight.size(0);
  const std::vector<int64_t> split{module.options.num_heads(),
                                   columns / module.options.num_heads()};
  if (!takes_kernels(query, layer)) return layer.forward(query).unflatten(2, split);
  const bool recorded = records(query, layer);
  const auto output = allocated({n, l, columns}, recorded ? Lifetime::kept : Lifetime::passing,
                                projected_dtype(layer));
  const auto projection = projection_of(query, layer, 4, output);
  if (recorded) return project_recorded({projection}, cache)[0].unflatten(2, split);
  project({projection}, cache);
  return output.unflatten(2, split);
}

at::Tensor project_merged(MultiHeadAttentionImpl& module, PackedWeights& cache,
                          const at::Tensor& merged) {
  const auto dtype = module.W_o->weight.scalar_type();
  if (!takes_kernels(merged, *module.W_o)) return module.W_o->forward(merged.to(dtype));
  const int64_t n = merged.size(0), l = merged.size(1), e = module.options.d_model();
  const auto computed = projected_dtype(dtype);
  const auto output = module.options.batch_first()
                          ? uncomputed({n, l, e}, computed)
                          : uncomputed({l, n, e}, computed).transpose(0, 1);
  const auto projection = projection_of(merged, *module.W_o, 3, output);
  if (records(merged, *module.W_o)) return project_recorded({projection}, cache)[0].to(dtype);
  project({projection}, cache);
  return output.to(dtype);
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
  if (off.defined() && !merged.is_meta() && !may_branch_on_numbers(merged)) {
    return merge_without_off_heads(*module.W_o, merged, off);
  }
  const auto output = project_merged(module, cache, merged);
  if (!off.defined() || !may_be_non_finite(output)) return output;
  const auto without = merge_without_off_heads(*module.W_o, merged, off);
  return without.defined() ? without : output;
}

}  // namespace mha::detail
