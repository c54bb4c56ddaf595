#include "numerics/option_setting.h"

#include <sstream>
#include <vector>

#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

at::Tensor integers(Random& random, at::IntArrayRef shape, int64_t below) {
  return random.normal(shape).abs().mul(1e4).to(at::kLong).remainder(below);
}

void draw_options(Random& random, OptionSetting& s) {
  const auto kv_heads = random.between(1, 3), d = 2 * random.between(2, 16);
  s.options = MultiHeadAttentionOptions(random.between(3, 40), kv_heads * random.between(1, 3));
  s.options.num_kv_heads(kv_heads).head_dim(d).bias(random.chance(0.5));
  if (random.chance(0.3)) s.options.softcap(0.5 * static_cast<double>(random.between(1, 10)));
  if (random.chance(0.2)) s.options.scale(0.3);
  s.options.sinks(random.chance(0.3));
  s.options.add_bias_kv(random.chance(0.15)).add_zero_attn(random.chance(0.15));
  s.options.qk_norm(random.pick<QKNorm>({QKNorm::none, QKNorm::rms, QKNorm::layer}));
  s.options.output_gate(random.pick<OutputGate>(
      {OutputGate::none, OutputGate::per_head, OutputGate::elementwise}));
  if (random.chance(0.5)) {
    RotaryOptions rotary;
    rotary.base(random.pick<double>({100, 10000}));
    rotary.pairing(
        random.pick<RotaryPairing>({RotaryPairing::half_split, RotaryPairing::interleaved}));
    if (random.chance(0.3)) rotary.rotary_dim(2 * random.between(1, d / 2));
    if (random.chance(0.4)) {
      rotary.scaling(random.pick<RotaryScaling>({LinearScaling(2), NtkScaling(4),
                                                 Llama3Scaling(8, 32), YarnScaling(4, 16),
                                                 YarnScaling(8, 64).attention_factor(1.2)}));
    }
    s.options.rotary(rotary);
  }
}

// What the options above come in. Drawn apart, so that these stay as they are.
void draw_variants(Random random, OptionSetting& s) {
  auto& options = s.options;
  const int64_t d = *options.head_dim();
  if (options.qk_norm() != QKNorm::none) {
    if (random.chance(0.3)) options.qk_norm_scope(QKNormScope::all_heads);
    options.qk_norm_gain(random.pick<QKNormGain>(
        {QKNormGain::elementwise, QKNormGain::elementwise, QKNormGain::none,
         options.qk_norm_scope() == QKNormScope::head ? QKNormGain::per_head
                                                      : QKNormGain::elementwise}));
    if (random.chance(0.4)) options.qk_norm_order(QKNormOrder::after_rotary);
    options.qk_norm_bias(options.qk_norm() == QKNorm::layer &&
                         options.qk_norm_gain() != QKNormGain::none && random.chance(0.4));
  }
  if (random.chance(0.3)) options.v_head_dim(random.between(1, 40));
  if (random.chance(0.15)) options.value_scale(0.7);
  if (random.chance(0.2)) {
    options.temperature_tuning(
        TemperatureTuning(0.3, random.between(1, 8)).offset(random.between(0, 1)));
  }
  if (!options.rotary() || !random.chance(0.25)) return;
  const int64_t pairs = options.rotary()->rotary_dim().value_or(d) / 2;
  const auto numbers = [&] {
    const auto drawn = random.normal({pairs}, at::kDouble).abs() + 0.5;
    return std::vector<double>(drawn.data_ptr<double>(), drawn.data_ptr<double>() + pairs);
  };
  auto& rotary = *options.rotary();
  if (random.chance(0.5)) {
    rotary.scaling({}).frequencies(numbers());
  } else {
    // Longer than any call, since what is cached of shorter ones would keep its frequencies.
    rotary.scaling(LongRopeScaling(numbers(), numbers(), 256).factor(4));
  }
}

Mask fixed_mask(Random& random, const OptionSetting& s) {
  const int64_t n = s.batch, t = s.length, h = s.options.num_heads();
  Mask mask;
  if (random.chance(0.3)) mask = mask & Mask::lengths(integers(random, {n}, t + 1));
  if (random.chance(0.3)) mask = mask & Mask::keep_keys(random.coins({n, t}, 0.7));
  if (random.chance(0.4)) mask = mask & Mask::documents(integers(random, {n, t}, 3));
  if (random.chance(0.4)) {
    const auto dtype = random.chance(0.7) ? at::kFloat : at::kBFloat16;
    mask = mask & Mask::relative(random.normal({random.chance(0.5) ? h : 1, 2 * t - 1}, dtype));
  }
  if (random.chance(0.3)) mask = mask & Mask::add(random.normal({n, 1, t, t}));
  if (random.chance(0.3)) mask = mask & Mask::causal(integers(random, {n}, t) - t / 2);
  return mask;
}

}  // namespace

Mask running_mask(const OptionSetting& s) {
  Mask mask = Mask::causal();
  if (s.window) mask = mask & Mask::window(*s.window - 1, 0);
  if (s.slopes.defined()) mask = mask & Mask::alibi(s.slopes);
  return mask;
}

OptionSetting draw_option_setting(uint64_t seed) {
  Random random(seed);
  OptionSetting s;
  s.seed = seed;
  draw_options(random, s);
  draw_variants(Random(seed + 1000003), s);
  s.batch = random.between(1, 3);
  s.length = random.chance(0.15) ? random.between(40, 110) : random.between(1, 14);
  const int64_t h = s.options.num_heads();
  if (random.chance(0.3)) s.window = random.between(1, 12);
  if (random.chance(0.3)) s.slopes = random.normal({h}).abs();
  s.cacheable = random.chance(0.4);
  s.call.mask(s.cacheable          ? running_mask(s)
              : random.chance(0.5) ? running_mask(s) & fixed_mask(random, s)
                                   : fixed_mask(random, s));
  if (random.chance(0.3)) {
    s.call.head_mask(random.chance(0.5) ? random.normal({h}) : random.normal({s.batch, h}));
  }
  if (s.options.rotary() && !s.cacheable && random.chance(0.4)) {
    s.call.positions(random.chance(0.5) ? integers(random, {s.length}, 50)
                                        : integers(random, {s.batch, s.length}, 50));
  }
  return s;
}

std::string describe(const OptionSetting& s) {
  std::ostringstream text;
  text << "MHA_TEST_SEED=" << s.seed << ": ";
  MultiHeadAttention(s.options)->pretty_print(text);
  text << " N=" << s.batch << " T=" << s.length << " mask " << s.call.mask();
  if (s.call.positions().defined()) text << " positions " << s.call.positions().sizes();
  if (s.call.head_mask().defined()) text << " head_mask " << s.call.head_mask().sizes();
  return text.str();
}

}  // namespace mha::test
