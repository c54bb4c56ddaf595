// Guards that the options of today's models work together: grouped heads, rotary positions,
// normalised queries and keys, soft caps, sinks, gates, head masks, appended keys, every kind
// of mask, dropout, caches, half precision, no keys, frozen parameters, negated views, large
// padding. 2,000 seeded random combinations; each is compared with the same layer by the loops
// of options_oracle.h, its gradients with those of its own float64 form (which takes the plain
// path) and so its dropout, its cached form with the one call.
//
// Tolerances: parameters and data make scores of unit scale, but ALiBi takes them to some
// hundred, where a rounding of float32 is 4e-6, which weights carry as a relative error: 3e-5
// for outputs of unit scale, and 2e-4 of the largest gradient, which sums over up to 330
// tokens. bfloat16 rounds projections, heads and output to 2^-9 of themselves: 0.06 of the
// largest output; float16 to an eighth of that.
//
// MHA_TEST_SEED=n runs one seed alone: MHA_TEST_SEED=1234 ./parity_test

#include <mha/kv_cache.h>
#include <mha/multi_head_attention.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "numerics/option_setting.h"
#include "support/options_oracle.h"
#include "support/random_configuration.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

constexpr uint64_t seeds_per_block = 100;
constexpr uint64_t blocks = 20;

AttentionOutput expected_of(const MultiHeadAttention& module, const OptionSetting& s,
                            const at::Tensor& x) {
  return oracle_module(module, x, x, x, s.call);
}

void expect_output(MultiHeadAttention& module, const OptionSetting& s, const at::Tensor& x) {
  at::NoGradGuard no_grad;
  const auto [output, weights] = expected_of(module, s, as_double(x));
  const auto result = module->attend(x, CallOptions(s.call).weights(Weights::per_head));
  EXPECT_TRUE(is_close(result.output, output, 3e-5));
  EXPECT_TRUE(is_close(result.weights, weights, 3e-5));
  const auto traced = module->trace(x, {}, {}, s.call);
  EXPECT_TRUE(is_close(traced.output, output, 3e-5)) << "traced";
  EXPECT_TRUE(is_close(traced.map.dense(), weights, 3e-5)) << "map";
}

std::vector<at::Tensor> gradients(MultiHeadAttention& module, const OptionSetting& s,
                                  const at::Tensor& x, const at::Tensor& upstream) {
  const auto leaf = x.detach().clone().requires_grad_();
  auto leaves = module->parameters();
  leaves.push_back(leaf);
  const auto output = module->attend(leaf, CallOptions(s.call).weights(Weights::none)).output;
  return torch::autograd::grad({output}, leaves, {upstream.to(output.scalar_type())});
}

void expect_gradients(MultiHeadAttention& module, MultiHeadAttention& in_double,
                      const OptionSetting& s, const at::Tensor& x, const at::Tensor& upstream) {
  const auto actual = gradients(module, s, x, upstream);
  const auto expected = gradients(in_double, s, as_double(x), upstream);
  auto names = module->named_parameters().keys();
  names.push_back("x");
  for (size_t i = 0; i < names.size(); ++i) {
    const double largest = expected[i].numel() ? expected[i].abs().max().item<double>() : 0;
    EXPECT_TRUE(is_close(actual[i], expected[i], 2e-4 * std::max(1.0, largest)))
        << "gradient of " << names[i];
  }
}

void expect_cached(MultiHeadAttention& module, const OptionSetting& s, const at::Tensor& x) {
  at::NoGradGuard no_grad;
  Random random(s.seed + 1);
  KVCacheOptions options;
  if (s.window && random.chance(0.5)) options.window(*s.window);
  KVCache cache(options);
  std::vector<at::Tensor> outputs;
  for (int64_t from = 0; from < s.length;) {
    const int64_t count = random.between(1, std::min<int64_t>(s.length - from, 7));
    const auto call = CallOptions(s.call).mask(running_mask(s)).weights(Weights::none);
    outputs.push_back(
        module->attend(x.narrow(1, from, count), CallOptions(call).cache(cache)).output);
    from += count;
  }
  const auto whole = module->attend(x, CallOptions(s.call).weights(Weights::none)).output;
  EXPECT_TRUE(is_close(at::cat(outputs, 1), whole, 3e-5))
      << "cached, window " << options.window().value_or(0);
}

