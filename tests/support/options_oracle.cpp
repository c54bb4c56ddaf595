#include "support/options_oracle.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <vector>

namespace mha::test {
namespace {

// The elements of heads (N, H, T, D) that are normalised together, and the place of their
// gains.
void normalise(const at::Tensor& heads, const at::Tensor& gain, const at::Tensor& bias,
               const MultiHeadAttentionOptions& options) {
  auto x = heads.accessor<double, 4>();
  const int64_t H = heads.size(1), D = heads.size(3);
  const bool over_all = options.qk_norm_scope() == QKNormScope::all_heads;
  const auto numbers = [](const at::Tensor& parameter) {
    return parameter.defined() ? as_double(parameter).flatten() : at::Tensor();
  };
  const auto factors = numbers(gain), added = numbers(bias);
  const int64_t together = over_all ? H : 1;
  for (int64_t n = 0; n < heads.size(0); ++n)
    for (int64_t t = 0; t < heads.size(2); ++t)
      for (int64_t first = 0; first < H; first += together) {
        const double count = static_cast<double>(together * D);
        double mean = 0, square = 0;
        if (options.qk_norm() == QKNorm::layer)
          for (int64_t h = first; h < first + together; ++h)
            for (int64_t d = 0; d < D; ++d) mean += x[n][h][t][d] / count;
        for (int64_t h = first; h < first + together; ++h)
          for (int64_t d = 0; d < D; ++d) square += std::pow(x[n][h][t][d] - mean, 2) / count;
        for (int64_t h = first; h < first + together; ++h)
          for (int64_t d = 0; d < D; ++d) {
            double& number = x[n][h][t][d];
            number = (number - mean) / std::sqrt(square + options.qk_norm_eps());
            const int64_t place = factors.defined() && factors.numel() > D ? h * D + d : d;
            if (factors.defined()) number *= factors.accessor<double, 1>()[place];
            if (added.defined()) number += added.accessor<double, 1>()[place];
          }
      }
}

// What rotated numbers are multiplied by.
double amplitude_of(const RotaryOptions& options) {
  if (const auto* yarn = std::get_if<YarnScaling>(&options.scaling())) {
    const double logarithm = std::log(yarn->factor());
    return yarn->attention_factor().value_or((0.1 * yarn->mscale() * logarithm + 1) /
                                             (0.1 * yarn->mscale_all_dim() * logarithm + 1));
  }
  if (const auto* longrope = std::get_if<LongRopeScaling>(&options.scaling())) {
    const double original = static_cast<double>(longrope->original_max_position());
    return longrope->attention_factor().value_or(
        std::sqrt(1 + std::log(longrope->factor()) / std::log(original)));
  }
  return 1;
}

// Of a call with positions up to `longest`.
std::vector<double> frequencies_of(const RotaryOptions& options, int64_t head_dim,
                                   int64_t longest) {
  const auto tensor = rotary_frequencies(options, head_dim);
  const double* first = tensor.data_ptr<double>();
  std::vector<double> all(first, first + tensor.numel());
  const auto* longrope = std::get_if<LongRopeScaling>(&options.scaling());
  if (longrope && longest + 1 > longrope->original_max_position()) {
    for (size_t i = 0; i < all.size(); ++i) {
      all[i] =
          std::pow(options.base(), -static_cast<double>(i) / static_cast<double>(all.size())) /
          longrope->long_factor()[i];
    }
  }
  return all;
}

void turn_rows(const at::Tensor& heads, const at::Tensor& positions,
               const RotaryOptions& options, int64_t longest) {
  const auto f = frequencies_of(options, heads.size(3), longest);
  const double amplitude = amplitude_of(options);
  const auto pairs = static_cast<int64_t>(f.size());
  const auto all = positions.to(at::kLong).expand({heads.size(0), heads.size(2)}).contiguous();
  const auto p = all.accessor<int64_t, 2>();
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

void tune_rows(const at::Tensor& heads, const at::Tensor& positions,
               const TemperatureTuning& tuning) {
  const auto all = positions.to(at::kLong).expand({heads.size(0), heads.size(2)}).contiguous();
  const auto p = all.accessor<int64_t, 2>();
  auto x = heads.accessor<double, 4>();
  for (int64_t n = 0; n < heads.size(0); ++n)
    for (int64_t h = 0; h < heads.size(1); ++h)
      for (int64_t t = 0; t < heads.size(2); ++t) {
        const int64_t place = p[n][t] + tuning.offset();
        const int64_t steps = place < 0 ? 0 : place / tuning.floor_scale();
        for (int64_t d = 0; d < heads.size(3); ++d)
          x[n][h][t][d] *= 1 + tuning.scale() * std::log(1 + static_cast<double>(steps));
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
  v *= options.value_scale();
  auto of_queries = call.positions(), of_keys = call.key_positions();
  if (!of_queries.defined()) {
    of_queries = at::arange(L) + (S - L);
    of_keys = at::arange(S);
  } else if (!of_keys.defined()) {
    of_keys = of_queries;
  }
  const auto normalise_both = [&](QKNormOrder order) {
    if (options.qk_norm() == QKNorm::none || options.qk_norm_order() != order) return;
    normalise(q, module->q_norm, module->q_norm_bias, options);
    normalise(k, module->k_norm, module->k_norm_bias, options);
  };
  normalise_both(QKNormOrder::before_rotary);
  if (options.rotary()) {
    int64_t longest = 0;
    for (const auto& positions : {of_queries, of_keys})
      if (positions.numel() > 0) longest = std::max(longest, positions.max().item<int64_t>());
    turn_rows(q, of_queries, *options.rotary(), longest);
    turn_rows(k, of_keys, *options.rotary(), longest);
  }
  normalise_both(QKNormOrder::after_rotary);
  if (options.temperature_tuning()) tune_rows(q, of_queries, *options.temperature_tuning());
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
