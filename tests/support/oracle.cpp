#include "support/oracle.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <vector>

namespace mha::test {
namespace {

/// output[r][o] = sum_i input[r][i] * weight[o][i] + bias[o], over the rows of (N, T, in).
at::Tensor project(const at::Tensor& input, const torch::nn::Linear& linear) {
  const auto input_values = as_double(input), weights = as_double(linear->weight);
  const auto N = input.size(0), T = input.size(1), in = weights.size(1), out = weights.size(0);
  const auto biases =
      linear->bias.defined() ? as_double(linear->bias) : at::zeros({out}, at::kDouble);
  auto output = at::zeros({N, T, out}, at::kDouble);
  const auto x = input_values.accessor<double, 3>();
  const auto w = weights.accessor<double, 2>();
  const auto b = biases.accessor<double, 1>();
  auto y = output.accessor<double, 3>();
  for (int64_t n = 0; n < N; ++n)
    for (int64_t t = 0; t < T; ++t)
      for (int64_t o = 0; o < out; ++o) {
        double sum = b[o];
        for (int64_t i = 0; i < in; ++i) sum += x[n][t][i] * w[o][i];
        y[n][t][o] = sum;
      }
  return output;
}

/// The gradient of `project`'s input; those of its parameters go into `parameters`.
at::Tensor project_backward(const at::Tensor& input, const torch::nn::Linear& linear,
                            const at::Tensor& grad_output, const std::string& name,
                            std::map<std::string, at::Tensor>& parameters) {
  const auto input_values = as_double(input), weights = as_double(linear->weight),
             gradients = as_double(grad_output);
  const auto N = input.size(0), T = input.size(1), in = weights.size(1), out = weights.size(0);
  auto grad_input = at::zeros({N, T, in}, at::kDouble);
  auto grad_weight = at::zeros({out, in}, at::kDouble);
  auto grad_bias = at::zeros({out}, at::kDouble);
  const auto x = input_values.accessor<double, 3>(), dy = gradients.accessor<double, 3>();
  const auto w = weights.accessor<double, 2>();
  auto dx = grad_input.accessor<double, 3>();
  auto dw = grad_weight.accessor<double, 2>();
  auto db = grad_bias.accessor<double, 1>();
  for (int64_t n = 0; n < N; ++n)
    for (int64_t t = 0; t < T; ++t)
      for (int64_t o = 0; o < out; ++o) {
        db[o] += dy[n][t][o];
        for (int64_t i = 0; i < in; ++i) {
          dx[n][t][i] += dy[n][t][o] * w[o][i];
          dw[o][i] += dy[n][t][o] * x[n][t][i];
        }
      }
  parameters[name + ".weight"] = grad_weight;
  if (linear->bias.defined()) parameters[name + ".bias"] = grad_bias;
  return grad_input;
}

/// (N, T, H * D) to (N, H, T, D): feature h * D + d belongs to head h. Then the rows that
/// `add_bias_kv` (`extra`, (1, 1, H * D), may be undefined) and `add_zero_attn` append.
at::Tensor split_heads(const at::Tensor& projected, int64_t H, const at::Tensor& extra = {},
                       bool append_zeros = false) {
  const auto N = projected.size(0), T = projected.size(1), D = projected.size(2) / H;
  const auto extra_values =
      extra.defined() ? as_double(extra) : at::zeros({1, 1, H * D}, at::kDouble);
  auto heads =
      at::zeros({N, H, T + (extra.defined() ? 1 : 0) + (append_zeros ? 1 : 0), D}, at::kDouble);
  const auto e = extra_values.accessor<double, 3>();
  const auto x = projected.accessor<double, 3>();
  auto y = heads.accessor<double, 4>();
  for (int64_t n = 0; n < N; ++n)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t d = 0; d < D; ++d) {
        for (int64_t t = 0; t < T; ++t) y[n][h][t][d] = x[n][t][h * D + d];
        if (extra.defined()) y[n][h][T][d] = e[0][0][h * D + d];
      }
  return heads;
}

/// The reverse for the first T rows: (N, H, >= T, D) to (N, T, H * D).
at::Tensor merge_heads(const at::Tensor& heads, int64_t T) {
  const auto N = heads.size(0), H = heads.size(1), D = heads.size(3);
  auto merged = at::zeros({N, T, H * D}, at::kDouble);
  const auto x = heads.accessor<double, 4>();
  auto y = merged.accessor<double, 3>();
  for (int64_t n = 0; n < N; ++n)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t t = 0; t < T; ++t)
        for (int64_t d = 0; d < D; ++d) y[n][t][h * D + d] = x[n][h][t][d];
  return merged;
}

/// The gradient of `extra` in `split_heads`: row T of every sample, summed.
at::Tensor sum_extra_row(const at::Tensor& heads, int64_t T) {
  const auto N = heads.size(0), H = heads.size(1), D = heads.size(3);
  auto sums = at::zeros({1, 1, H * D}, at::kDouble);
  const auto x = heads.accessor<double, 4>();
  auto y = sums.accessor<double, 3>();
  for (int64_t n = 0; n < N; ++n)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t d = 0; d < D; ++d) y[0][0][h * D + d] += x[n][h][T][d];
  return sums;
}

