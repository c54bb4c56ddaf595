// Guards the module's options of today's models (rotary positions, normalised queries and keys,
// gates, head masks) against loops in double, alone and together. Inputs and weights
// of unit scale in float32: some tens of roundings of 6e-8 of numbers up to 3, so 5e-6 (outputs
// of two precisions of the same path), 2e-5 for gradients, which sum over tokens.
#include <gtest/gtest.h>
#include <mha/multi_head_attention.h>

#include <cmath>
#include <sstream>

#include "support/expect.h"
#include "support/options_oracle.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha {
namespace {

using test::is_bit_equal;
using test::is_close;
using test::is_same_but_for_blas;
using test::is_same_result;
using test::leaf;
using test::nan;
using test::Random;
using test::refuses;

MultiHeadAttentionOptions base() {
  return MultiHeadAttentionOptions(48, 6).num_kv_heads(2);
}

struct NamedOptions {
  std::string name;
  MultiHeadAttentionOptions options;
};

std::vector<NamedOptions> settings() {
  const auto interleaved = RotaryOptions().pairing(RotaryPairing::interleaved).rotary_dim(6);
  const auto yarn = RotaryOptions().scaling(YarnScaling(4, 16).attention_factor(1.2));
  const auto own = RotaryOptions().frequencies({1, 0.3, 0, -0.01});
  // Of calls that are all shorter.
  const auto longrope = LongRopeScaling({1, 1.1, 1.4, 2}, {2, 3, 5, 8}, 2048).factor(4);
  constexpr auto all_heads = QKNormScope::all_heads;
  constexpr auto per_head = QKNormGain::per_head;
  constexpr auto after = QKNormOrder::after_rotary;
  auto all = base();
  all.head_dim(16).rotary(yarn).qk_norm(QKNorm::rms).output_gate(OutputGate::elementwise);
  auto appended = all;
  appended.add_bias_kv(true).add_zero_attn(true).output_gate(OutputGate::per_head);
  auto qwen = base();
  qwen.head_dim(32).bias(false).rotary(RotaryOptions().base(1e6)).qk_norm(QKNorm::rms);
  return {
      {"rotary", base().rotary(RotaryOptions())},
      {"rotary interleaved and partial", base().rotary(interleaved)},
      {"rms", base().qk_norm(QKNorm::rms)},
      {"layer", base().qk_norm(QKNorm::layer).qk_norm_eps(1e-3)},
      {"layer with bias", base().head_dim(20).qk_norm(QKNorm::layer).qk_norm_bias(true)},
      {"gate per head", base().output_gate(OutputGate::per_head)},
      {"gate elementwise", base().output_gate(OutputGate::elementwise)},
      {"rms over all heads", base().qk_norm(QKNorm::rms).qk_norm_scope(all_heads)},
      {"layer over all heads, with bias, after a rotation", base()
                                                                .head_dim(16)
                                                                .rotary(interleaved)
                                                                .qk_norm(QKNorm::layer)
                                                                .qk_norm_scope(all_heads)
                                                                .qk_norm_order(after)
                                                                .qk_norm_bias(true)},
      {"rms after a rotation", base().rotary(yarn).qk_norm(QKNorm::rms).qk_norm_order(after)},
      {"layer per head", base().qk_norm(QKNorm::layer).qk_norm_gain(per_head)},
      {"layer per head, with bias",
       base().head_dim(16).qk_norm(QKNorm::layer).qk_norm_gain(per_head).qk_norm_bias(true)},
      {"rms without gain after a rotation", base()
                                                .rotary(RotaryOptions())
                                                .qk_norm(QKNorm::rms)
                                                .qk_norm_gain(QKNormGain::none)
                                                .qk_norm_order(after)},
      {"smaller value heads",
       base().head_dim(20).v_head_dim(12).add_bias_kv(true).add_zero_attn(true)},
      {"larger value heads, gated",
       base().v_head_dim(32).value_scale(0.707).output_gate(OutputGate::elementwise)},
      {"temperature tuning", base().temperature_tuning(TemperatureTuning(0.4, 8).offset(1))},
      {"temperature tuning and a rotation",
       base().rotary(RotaryOptions()).temperature_tuning(TemperatureTuning(0.1, 16))},
      {"frequencies", base().rotary(own)},
      {"longrope", base().rotary(RotaryOptions().scaling(longrope))},
      {"all", all},
      {"all with appended keys", appended},
      {"a layer of Qwen3", qwen}};
}

// With gains that are no ones and biases that are no zeros.
MultiHeadAttention make(const MultiHeadAttentionOptions& options) {
  torch::manual_seed(21);
  MultiHeadAttention module(options);
  torch::NoGradGuard no_grad;
  for (auto& parameter : module->named_parameters()) {
    if (parameter.key().find("_norm") != std::string::npos) {
      parameter->copy_(at::rand_like(*parameter) + 0.5);
    }
  }
  return module;
}

struct NamedCall {
  std::string name;
  CallOptions call;
};
// Over (2, 70) tokens.
std::vector<NamedCall> calls(bool rotary) {
  std::vector<NamedCall> all{
      {"plain", {}},
      {"causal window and lengths",
       CallOptions(Mask::causal() & Mask::window(9, -1) & Mask::lengths(at::tensor({70, 33})))},
      {"head mask", CallOptions().head_mask(at::tensor({1.0, 0.0, 0.5, 2.0, 1.0, -1.0}))},
      {"head mask of each sample",
       CallOptions().head_mask(at::linspace(0, 2, 12).view({2, 6}))}};
  if (rotary) {
    all.push_back({"positions", CallOptions(Mask::causal()).positions(at::arange(70) + 1000)});
    all.push_back({"positions of each sample",
                   CallOptions().positions(at::stack({at::arange(70), at::arange(70) * 2}))});
  }
  return all;
}

TEST(ModuleOptionsTest, EveryOptionAgreesWithLoopsInDouble) {
  Random random(31);
  const auto x = random.normal({2, 70, 48});
  for (const auto& [name, options] : settings()) {
    auto module = make(options);
    for (const auto& [what, call] :
         calls(options.rotary().has_value() || options.temperature_tuning().has_value())) {
      SCOPED_TRACE(name + ", " + what);
      const auto expected = test::oracle_module(module, x, x, x, call);
      const auto recorded = module->attend(x, call);
      EXPECT_TRUE(recorded.output.requires_grad());
      EXPECT_TRUE(is_close(recorded.output, expected.output, 5e-6));
      EXPECT_TRUE(is_close(recorded.weights, expected.weights, 5e-6));
      torch::NoGradGuard no_grad;
      const auto [output, weights] = module->attend(x, call);
      EXPECT_TRUE(is_close(output, expected.output, 5e-6));
      EXPECT_TRUE(is_close(weights, expected.weights, 5e-6));
      const auto [traced, map] = module->trace(x, {}, {}, call);
      EXPECT_TRUE(is_close(traced, expected.output, 5e-6));
      EXPECT_TRUE(is_close(map.dense(), expected.weights, 5e-6));
    }
  }
}

TEST(ModuleOptionsTest, CrossAttentionAlignsTheLastQueryWithTheLastKeyByDefault) {
  Random random(32);
  const auto x = random.normal({2, 9, 48}), y = random.normal({2, 20, 48});
  auto module = make(base().rotary(RotaryOptions()));
  for (const auto& [q, k] : {std::pair{x, y}, std::pair{y, x}}) {
    EXPECT_TRUE(is_close(module->attend(q, k, k, {}).output,
                         test::oracle_module(module, q, k, k, CallOptions()).output, 5e-6));
  }
  // The last tokens of a sequence see what they see in the whole of it.
  const auto whole = module->attend(y, CallOptions(Mask::causal())).output;
  const auto last = module->attend(y.slice(1, 15), y, y, CallOptions(Mask::causal())).output;
  EXPECT_TRUE(is_close(last, whole.slice(1, 15), 5e-6));
  const auto given = CallOptions().positions(at::arange(9) * 3).key_positions(at::arange(20));
  EXPECT_TRUE(is_close(module->attend(x, y, y, given).output,
                       test::oracle_module(module, x, y, y, given).output, 5e-6));
}

TEST(ModuleOptionsTest, LongropeGoesByTheLongestPositionOfTheCall) {
  Random random(39);
  const auto x = random.normal({2, 5, 48}), y = random.normal({2, 12, 48});
  const LongRopeScaling scaling({1, 1.1, 1.4, 2}, {2, 3, 5, 8}, 12);
  auto module = make(base().rotary(RotaryOptions().scaling(scaling)));
  const auto expect = [&](const at::Tensor& q, const at::Tensor& k, const CallOptions& call) {
    const auto expected = test::oracle_module(module, q, k, k, call).output;
    EXPECT_TRUE(is_close(module->attend(q, k, k, call).output, expected, 5e-6));
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(is_close(module->attend(q, k, k, call).output, expected, 5e-6));
    module->to(at::kDouble);
    EXPECT_TRUE(is_close(
        module->attend(q.to(at::kDouble), k.to(at::kDouble), k.to(at::kDouble), call).output,
        expected, 5e-6));
    module->to(at::kFloat);
  };
  const auto with = [](const at::Tensor& queries, const at::Tensor& keys) {
    return CallOptions().positions(queries).key_positions(keys);
  };
  expect(x, y, with(at::arange(5), at::arange(12)));      // short
  expect(x, y, with(at::arange(5), at::arange(12) + 1));  // long by the keys
  expect(x, y, with(at::arange(5) + 20, at::arange(12)));
  // A memory of 13 tokens was rotated by the long factors.
  const auto z = random.normal({2, 13, 48});
  const torch::NoGradGuard no_grad;
  const auto memory = CallOptions().memory(module->project_keys(z)).positions(at::arange(5));
  EXPECT_TRUE(is_close(module->attend(x, memory).output,
                       module->attend(x, z, z, with(at::arange(5), at::arange(13))).output,
                       5e-6));
  const auto alone = [&](const CallOptions& call) { return module->attend(x, call).output; };
  EXPECT_FALSE(is_close(alone(CallOptions().positions(at::arange(5) + 7)),
                        alone(CallOptions().positions(at::arange(5) + 8)), 1e-3));
}

TEST(ModuleOptionsTest, AMemoryServesEveryOption) {
  Random random(43);
  const auto x = random.normal({2, 3, 48}), y = random.normal({2, 9, 48});
  const torch::NoGradGuard no_grad;
  for (const auto& [name, options] : settings()) {
    SCOPED_TRACE(name);
    auto module = make(options);
    const auto memory = module->project_keys(y);
    const auto expected = module->attend(x, y, y, {}).output;
    EXPECT_TRUE(
        is_close(module->attend(x, CallOptions().memory(memory)).output, expected, 5e-6));
  }
}

TEST(ModuleOptionsTest, StepsOverACacheGiveWhatTheWholeSequenceGives) {
  Random random(42);
  const auto x = random.normal({2, 20, 48}), y = random.normal({2, 25, 48});
  torch::NoGradGuard no_grad;
  for (const auto& [name, options] : settings()) {
    SCOPED_TRACE(name);
    auto module = make(options);
    const auto whole = module->attend(x, CallOptions(Mask::causal())).output;
    KVCache cache;
    std::vector<at::Tensor> parts;
    for (const auto& chunk : x.split_with_sizes({7, 1, 1, 8, 3}, 1)) {
      parts.push_back(module->attend(chunk, CallOptions(Mask::causal()).cache(cache)).output);
    }
    EXPECT_TRUE(is_close(at::cat(parts, 1), whole, 5e-6));
    // Samples of 4 and 7 tokens, which go on at positions of their own.
    KVCache ragged;
    const auto lengths = at::tensor({4, 7}, at::kLong);
    module->attend(x.slice(1, 0, 7),
                   CallOptions(Mask::causal()).cache(ragged).new_lengths(lengths));
    const auto next = at::stack({x[0].slice(0, 4, 5), x[1].slice(0, 7, 8)});
    const auto step = module->attend(next, CallOptions(Mask::causal()).cache(ragged)).output;
    EXPECT_TRUE(is_close(step[0][0], whole[0][4], 5e-6));
    EXPECT_TRUE(is_close(step[1][0], whole[1][7], 5e-6));
    // Keys projected once have the positions that they have in a call, of more queries or
    // fewer.
    for (const auto& [few, many] : {std::pair{x, y}, std::pair{y, x}}) {
      const auto memory = module->project_keys(many);
      EXPECT_TRUE(is_close(module->attend(few, CallOptions().memory(memory)).output,
                           module->attend(few, many, many, {}).output, 5e-6));
    }
  }
}

TEST(ModuleOptionsTest, BatchFirstAndUnbatchedInputsGiveTheSame) {
  Random random(33);
  const auto x = random.normal({2, 7, 48});
  for (const auto& [name, options] : settings()) {
    SCOPED_TRACE(name);
    auto module = make(options);
    const auto output = module(x).output;
    EXPECT_TRUE(is_close(module(x[1]).output, output[1], 5e-6));
    module->options.batch_first(false);
    EXPECT_TRUE(is_close(module(x.transpose(0, 1)).output, output.transpose(0, 1), 5e-6));
  }
}

TEST(ModuleOptionsTest, GradientsInFloat32AreThoseOfFloat64AndThoseOfDifferences) {
  Random random(34);
  const auto data = random.normal({2, 7, 48}), upstream = random.normal({2, 7, 48});
  const auto factors = at::linspace(0.2, 2, 6);
  for (const auto& [name, options] : settings()) {
    SCOPED_TRACE(name);
    const auto gradients = [&, &options = options](at::ScalarType dtype) {
      auto module = make(options);
      module->to(dtype);
      const auto x = leaf(data.to(dtype)), head_mask = leaf(factors.to(dtype));
      const auto call = CallOptions(Mask::causal()).head_mask(head_mask);
      const auto loss = (module->attend(x, call).output * upstream.to(dtype)).sum();
      std::vector<at::Tensor> inputs{x, head_mask};
      for (const auto& parameter : module->parameters()) inputs.push_back(parameter);
      return torch::autograd::grad({loss}, inputs);
    };
    const auto narrow = gradients(at::kFloat), wide = gradients(at::kDouble);
    for (size_t i = 0; i < wide.size(); ++i) {
      EXPECT_TRUE(is_close(narrow[i], wide[i], 2e-5)) << i;
    }
    // Along one random direction of the input and of every parameter.
    auto module = make(options);
    module->to(at::kDouble);
    const auto loss_at = [&](double step) {
      torch::NoGradGuard no_grad;
      const auto copy = std::dynamic_pointer_cast<MultiHeadAttentionImpl>(module->clone());
      Random direction(35);
      const auto x = data.to(at::kDouble) + step * direction.normal({2, 7, 48}, at::kDouble);
      const auto head_mask =
          factors.to(at::kDouble) + step * direction.normal({6}, at::kDouble);
      for (auto& parameter : copy->parameters()) {
        parameter.add_(step * direction.normal(parameter.sizes(), at::kDouble));
      }
      const auto call = CallOptions(Mask::causal()).head_mask(head_mask);
      return (copy->attend(x, call).output * upstream).sum().item<double>();
    };
    Random direction(35);
    double slope = 0;
    for (const auto& gradient : wide) {
      slope +=
          (gradient * direction.normal(gradient.sizes(), at::kDouble)).sum().item<double>();
    }
    EXPECT_NEAR((loss_at(1e-5) - loss_at(-1e-5)) / 2e-5, slope, 1e-5 * std::abs(slope) + 1e-5);
  }
}

TEST(ModuleOptionsTest, GradientsOfGradientsInFloat32AreThoseOfFloat64) {
  Random random(36);
  const auto data = random.normal({1, 5, 48});
  for (const auto& [name, options] : settings()) {
    SCOPED_TRACE(name);
    const auto second = [&, &options = options](at::ScalarType dtype) {
      auto module = make(options);
      module->to(dtype);
      const auto x = leaf(data.to(dtype));
      const auto loss = module(x).output.square().sum();
      const auto first = torch::autograd::grad({loss}, {x}, {}, true, true)[0];
      return torch::autograd::grad({first.square().sum()}, {x})[0];
    };
    const auto wide = second(at::kDouble);
    const double size = wide.abs().max().item<double>();
    EXPECT_TRUE(is_close(second(at::kFloat), wide, 1e-5 * size));
  }
}

TEST(ModuleOptionsTest, HalfTypesAreWithinTheirRoundings) {
  Random random(37);
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto x = random.normal({2, 20, 48}, dtype);
    for (const auto& [name, options] : settings()) {
      SCOPED_TRACE(name);
      auto module = make(options);
      module->to(dtype);
      const auto expected = test::oracle_module(module, x, x, x, CallOptions()).output;
      // Rounded at most six times on the way, of numbers up to 2.
      const double tolerance = 12 * test::unit_roundoff(dtype);
      EXPECT_TRUE(is_close(module(x).output, expected, tolerance));
      torch::NoGradGuard no_grad;
      EXPECT_EQ(module(x).output.scalar_type(), dtype);
      EXPECT_TRUE(is_close(module(x).output, expected, tolerance));
    }
  }
}

