#include "support/random_configuration.h"

#include <ATen/ATen.h>

#include <array>
#include <cmath>
#include <set>
#include <sstream>

namespace mha::test {
namespace {

using Alignment = Mask::Alignment;

/// Separate streams for the configuration, its data and its parameters, so that a change to one
/// draw does not shift the others.
enum Stream : uint64_t { configuration_stream, data_stream, parameter_stream };
Random random_stream(uint64_t seed, Stream stream) {
  return Random(seed * 4 + stream + 1);
}

void draw_sizes(Random& random, Configuration& c) {
  do {
    c.N = c.layout == InputLayout::unbatched ? 1 : random.between(1, 5);
    c.L = random.between(1, 33);
    c.S = random.between(1, 33);
    c.H = random.between(1, 6);
    c.D = random.between(1, 12);
  } while (std::set<int64_t>{c.N, c.L, c.S, c.H, c.D}.size() < 5);
}

/// Terms of adding masks also block a few keys by -inf.
at::Tensor draw_added(Random& random, at::IntArrayRef shape, at::ScalarType dtype) {
  const auto values = random.normal(shape, dtype);
  return values.masked_fill_(random.coins(shape, 0.1), -infinity).requires_grad_();
}

Mask draw_attention_terms(Random& random, const Configuration& c, at::Tensor& added) {
  const auto extent = [&] { return random.between(-1, c.S / 2); };
  const auto alignment = [&] {
    return random.chance(0.5) ? Alignment::bottom_right : Alignment::top_left;
  };
  switch (c.attention_mask) {
    case AttentionMaskKind::none:
      return {};
    case AttentionMaskKind::add:
      return Mask::add(added = draw_added(random, {c.L, c.S}, c.dtype));
    case AttentionMaskKind::add_batch:
      return Mask::add(added = draw_added(random, {c.N, c.L, c.S}, c.dtype));
    case AttentionMaskKind::add_heads:
      return Mask::add(added = draw_added(random, {c.N * c.H, c.L, c.S}, c.dtype));
    case AttentionMaskKind::add_full: {
      const auto rows = random.chance(0.5) ? c.N : 1, heads = random.chance(0.5) ? c.H : 1;
      return Mask::add(added = draw_added(random, {rows, heads, c.L, c.S}, c.dtype));
    }
    case AttentionMaskKind::block:
      return Mask::block(random.coins({c.L, c.S}, 0.2));
    case AttentionMaskKind::block_heads:
      return Mask::block(random.coins({c.N * c.H, c.L, c.S}, 0.2));
    case AttentionMaskKind::keep:
      return Mask::keep(
          random.coins({c.L, c.S}, 0.8).to(random.chance(0.5) ? at::kInt : c.dtype));
    case AttentionMaskKind::causal:
      return Mask::causal(alignment());
    case AttentionMaskKind::window: {
      const auto left = extent(), right = extent();
      return Mask::window(left, right, alignment());
    }
  }
  return {};
}

Mask draw_padding_terms(Random& random, const Configuration& c) {
  // One mask for all samples, without the batch dimension, where there is only one anyway.
  const auto shape = c.layout == InputLayout::unbatched && random.chance(0.5)
                         ? std::vector<int64_t>{c.S}
                         : std::vector<int64_t>{c.N, c.S};
  switch (c.padding) {
    case PaddingKind::none:
      return {};
    case PaddingKind::block_keys:
      return Mask::block_keys(random.coins(shape, 0.25));
    case PaddingKind::keep_keys:
      return Mask::keep_keys(random.coins(shape, 0.75).to(at::kLong));
    case PaddingKind::lengths: {
      auto lengths = at::empty({c.N}, at::kLong);
      for (int64_t n = 0; n < c.N; ++n) lengths[n] = random.between(0, c.S);
      return Mask::lengths(lengths);
    }
  }
  return {};
}

}  // namespace

Configuration draw_configuration(uint64_t seed) {
  auto random = random_stream(seed, configuration_stream);
  Configuration c;
  c.seed = seed;
  c.dtype = seed % 2 == 0 ? at::kFloat : at::kDouble;
  c.layout = random.pick<InputLayout>({InputLayout::batch_first, InputLayout::batch_first,
                                       InputLayout::batch_first, InputLayout::sequence_first,
                                       InputLayout::sequence_first, InputLayout::unbatched});
  draw_sizes(random, c);

  // torch's module has neither a free head_dim nor a scale, and C++'s no kdim unlike vdim: keep
  // these rare enough that most configurations can be compared with it.
  const bool free_head_dim = random.chance(0.08);
  const auto d_model = free_head_dim ? random.between(1, 40) : c.H * c.D;
  c.options = MultiHeadAttentionOptions(d_model, c.H);
  if (free_head_dim) c.options.head_dim(c.D);
  if (random.chance(0.08)) {
    c.options.scale(static_cast<double>(random.between(1, 6)) / 4 /
                    std::sqrt(static_cast<double>(c.D)));
  }
  const auto widths = random.between(0, 9);
  if (widths == 0 || widths >= 7) c.options.kdim(random.between(1, 40));
  if (widths == 1) c.options.vdim(random.between(1, 40));
  if (widths >= 7) c.options.vdim(c.options.kdim());
  c.kdim = c.options.kdim().value_or(d_model);
  c.vdim = c.options.vdim().value_or(d_model);

  c.options.bias(random.chance(0.7))
      .add_bias_kv(random.chance(0.3))
      .add_zero_attn(random.chance(0.3))
      .batch_first(c.layout != InputLayout::sequence_first)
      .dtype(c.dtype);
  c.open_keys = (c.options.add_bias_kv() ? 1 : 0) + (c.options.add_zero_attn() ? 1 : 0);

  c.weights = random.pick<Weights>({Weights::none, Weights::averaged, Weights::per_head});
  c.weights_by_option = random.chance(0.5);
  if (c.weights_by_option) c.options.weights(c.weights);

  using Kind = AttentionMaskKind;
  c.attention_mask = random.pick<Kind>(
      {Kind::none, Kind::none, Kind::none, Kind::none, Kind::add, Kind::add, Kind::add,
       Kind::add, Kind::block, Kind::block, Kind::keep, Kind::causal, Kind::causal,
       Kind::window, Kind::add_batch, Kind::add_heads, Kind::add_full, Kind::block_heads});
  c.padding =
      random.pick<PaddingKind>({PaddingKind::none, PaddingKind::none, PaddingKind::block_keys,
                                PaddingKind::keep_keys, PaddingKind::lengths});

  // torch's module has no grouped heads either: mostly where it cannot be compared anyway.
  const bool comparable = !c.options.head_dim() && !c.options.scale() && c.kdim == c.vdim;
  if (random.chance(comparable ? 0.05 : 0.5)) {
    int64_t kv_heads = random.between(1, c.H);
    while (c.H % kv_heads != 0) --kv_heads;
    c.options.num_kv_heads(kv_heads);
  }
  // Nor has it these: only where it cannot be compared.
  if (!comparable || c.options.num_kv_heads()) {
    if (random.chance(0.4)) c.options.softcap(random.pick<double>({0.5, 20}));
    c.options.sinks(random.chance(0.4));
  }
  return c;
}

CallData draw_call(const Configuration& c) {
  auto random = random_stream(c.seed, data_stream);
  const auto leaf = [&](at::IntArrayRef shape) {
    return random.normal(shape, c.dtype).requires_grad_();
  };
  CallData data;
  data.query = leaf({c.N, c.L, c.options.d_model()});
  data.key = leaf({c.N, c.S, c.kdim});
  data.value = leaf({c.N, c.S, c.vdim});
  data.attention_terms = draw_attention_terms(random, c, data.added);
  data.padding_terms = draw_padding_terms(random, c);
  data.mask = random.chance(0.5) ? data.attention_terms & data.padding_terms
                                 : data.padding_terms & data.attention_terms;
  data.dense = dense_mask(data.mask, c.N, c.H, c.L, c.S, c.open_keys);

  const auto upstream = [&](at::IntArrayRef shape) {
    return random.normal(shape, c.dtype) / std::sqrt(static_cast<double>(4 * c.N * c.L));
  };
  const auto columns = c.S + c.open_keys;
  data.grad_output = upstream({c.N, c.L, c.options.d_model()});
  if (c.weights == Weights::averaged) data.grad_weights = upstream({c.N, c.L, columns});
  if (c.weights == Weights::per_head) data.grad_weights = upstream({c.N, c.H, c.L, columns});
  return data;
}

void randomise_parameters(torch::nn::Module& module, uint64_t seed) {
  auto random = random_stream(seed, parameter_stream);
  const at::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) {
    const double fan_in = parameter.dim() == 2 ? static_cast<double>(parameter.size(1)) : 1;
    parameter.copy_(random.normal(parameter.sizes(), at::kDouble) / std::sqrt(3 * fan_in));
  }
}

at::Tensor to_layout(const at::Tensor& tensor, InputLayout layout) {
  switch (layout) {
    case InputLayout::batch_first:
      return tensor;
    case InputLayout::sequence_first:
      return tensor.transpose(0, 1);
    case InputLayout::unbatched:
      return tensor.squeeze(0);
  }
  return {};
}

at::Tensor from_layout(const at::Tensor& tensor, InputLayout layout) {
  switch (layout) {
    case InputLayout::batch_first:
      return tensor;
    case InputLayout::sequence_first:
      return tensor.transpose(0, 1);
    case InputLayout::unbatched:
      return tensor.unsqueeze(0);
  }
  return {};
}

std::string describe(const Configuration& c) {
  std::ostringstream text;
  text << "seed " << c.seed << " (run it alone with MHA_TEST_SEED=" << c.seed
       << "): " << c.dtype << ", N=" << c.N << " L=" << c.L << " S=" << c.S << " H=" << c.H
       << " D=" << c.D << ", layout " << static_cast<int>(c.layout) << ", weights " << c.weights
       << ", " << MultiHeadAttention(c.options);
  return text.str();
}

}  // namespace mha::test