/// The module's way from its inputs to the core's.
struct ProjectedCall {
  at::Tensor query, key, value;  // (N, H, L, D), (N, Hk, S + appended, D) twice
  DenseMask mask;
  OracleScoring scoring{1};
};

ProjectedCall project_call(const MultiHeadAttention& module, const at::Tensor& query,
                           const at::Tensor& key, const at::Tensor& value, const Mask& mask) {
  const auto& options = module->options;
  const auto H = options.num_heads(), Hk = options.num_kv_heads().value_or(H);
  const auto bias_k = options.add_bias_kv() ? module->bias_k : at::Tensor();
  const auto bias_v = options.add_bias_kv() ? module->bias_v : at::Tensor();
  ProjectedCall call;
  call.query = split_heads(project(query, module->W_q), H);
  call.key = split_heads(project(key, module->W_k), Hk, bias_k, options.add_zero_attn());
  call.value = split_heads(project(value, module->W_v), Hk, bias_v, options.add_zero_attn());
  call.mask = dense_mask(mask, query.size(0), H, query.size(1), key.size(1),
                         call.key.size(2) - key.size(1));
  call.scoring = {
      options.scale().value_or(1 / std::sqrt(static_cast<double>(call.query.size(3)))),
      options.softcap(), module->sinks};
  return call;
}

}  // namespace

at::Tensor as_double(const at::Tensor& tensor) {
  return tensor.detach().to(at::kDouble).contiguous();
}

at::Tensor oracle_heads(const torch::nn::Linear& linear, const at::Tensor& input,
                        int64_t heads) {
  return split_heads(project(input, linear), heads);
}

at::Tensor oracle_linear(const torch::nn::Linear& linear, const at::Tensor& input) {
  return project(input, linear);
}

AttentionOutput oracle_attention(const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value, const DenseMask& mask,
                                 const OracleScoring& scoring) {
  const auto query_values = as_double(query), key_values = as_double(key),
             value_values = as_double(value);
  const auto N = query.size(0), H = query.size(1), L = query.size(2), D = query.size(3);
  const auto S = key.size(2), Dv = value.size(3), group = H / key.size(1);
  AttentionOutput result{at::zeros({N, H, L, Dv}, at::kDouble),
                         at::zeros({N, H, L, S}, at::kDouble)};
  const auto q = query_values.accessor<double, 4>(), k = key_values.accessor<double, 4>(),
             v = value_values.accessor<double, 4>();
  const auto allowed = mask.allowed.accessor<double, 4>(),
             added = mask.added.accessor<double, 4>();
  auto output = result.output.accessor<double, 4>(),
       weights = result.weights.accessor<double, 4>();
  const auto sinks = scoring.sinks.defined() ? as_double(scoring.sinks) : at::Tensor();
  std::vector<double> scores(S);
  for (int64_t n = 0; n < N; ++n)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t i = 0; i < L; ++i) {
        const double sink = sinks.defined() ? sinks.accessor<double, 1>()[h]
                                            : -std::numeric_limits<double>::infinity();
        double largest = sink;
        for (int64_t j = 0; j < S; ++j) {
          if (allowed[n][h][i][j] == 0) continue;
          double dot = 0;
          for (int64_t d = 0; d < D; ++d) dot += q[n][h][i][d] * k[n][h / group][j][d];
          double score = scoring.scale * dot;
          if (scoring.softcap > 0) score = scoring.softcap * std::tanh(score / scoring.softcap);
          scores[j] = score + added[n][h][i][j];
          largest = std::fmax(largest, scores[j]);
        }
        double sum = sinks.defined() ? std::exp(sink - largest) : 0;
        for (int64_t j = 0; j < S; ++j)
          if (allowed[n][h][i][j] != 0) sum += std::exp(scores[j] - largest);
        for (int64_t j = 0; j < S; ++j) {
          if (allowed[n][h][i][j] == 0) continue;
          weights[n][h][i][j] = std::exp(scores[j] - largest) / sum;
          for (int64_t d = 0; d < Dv; ++d)
            output[n][h][i][d] += weights[n][h][i][j] * v[n][h / group][j][d];
        }
      }
  return result;
}

AttentionOutput oracle_attention(const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value, const Mask& mask) {
  return oracle_attention(
      query, key, value,
      dense_mask(mask, query.size(0), query.size(1), query.size(2), key.size(2)),
      1 / std::sqrt(static_cast<double>(query.size(3))));
}