TEST(ModuleOptionsTest, WhatLiesBehindAMaskReachesNoGradient) {
  Random random(38);
  const auto clean = random.normal({2, 6, 48});
  auto dirty = clean.clone();
  dirty[1].slice(0, 4).fill_(nan);
  auto zeros = clean.clone();
  zeros[1].slice(0, 4).fill_(0);
  auto seen = at::ones({2, 6, 6});
  seen[1].slice(0, 4).fill_(0);  // the padded tokens see nothing either
  const auto mask = Mask::lengths(at::tensor({6, 4})) & Mask::keep(seen);
  for (const auto& [name, options] : settings()) {
    SCOPED_TRACE(name);
    if (options.add_bias_kv()) continue;  // its key is open to the padded queries
    const auto gradients = [&, &options = options](const at::Tensor& x) {
      auto module = make(options);
      const at::Tensor output = module->attend(x, CallOptions(mask)).output;
      auto all = torch::autograd::grad({output.sum()}, module->parameters());
      all.push_back(output.detach());
      return all;
    };
    const auto found = gradients(dirty), expected = gradients(zeros);
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_TRUE(is_same_but_for_blas(found[i], expected[i]));
  }
}

TEST(ModuleOptionsTest, NewParametersDrawAfterTheOthersAndGainsNothing) {
  torch::manual_seed(40);
  MultiHeadAttention plain(base());
  torch::manual_seed(40);
  MultiHeadAttention module(
      base().qk_norm(QKNorm::layer).output_gate(OutputGate::per_head).rotary(RotaryOptions()));
  const auto found = module->named_parameters();
  for (const auto& parameter : plain->named_parameters()) {
    EXPECT_TRUE(is_bit_equal(found[parameter.key()], *parameter)) << parameter.key();
  }
  EXPECT_TRUE(is_bit_equal(module->q_norm, at::ones({8})));
  EXPECT_TRUE(is_bit_equal(module->k_norm, at::ones({8})));
  EXPECT_EQ(module->W_g->weight.sizes(), at::IntArrayRef({6, 48}));
  EXPECT_EQ(
      MultiHeadAttention(base().output_gate(OutputGate::elementwise))->W_g->weight.sizes(),
      at::IntArrayRef({48, 48}));
}