// Each sample's tokens in pieces of lengths of its own, behind which NaN is padding.
void expect_ragged_cache(MultiHeadAttention& module, const OptionSetting& s,
                         const at::Tensor& x) {
  at::NoGradGuard no_grad;
  Random random(s.seed + 2);
  const auto whole = module->attend(x, CallOptions(s.call).weights(Weights::none)).output;
  const auto call =
      CallOptions(s.call).mask(running_mask(s)).weights(Weights::none).cache(KVCache());
  auto outputs = at::zeros_like(whole);
  std::vector<int64_t> done(s.batch, 0), lengths(s.batch, 0);
  while (*std::min_element(done.begin(), done.end()) < s.length) {
    const int64_t count = random.between(1, 7);
    auto chunk = at::full({s.batch, count, x.size(2)}, std::nan(""));
    for (int64_t n = 0; n < s.batch; ++n) {
      lengths[n] = random.between(0, std::min(count, s.length - done[n]));
      chunk[n].narrow(0, 0, lengths[n]).copy_(x[n].narrow(0, done[n], lengths[n]));
    }
    const auto output =
        module->attend(chunk, CallOptions(call).new_lengths(at::tensor(lengths))).output;
    for (int64_t n = 0; n < s.batch; ++n) {
      outputs[n].narrow(0, done[n], lengths[n]).copy_(output[n].narrow(0, 0, lengths[n]));
      done[n] += lengths[n];
    }
  }
  EXPECT_TRUE(is_close(outputs, whole, 3e-5)) << "ragged cache";
}

// One seed, one pattern: that of the plain path, which float64 takes.
void expect_dropout(MultiHeadAttention& module, MultiHeadAttention& in_double,
                    const OptionSetting& s, const at::Tensor& x) {
  const auto attend = [&](MultiHeadAttention& of, const at::Tensor& input) {
    of->options.dropout(0.25);
    torch::manual_seed(s.seed);
    const auto output = of->attend(input, CallOptions(s.call).weights(Weights::none)).output;
    of->options.dropout(0);
    return output;
  };
  EXPECT_TRUE(is_close(attend(module, x), attend(in_double, as_double(x)), 6e-5)) << "dropout";
}

