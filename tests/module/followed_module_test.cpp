// Guards that the module, with frozen parameters too, is followed by traces and by forward-mode
// derivatives of its inputs and parameters, whatever its options; and that a cache, which
// neither can see, refuses both. Tolerances as in followed_attention_test.cpp.
#include <mha/kv_cache.h>
#include <mha/multi_head_attention.h>

#include <string>
#include <vector>

#include "support/expect.h"
#include "support/followed_call.h"
#include "support/random_configuration.h"

namespace mha {
namespace {

using test::central_differences;
using test::Followed;
using test::forward_mode;
using test::is_close;
using test::refuses;
using test::replay;

constexpr int64_t N = 2, L = 7, E = 24;

struct FollowedModule {
  std::string name;
  MultiHeadAttentionOptions options;
  CallOptions call;
};

std::vector<FollowedModule> followed_modules() {
  const auto base = [] { return MultiHeadAttentionOptions(E, 4); };
  return {
      {"plain", base(), {}},
      {"without weights", base().weights(Weights::none), CallOptions(Mask::causal())},
      {"rotary", base().rotary(RotaryOptions()).num_kv_heads(2), CallOptions(Mask::causal())},
      {"rms norm and sinks", base().qk_norm(QKNorm::rms).sinks(true), {}},
      {"layer norm with biases, soft cap",
       base().qk_norm(QKNorm::layer).qk_norm_bias(true).softcap(3),
       {}},
      {"norms over all heads, after a rotation",
       base()
           .rotary(RotaryOptions())
           .qk_norm(QKNorm::rms)
           .qk_norm_scope(QKNormScope::all_heads)
           .qk_norm_order(QKNormOrder::after_rotary),
       {}},
      {"gains per head, larger value heads",
       base().qk_norm(QKNorm::layer).qk_norm_gain(QKNormGain::per_head).v_head_dim(9),
       {}},
      {"longrope, temperature tuning, scaled values",
       base()
           .rotary(RotaryOptions().scaling(LongRopeScaling({1, 1, 2}, {2, 3, 4}, 4)))
           .temperature_tuning(TemperatureTuning(0.5, 2))
           .value_scale(0.5),
       CallOptions(Mask::causal())},
      {"gate per head", base().output_gate(OutputGate::per_head),
       CallOptions(Mask::lengths(torch::tensor({3, 7})))},
      {"gate of elements, averaged weights",
       base().output_gate(OutputGate::elementwise).weights(Weights::averaged),
       {}},
      {"appended keys", base().add_bias_kv(true).add_zero_attn(true),
       CallOptions(Mask::keep_keys(torch::tensor({1, 1, 0, 1, 1, 0, 1})))},
      {"sequence first", base().batch_first(false).bias(false), {}},
      {"head mask", base(), CallOptions().head_mask(torch::tensor({1.0, 0.0, 0.5, 1.0}))}};
}

MultiHeadAttention make_module(const FollowedModule& c, at::ScalarType dtype) {
  MultiHeadAttention module(c.options);
  test::randomise_parameters(*module, 71);
  module->to(dtype);
  module->eval();
  for (auto& parameter : module->parameters()) parameter.requires_grad_(false);
  return module;
}

Followed call_of(MultiHeadAttention module, const CallOptions& options) {
  return [=](const std::vector<at::Tensor>& in) mutable {
    const auto [output, weights] = module->attend(in[0], {}, {}, options);
    return weights.defined() ? std::vector<at::Tensor>{output, weights}
                             : std::vector<at::Tensor>{output};
  };
}

at::Tensor draw_tokens(const FollowedModule& c, int64_t seed, at::ScalarType dtype) {
  torch::manual_seed(seed);
  const auto tokens = at::randn({N, L, E}, at::kDouble).to(dtype);
  return c.options.batch_first() ? tokens : tokens.transpose(0, 1);
}

TEST(TracedModuleTest, WithFrozenParametersTheGraphGivesTheModulesAnswersOnOtherInputs) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const double tolerance = dtype == at::kBFloat16 ? 0.1 : dtype == at::kHalf ? 2e-2 : 1e-4;
    for (const auto& c : followed_modules()) {
      for (const bool records : {false, true}) {
        const at::AutoGradMode mode(records);
        SCOPED_TRACE(::testing::Message() << c.name << " " << dtype << " records " << records);
        const auto call = call_of(make_module(c, dtype), c.call);
        const auto others = draw_tokens(c, 73, dtype);
        const auto expected = call({others});
        const auto actual = replay(call, {draw_tokens(c, 72, dtype)}, {others});
        ASSERT_EQ(actual.size(), expected.size());
        for (size_t i = 0; i < actual.size(); ++i) {
          EXPECT_TRUE(is_close(actual[i], expected[i], tolerance)) << i;
        }
      }
    }
  }
}