TEST(ModuleOptionsTest, ClonesAndTorchsFilesCarryTheNewParameters) {
  Random random(41);
  const auto x = random.normal({2, 7, 48});
  for (const auto& [name, options] : settings()) {
    SCOPED_TRACE(name);
    auto module = make(options);
    if (module->q_norm.defined()) module->q_norm.set_requires_grad(false);
    const auto copy = std::dynamic_pointer_cast<MultiHeadAttentionImpl>(module->clone());
    EXPECT_TRUE(is_same_result(copy->forward(x).output, module(x).output));
    for (const auto& parameter : copy->named_parameters()) {
      EXPECT_EQ(parameter->requires_grad(), parameter.key() != "q_norm") << parameter.key();
    }
    std::stringstream file;
    torch::save(module, file);
    MultiHeadAttention loaded(options);
    torch::load(loaded, file);
    EXPECT_TRUE(is_same_result(loaded(x).output, module(x).output));
  }
}

TEST(ModuleOptionsTest, PrettyPrintShowsThem) {
  const auto text = [](const MultiHeadAttentionOptions& with) {
    MultiHeadAttention module(with);
    return (std::ostringstream() << *module).str();
  };
  for (const char* part : {"rotary=none", "qk_norm=none", "output_gate=none"}) {
    EXPECT_TRUE(test::has_word(text(base()), part)) << part;
  }
  const auto all = text(base()
                            .rotary(RotaryOptions().base(500000))
                            .qk_norm(QKNorm::rms)
                            .qk_norm_eps(1e-5)
                            .output_gate(OutputGate::elementwise));
  for (const char* part :
       {"rotary=(base=500000, pairing=half_split, scaling=none)", "qk_norm=rms",
        "qk_norm_eps=1e-05", "qk_norm_scope=head", "qk_norm_gain=elementwise",
        "qk_norm_order=before_rotary", "output_gate=elementwise"}) {
    EXPECT_NE(all.find(part), std::string::npos) << part << " in " << all;
  }
}