void expect_bfloat16(MultiHeadAttention& module, const OptionSetting& s, const at::Tensor& x) {
  at::NoGradGuard no_grad;
  module->to(at::kBFloat16);
  const auto rounded = x.to(at::kBFloat16);
  const auto output = expected_of(module, s, as_double(rounded)).output;
  const auto result =
      module->attend(rounded, CallOptions(s.call).weights(Weights::none)).output;
  EXPECT_EQ(result.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(
      is_close(result, output, 0.06 * std::max(1.0, output.abs().max().item<double>())));
}

void expect_float16(MultiHeadAttention& module, const OptionSetting& s, const at::Tensor& x) {
  at::NoGradGuard no_grad;
  module->to(at::kHalf);
  const auto rounded = x.to(at::kHalf);
  const auto output = expected_of(module, s, as_double(rounded)).output;
  const auto result =
      module->attend(rounded, CallOptions(s.call).weights(Weights::averaged)).output;
  EXPECT_EQ(result.scalar_type(), at::kHalf);
  EXPECT_TRUE(
      is_close(result, output, 8e-3 * std::max(1.0, output.abs().max().item<double>())));
}

// The same numbers as the imaginary part of a conjugate, which is read with its sign turned.
at::Tensor negated_view(const at::Tensor& x) {
  return at::imag(at::complex(at::zeros_like(x), -x).conj());
}

// What must not change an answer: views that are negated, parameters that are frozen, which
// weights are asked for.
void expect_same_in_other_ways(MultiHeadAttention& module, const OptionSetting& s,
                               const at::Tensor& x) {
  const auto attend = [&](const at::Tensor& input, Weights weights) {
    return module->attend(input, CallOptions(s.call).weights(weights));
  };
  AttentionOutput expected;
  {
    const at::NoGradGuard no_grad;
    expected = attend(x, Weights::per_head);
    const auto averaged = attend(x, Weights::averaged);
    EXPECT_TRUE(is_close(averaged.output, expected.output, 3e-5)) << "averaged";
    EXPECT_TRUE(is_close(averaged.weights, expected.weights.mean(1), 3e-5)) << "averaged";
    EXPECT_TRUE(is_close(attend(negated_view(x), Weights::none).output, expected.output, 3e-5))
        << "a negated view";
  }
  std::vector<bool> asked;
  for (auto& parameter : module->parameters()) {
    asked.push_back(parameter.requires_grad());
    parameter.requires_grad_(false);
  }
  const auto leaf = x.detach().clone().requires_grad_();
  EXPECT_TRUE(is_close(attend(x, Weights::none).output, expected.output, 3e-5)) << "frozen";
  EXPECT_TRUE(is_close(attend(leaf, Weights::none).output, expected.output, 3e-5)) << "frozen";
  size_t i = 0;
  for (auto& parameter : module->parameters()) parameter.requires_grad_(asked[i++]);
}

// Without keys but the module's own.
void expect_no_keys(MultiHeadAttention& module, MultiHeadAttention& in_double,
                    const OptionSetting& s, const at::Tensor& x) {
  const auto none = x.narrow(1, 0, 0);
  for (const auto weights : {Weights::none, Weights::averaged, Weights::per_head}) {
    const auto call = CallOptions().weights(weights).head_mask(s.call.head_mask());
    const auto exact = in_double->attend(as_double(x), as_double(none), as_double(none), call);
    const auto actual = module->attend(x, none, none, call);
    EXPECT_TRUE(is_close(actual.output, exact.output, 3e-5)) << "no keys, weights " << weights;
    if (weights == Weights::none) continue;
    EXPECT_TRUE(is_close(actual.weights, exact.weights, 3e-5)) << "no keys";
  }
}

// Tokens that are padding for everybody, of numbers up to float32's largest.
void expect_padding_unseen(MultiHeadAttention& module, const OptionSetting& s,
                           const at::Tensor& x) {
  const int64_t t = s.length, real = t / 2;
  const auto call =
      CallOptions(Mask::lengths(at::full({s.batch}, real, at::kLong))).weights(Weights::none);
  const auto run = [&](double number) {
    auto memory = x.clone();
    memory.narrow(1, real, t - real).fill_(number);
    const auto output = module->attend(x, memory, memory, call).output;
    auto results =
        torch::autograd::grad({output.sum()}, {module->W_k->weight, module->W_v->weight});
    results.push_back(output.detach());
    return results;
  };
  const auto expected = run(0);
  for (const double number : {1e20, 3e38}) {
    const auto actual = run(number);
    for (size_t i = 0; i < actual.size(); ++i) {
      const double largest = std::max(1.0, expected[i].abs().max().item<double>());
      EXPECT_TRUE(is_close(actual[i], expected[i], 3e-5 * largest))
          << number << " behind the mask, result " << i;
    }
  }
}

MultiHeadAttention copy_of(const MultiHeadAttention& module) {
  return MultiHeadAttention(std::dynamic_pointer_cast<MultiHeadAttentionImpl>(module->clone()));
}

void run_seed(uint64_t seed) {
  const auto s = draw_option_setting(seed);
  SCOPED_TRACE(describe(s));
  MultiHeadAttention module(s.options);
  randomise_parameters(*module, seed);
  Random random(seed);
  const auto x = random.normal({s.batch, s.length, s.options.d_model()});
  expect_output(module, s, x);
  if (s.cacheable) expect_cached(module, s, x);
  if (s.cacheable && seed % 3 == 0) expect_ragged_cache(module, s, x);
  if (seed % 2 == 0) {
    auto in_double = copy_of(module);
    in_double->to(at::kDouble);
    expect_gradients(module, in_double, s, x, random.normal(x.sizes()));
    expect_dropout(module, in_double, s, x);
  }
  if (seed % 4 == 2) expect_same_in_other_ways(module, s, x);
  if (seed % 4 == 3) {
    auto in_double = copy_of(module);
    in_double->to(at::kDouble);
    expect_no_keys(module, in_double, s, x);
    expect_padding_unseen(module, s, x);
  }
  if (seed % 8 == 1) expect_bfloat16(module, s, x);
  if (seed % 8 == 5) expect_float16(module, s, x);
}

class OptionSweepTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(OptionSweepTest, EveryCombinationIsTheFormula) {
  const auto chosen = seed_from_environment();
  const uint64_t first = GetParam() * seeds_per_block;
  if (chosen) {
    // Seeds beyond those of every run belong to the last block.
    if (std::min(*chosen / seeds_per_block, blocks - 1) == GetParam()) run_seed(*chosen);
    return;
  }
  for (uint64_t seed = first; seed < first + seeds_per_block && !HasFailure(); ++seed) {
    run_seed(seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, OptionSweepTest, ::testing::Range(uint64_t{0}, blocks));

}  // namespace
}  // namespace mha::test