TEST(TracedModuleTest, TheMapOfATraceIsPartOfTheGraph) {
  const auto c = followed_modules()[2];
  auto module = make_module(c, at::kFloat);
  const Followed call = [&](const std::vector<at::Tensor>& in) {
    const auto traced = module->trace(in[0], {}, {}, c.call);
    return std::vector<at::Tensor>{traced.output, traced.map.entropy(), traced.map.received()};
  };
  const auto others = draw_tokens(c, 73, at::kFloat);
  const auto expected = call({others});
  const auto actual = replay(call, {draw_tokens(c, 72, at::kFloat)}, {others});
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_TRUE(is_close(actual[i], expected[i], 1e-4));
}

TEST(TracedModuleTest, AMemoryOfSamplesOfDifferentLengthsIsAConstantOfTheTrace) {
  const FollowedModule c{"memory", MultiHeadAttentionOptions(E, 4).rotary(RotaryOptions()), {}};
  auto module = make_module(c, at::kFloat);
  const at::NoGradGuard no_grad;
  KVCache memory;
  module->attend(draw_tokens(c, 78, at::kFloat), {}, {},
                 CallOptions().cache(memory).new_lengths(torch::tensor({L, int64_t{3}})));
  const auto call = call_of(module, CallOptions(Mask::causal()).memory(memory));
  const auto others = draw_tokens(c, 73, at::kFloat);
  const auto expected = call({others});
  const auto actual = replay(call, {draw_tokens(c, 72, at::kFloat)}, {others});
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(is_close(actual[i], expected[i], 1e-4)) << i;
  }
}

TEST(ForwardModeModuleTest, TangentsOfInputsAreThoseOfCentralDifferences) {
  for (const auto& c : followed_modules()) {
    const auto x = draw_tokens(c, 74, at::kDouble), along = draw_tokens(c, 75, at::kDouble);
    const auto expected =
        central_differences(call_of(make_module(c, at::kDouble), c.call), {x}, {along});
    for (const bool asks : {false, true}) {
      SCOPED_TRACE(c.name + (asks ? ", asks for gradients" : ""));
      const auto input = x.to(at::kFloat).requires_grad_(asks);
      const auto actual = forward_mode(call_of(make_module(c, at::kFloat), c.call), {input},
                                       {along.to(at::kFloat)});
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_TRUE(actual[i].defined());
        EXPECT_TRUE(is_close(actual[i], expected[i], 1e-4)) << i;
      }
    }
  }
}

TEST(ForwardModeModuleTest, TangentsOfEveryParameterAreThoseOfCentralDifferences) {
  for (const auto& c : followed_modules()) {
    auto module = make_module(c, at::kFloat), exact = make_module(c, at::kDouble);
    const auto x = draw_tokens(c, 76, at::kDouble);
    const auto names = module->named_parameters();
    for (const auto& item : names) {
      SCOPED_TRACE(c.name + ", " + item.key());
      auto wide = exact->named_parameters()[item.key()];
      const auto start = wide.clone(), along = at::randn_like(wide);
      const Followed at_value = [&](const std::vector<at::Tensor>& in) {
        wide.copy_(in[0]);
        return std::vector<at::Tensor>{exact->attend(x, {}, {}, c.call).output};
      };
      const auto expected = central_differences(at_value, {start}, {along})[0];
      wide.copy_(start);

      const auto level = torch::autograd::forward_ad::enter_dual_level();
      item.value()._set_fw_grad(along.to(at::kFloat), level, /*is_inplace_op=*/false);
      const auto output = module->attend(x.to(at::kFloat), {}, {}, c.call).output;
      const auto tangent = output._fw_grad(level).clone();
      torch::autograd::forward_ad::exit_dual_level(level);
      EXPECT_TRUE(is_close(tangent, expected, 2e-4));
    }
  }
}

TEST(FollowedCacheTest, ACacheRefusesTracesAndTangentsAndStaysAsItWas) {
  const FollowedModule c{"cached", MultiHeadAttentionOptions(E, 4), {}};
  auto module = make_module(c, at::kFloat);
  const at::NoGradGuard no_grad;
  const auto x = draw_tokens(c, 77, at::kFloat);
  KVCache cache;
  module->attend(x, {}, {}, CallOptions().cache(cache));
  const Followed call = [&](const std::vector<at::Tensor>& in) {
    return std::vector<at::Tensor>{
        module->attend(in[0], {}, {}, CallOptions().cache(cache)).output};
  };
  const Followed append = [&](const std::vector<at::Tensor>& in) {
    const auto heads = in[0].view({N, L, 4, E / 4}).transpose(1, 2);
    return std::vector<at::Tensor>{cache.append(heads, heads).key};
  };
  for (const auto& each : {call, append}) {
    EXPECT_TRUE(refuses([&] { replay(each, {x}, {x}); }, {"KVCache", "traces"}));
    EXPECT_TRUE(refuses([&] { forward_mode(each, {x}, {x}); }, {"KVCache", "forward-mode"}));
  }
  EXPECT_TRUE(at::equal(cache.lengths(), torch::tensor({L, L})));
}

}  // namespace
}  // namespace mha