TEST(ModuleOptionsTest, PrettyPrintShowsWhatIsNotUsual) {
  const auto options = base().v_head_dim(12).value_scale(0.5).temperature_tuning(
      TemperatureTuning(0.1, 8192).offset(1));
  const std::string text = (std::ostringstream() << *MultiHeadAttention(options)).str();
  for (const char* part : {"v_head_dim=12", "value_scale=0.5",
                           "temperature_tuning=(scale=0.1, floor_scale=8192, offset=1)"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
}

TEST(ModuleOptionsTest, WrongOptionsAndArgumentsAreNamed) {
  const auto making = [](const MultiHeadAttentionOptions& options) {
    return [options] { MultiHeadAttention module(options); };
  };
  EXPECT_TRUE(refuses(making(MultiHeadAttentionOptions(6, 2).rotary(RotaryOptions())),
                      {"rotary_dim", "3"}));
  EXPECT_TRUE(refuses(making(base().rotary(RotaryOptions().base(-1))), {"base", "1"}));
  EXPECT_TRUE(refuses(making(base().qk_norm_eps(0)), {"qk_norm_eps", "0"}));
  EXPECT_TRUE(refuses(making(base().qk_norm(QKNorm::rms).qk_norm_bias(true)),
                      {"qk_norm_bias", "layer", "rms"}));
  EXPECT_TRUE(refuses(
      making(base().qk_norm(QKNorm::layer).qk_norm_bias(true).qk_norm_gain(QKNormGain::none)),
      {"qk_norm_bias", "gain", "none"}));
  EXPECT_TRUE(refuses(making(base()
                                 .qk_norm(QKNorm::rms)
                                 .qk_norm_scope(QKNormScope::all_heads)
                                 .qk_norm_gain(QKNormGain::per_head)),
                      {"qk_norm_gain", "all_heads", "per_head"}));
  EXPECT_TRUE(refuses(making(base().v_head_dim(0)), {"v_head_dim", "0"}));
  EXPECT_TRUE(refuses(making(base().value_scale(std::nan(""))), {"value_scale", "nan"}));
  EXPECT_TRUE(refuses(making(base().temperature_tuning(TemperatureTuning(0.1, 0))),
                      {"floor_scale", "0"}));
  EXPECT_TRUE(refuses(making(base().temperature_tuning(TemperatureTuning(INFINITY, 2))),
                      {"scale", "inf"}));
  EXPECT_TRUE(refuses(making(base().temperature_tuning(TemperatureTuning(0.1, 2).offset(-1))),
                      {"offset", "-1"}));

  const auto x = at::ones({2, 3, 48}), y = at::ones({2, 4, 48});
  auto plain = make(base()), rotary = make(base().rotary(RotaryOptions()));
  const auto p = at::arange(3);
  const auto calling = [&](MultiHeadAttention module, const CallOptions& call) {
    return [module, call, x]() mutable { module->attend(x, call); };
  };
  const auto crossing = [&](const CallOptions& call) {
    return [&rotary, call, x, y] { rotary->attend(x, y, y, call); };
  };
  EXPECT_TRUE(refuses(calling(plain, CallOptions().positions(p)), {"positions", "rotary"}));
  EXPECT_TRUE(refuses(calling(plain, CallOptions().key_positions(p)), {"key_positions"}));
  EXPECT_TRUE(refuses(calling(rotary, CallOptions().positions(at::arange(4))),
                      {"positions", "3", "[4]"}));
  EXPECT_TRUE(
      refuses(calling(rotary, CallOptions().positions(at::ones({3}))), {"positions", "Float"}));
  EXPECT_TRUE(refuses(calling(rotary, CallOptions().positions(p).key_positions(p)),
                      {"key_positions", "self-attention"}));
  EXPECT_TRUE(
      refuses(crossing(CallOptions().positions(p)), {"key_positions", "only", "positions"}));
  EXPECT_TRUE(refuses(crossing(CallOptions().positions(p).key_positions(p)),
                      {"key_positions", "4", "[3]"}));
  EXPECT_TRUE(refuses(calling(plain, CallOptions().head_mask(at::ones({5}))),
                      {"head_mask", "6", "[5]"}));
  EXPECT_TRUE(refuses(calling(plain, CallOptions().head_mask(at::ones({3, 6}))),
                      {"head_mask", "2", "[3, 6]"}));
  EXPECT_TRUE(refuses(calling(plain, CallOptions().head_mask(at::ones({6}, at::kLong))),
                      {"head_mask", "Long"}));
}

}  // namespace
}  // namespace mha