OracleGradients oracle_attention_backward(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const DenseMask& mask,
                                          const OracleScoring& scoring,
                                          const at::Tensor& grad_output,
                                          const at::Tensor& grad_weights) {
  const auto weights_values = oracle_attention(query, key, value, mask, scoring).weights;
  const auto query_values = as_double(query), key_values = as_double(key),
             value_values = as_double(value), output_gradient = as_double(grad_output),
             weights_gradient = grad_weights.defined() ? as_double(grad_weights)
                                                       : at::zeros_like(weights_values);
  OracleGradients result{at::zeros_like(query_values),
                         at::zeros_like(key_values),
                         at::zeros_like(value_values),
                         at::zeros_like(weights_values),
                         {}};
  const auto N = query.size(0), H = query.size(1), L = query.size(2), D = query.size(3);
  const auto S = key.size(2), Dv = value.size(3), group = H / key.size(1);
  const auto q = query_values.accessor<double, 4>(), k = key_values.accessor<double, 4>(),
             v = value_values.accessor<double, 4>();
  const auto allowed = mask.allowed.accessor<double, 4>(),
             w = weights_values.accessor<double, 4>(),
             dy = output_gradient.accessor<double, 4>(),
             dw_given = weights_gradient.accessor<double, 4>();
  auto dq = result.query.accessor<double, 4>(), dk = result.key.accessor<double, 4>(),
       dv = result.value.accessor<double, 4>(), dscore = result.added.accessor<double, 4>();
  std::vector<double> dw(S), dsink(H);
  for (int64_t n = 0; n < N; ++n)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t i = 0; i < L; ++i) {
        const int64_t g = h / group;
        // output = sum_j w_j v_j, so dw_j = dy . v_j beside what the caller gave.
        double mean = 0, sink_weight = 1;
        for (int64_t j = 0; j < S; ++j) {
          if (allowed[n][h][i][j] == 0) continue;
          dw[j] = dw_given[n][h][i][j];
          for (int64_t d = 0; d < Dv; ++d) {
            dw[j] += dy[n][h][i][d] * v[n][g][j][d];
            dv[n][g][j][d] += dy[n][h][i][d] * w[n][h][i][j];
          }
          mean += w[n][h][i][j] * dw[j];
          sink_weight -= w[n][h][i][j];
        }
        // The sink has the weight that is left, and no value: its dw is 0.
        dsink[h] -= sink_weight * mean;
        // w = softmax(score), so dscore_j = w_j (dw_j - sum_k w_k dw_k).
        for (int64_t j = 0; j < S; ++j) {
          if (allowed[n][h][i][j] == 0) continue;
          dscore[n][h][i][j] = w[n][h][i][j] * (dw[j] - mean);
          // The score before the cap: softcap * tanh(x / softcap) has slope 1 - tanh^2.
          double slope = scoring.scale;
          if (scoring.softcap > 0) {
            double dot = 0;
            for (int64_t d = 0; d < D; ++d) dot += q[n][h][i][d] * k[n][g][j][d];
            slope *= 1 - std::pow(std::tanh(scoring.scale * dot / scoring.softcap), 2);
          }
          for (int64_t d = 0; d < D; ++d) {
            dq[n][h][i][d] += dscore[n][h][i][j] * slope * k[n][g][j][d];
            dk[n][g][j][d] += dscore[n][h][i][j] * slope * q[n][h][i][d];
          }
        }
      }
  if (scoring.sinks.defined()) result.sinks = torch::tensor(dsink, at::kDouble);
  return result;
}

AttentionOutput oracle_module(const MultiHeadAttention& module, const at::Tensor& query,
                              const at::Tensor& key, const at::Tensor& value,
                              const Mask& mask) {
  const auto call = project_call(module, query, key, value, mask);
  const auto [heads, weights] =
      oracle_attention(call.query, call.key, call.value, call.mask, call.scoring);
  return {project(merge_heads(heads, query.size(1)), module->W_o), weights};
}

OracleModuleGradients oracle_module_backward(const MultiHeadAttention& module,
                                             const at::Tensor& query, const at::Tensor& key,
                                             const at::Tensor& value, const Mask& mask,
                                             const at::Tensor& grad_output,
                                             const at::Tensor& grad_weights) {
  const auto L = query.size(1), S = key.size(1);
  const auto call = project_call(module, query, key, value, mask);
  const auto heads =
      oracle_attention(call.query, call.key, call.value, call.mask, call.scoring).output;
  OracleModuleGradients result;
  const auto grad_heads = split_heads(project_backward(merge_heads(heads, L), module->W_o,
                                                       grad_output, "W_o", result.parameters),
                                      module->options.num_heads());
  const auto core = oracle_attention_backward(call.query, call.key, call.value, call.mask,
                                              call.scoring, grad_heads, grad_weights);
  result.query = project_backward(query, module->W_q, merge_heads(core.query, L), "W_q",
                                  result.parameters);
  result.key =
      project_backward(key, module->W_k, merge_heads(core.key, S), "W_k", result.parameters);
  result.value = project_backward(value, module->W_v, merge_heads(core.value, S), "W_v",
                                  result.parameters);
  result.added = core.added;
  if (core.sinks.defined()) result.parameters["sinks"] = core.sinks;
  if (module->options.add_bias_kv()) {
    result.parameters["bias_k"] = sum_extra_row(core.key, S);
    result.parameters["bias_v"] = sum_extra_row(core.value, S);
  }
  return result;
}

}  // namespace mha::test
