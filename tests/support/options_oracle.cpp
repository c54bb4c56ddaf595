#include "support/options_oracle.h"

#include <ATen/ATen.h>

#include <cmath>
#include <complex>
#include <vector>

namespace mha::test {
namespace {

void normalise_rows(const at::Tensor& heads, const at::Tensor& gain, const at::Tensor& bias,
                    QKNorm norm, double eps) {
  auto x = heads.accessor<double, 4>();
  const auto factors = as_double(gain),
             added = bias.defined() ? as_double(bias) : at::zeros_like(factors);
  const auto g = factors.accessor<double, 1>(), b = added.accessor<double, 1>();
  const int64_t D = heads.size(3);
  for (int64_t n = 0; n < heads.size(0); ++n)
    for (int64_t h = 0; h < heads.size(1); ++h)
      for (int64_t t = 0; t < heads.size(2); ++t) {
        double mean = 0, square = 0;
        if (norm == QKNorm::layer)
          for (int64_t d = 0; d < D; ++d) mean += x[n][h][t][d] / static_cast<double>(D);
        for (int64_t d = 0; d < D; ++d)
          square += std::pow(x[n][h][t][d] - mean, 2) / static_cast<double>(D);
        for (int64_t d = 0; d < D; ++d)
          x[n][h][t][d] = (x[n][h][t][d] - mean) / std::sqrt(square + eps) * g[d] + b[d];
      }
}

void turn_rows(const at::Tensor& heads, const at::Tensor& positions,
               const RotaryOptions& options) {
  const auto frequencies = rotary_frequencies(options, heads.size(3));
  const auto* yarn = std::get_if<YarnScaling>(&options.scaling());
  const double amplitude =
      yarn ? yarn->attention_factor().value_or(0.1 * std::log(yarn->factor()) + 1) : 1;
  const int64_t pairs = frequencies.size(0);
  const auto all = positions.to(at::kLong).expand({heads.size(0), heads.size(2)}).contiguous();
  const auto p = all.accessor<int64_t, 2>();
  const auto f = frequencies.accessor<double, 1>();
  auto x = heads.accessor<double, 4>();
  for (int64_t n = 0; n < heads.size(0); ++n)
    for (int64_t h = 0; h < heads.size(1); ++h)
      for (int64_t t = 0; t < heads.size(2); ++t)
        for (int64_t i = 0; i < pairs; ++i) {
          const bool halves = options.pairing() == RotaryPairing::half_split;
          double& a = x[n][h][t][halves ? i : 2 * i];
          double& b = x[n][h][t][halves ? i + pairs : 2 * i + 1];
          const auto turned = std::complex<double>(a, b) *
                              std::polar(amplitude, static_cast<double>(p[n][t]) * f[i]);
          a = turned.real();
          b = turned.imag();
        }
}

}  // namespace

int64_t append_own_keys(const MultiHeadAttention& module, at::Tensor& k, at::Tensor& v) {
  const auto& options = module->options;
  const auto append = [](at::Tensor& heads, const at::Tensor& token) {
    const int64_t N = heads.size(0), Hk = heads.size(1), D = heads.size(3);
    heads = at::cat({heads, token.view({1, Hk, 1, D}).expand({N, Hk, 1, D})}, 2);
  };
  if (options.add_bias_kv()) {
    append(k, as_double(module->bias_k));
    append(v, as_double(module->bias_v));
  }
  if (options.add_zero_attn()) {
    for (auto* heads : {&k, &v}) {
      append(*heads, at::zeros({heads->size(1), heads->size(3)}, at::kDouble));
    }
  }
  return int64_t{options.add_bias_kv()} + int64_t{options.add_zero_attn()};
}

AttentionOutput oracle_module(const MultiHeadAttention& module, const at::Tensor& query,
                              const at::Tensor& key, const at::Tensor& value,
                              const CallOptions& call) {
  const auto& options = module->options;
  const int64_t N = query.size(0), L = query.size(1), S = key.size(1);
  const int64_t H = options.num_heads(), Hk = options.num_kv_heads().value_or(H);
  auto q = oracle_heads(module->W_q, query, H), k = oracle_heads(module->W_k, key, Hk),
       v = oracle_heads(module->W_v, value, Hk);
  if (options.qk_norm() != QKNorm::none) {
    const auto norm = options.qk_norm();
    normalise_rows(q, module->q_norm, module->q_norm_bias, norm, options.qk_norm_eps());
    normalise_rows(k, module->k_norm, module->k_norm_bias, norm, options.qk_norm_eps());
  }
  if (options.rotary()) {
    auto of_queries = call.positions(), of_keys = call.key_positions();
    if (!of_queries.defined()) {
      of_queries = at::arange(L) + (S - L);
      of_keys = at::arange(S);
    } else if (!of_keys.defined()) {
      of_keys = of_queries;
    }
    turn_rows(q, of_queries, *options.rotary());
    turn_rows(k, of_keys, *options.rotary());
  }
  const int64_t open_keys = append_own_keys(module, k, v);
  const double scale = options.scale().value_or(1 / std::sqrt(static_cast<double>(q.size(3))));
  auto [heads, weights] =
      oracle_attention(q, k, v, dense_mask(call.mask(), N, H, L, S, open_keys),
                       {scale, options.softcap(), module->sinks});
  auto y = heads.accessor<double, 4>();
  const int64_t D = heads.size(3);
  const auto gates = options.output_gate() == OutputGate::none
                         ? at::Tensor()
                         : oracle_heads(module->W_g, query, H);
  const auto factors = call.head_mask().defined()
                           ? as_double(call.head_mask()).expand({N, H}).contiguous()
                           : at::ones({N, H}, at::kDouble);
  const auto m = factors.accessor<double, 2>();
  for (int64_t n = 0; n < N; ++n)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t t = 0; t < L; ++t)
        for (int64_t d = 0; d < D; ++d) {
          y[n][h][t][d] *= m[n][h];
          if (!gates.defined()) continue;
          const auto g = gates.accessor<double, 4>();
          y[n][h][t][d] /= 1 + std::exp(-g[n][h][t][gates.size(3) == 1 ? 0 : d]);
        }
  const auto merged = heads.transpose(1, 2).reshape({N, L, H * D});
  return {oracle_heads(module->W_o, merged, 1).squeeze(1), weights};
}

}  // namespace mha::test
