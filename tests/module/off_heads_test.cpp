// Guards that a head which a call's head mask switches off gives nothing to gradients either,
// whatever it holds: NaN or numbers too large in its own rows of the projections and the gate,
// and in its columns of W_o. What is left is what the same module gives with zeros there.
// Tolerance: 1e-5 for sums of unit scale in two orders.
#include <mha/multi_head_attention.h>

#include <cmath>
#include <string>
#include <vector>

#include "support/expect.h"
#include "support/random_configuration.h"

namespace mha {
namespace {

using test::infinity;
using test::is_close;
using test::is_finite;
using test::leaf;
using test::nan;

constexpr int64_t N = 2, T = 6, E = 24, H = 4, D = 6;

struct OffCase {
  std::string name;
  MultiHeadAttentionOptions options;
  std::vector<int64_t> off;  // heads, with all that share their keys
};

std::vector<OffCase> off_cases() {
  const auto base = [] { return MultiHeadAttentionOptions(E, H); };
  return {{"plain", base(), {1}},
          {"grouped", base().num_kv_heads(2), {2, 3}},
          {"norms and rotary",
           base().qk_norm(QKNorm::rms).rotary(RotaryOptions()).weights(Weights::none),
           {0}},
          {"a gate per head", base().output_gate(OutputGate::per_head), {1, 3}},
          {"a gate of elements", base().output_gate(OutputGate::elementwise).bias(false), {3}},
          {"appended keys", base().add_bias_kv(true).add_zero_attn(true), {2}}};
}

// Puts `number` into what belongs to the heads alone, of one parameter.
void put(MultiHeadAttention& module, const OffCase& c, const std::string& name, double number) {
  const at::NoGradGuard no_grad;
  auto parameter = module->named_parameters()[name];
  const bool of_kv = name[2] == 'k' || name[2] == 'v';
  const int64_t heads = of_kv ? module->options.num_kv_heads().value_or(H) : H;
  for (const int64_t head : c.off) {
    const int64_t own = head / (H / heads);
    if (name == "W_o.weight") {
      parameter.narrow(1, own * D, D).fill_(number);
    } else {
      const int64_t rows = parameter.size(0) / heads;
      parameter.narrow(0, own * rows, rows).fill_(number);
    }
  }
}

at::Tensor head_mask_of(const OffCase& c) {
  auto head_mask = at::linspace(0.5, 1.5, H);
  for (const int64_t head : c.off) head_mask[head].fill_(0);
  return head_mask;
}

struct OffResults {
  at::Tensor output, input;  // the latter's gradient
  std::vector<at::Tensor> parameters;
};

OffResults run(MultiHeadAttention& module, const at::Tensor& x, const at::Tensor& head_mask) {
  const auto input = leaf(x);
  const auto output =
      module->attend(input, CallOptions(Mask::causal()).head_mask(head_mask)).output;
  std::vector<at::Tensor> inputs{input};
  for (const auto& parameter : module->parameters()) inputs.push_back(parameter);
  auto grads = torch::autograd::grad({output.sum()}, inputs, {}, {}, false, true);
  const auto of_input = grads[0];
  grads.erase(grads.begin());
  return {output.detach(), of_input, grads};
}

TEST(OffHeadsTest, AHeadThatIsOffGivesNothingToGradientsWhateverItHolds) {
  torch::manual_seed(81);
  const auto x = at::randn({N, T, E});
  for (const auto& c : off_cases()) {
    MultiHeadAttention module(c.options);
    for (const auto& item : module->named_parameters()) {
      const auto& name = item.key();
      if (name.rfind("W_", 0) != 0 || name == "W_o.bias") continue;
      for (const auto dtype : {at::kFloat, at::kDouble}) {
        const auto with = [&](double number) {
          MultiHeadAttention changed(c.options);
          test::randomise_parameters(*changed, 82);
          changed->to(dtype);
          put(changed, c, name, number);
          return run(changed, x.to(dtype), head_mask_of(c).to(dtype));
        };
        const auto expected = with(0);
        for (const double number : {nan, infinity, 3e38}) {
          SCOPED_TRACE(c.name + ", " + name + ", " + std::to_string(number) + ", " +
                       c10::toString(dtype));
          const auto actual = with(number);
          EXPECT_TRUE(is_close(actual.output, expected.output, 1e-5));
          EXPECT_TRUE(is_close(actual.input, expected.input, 1e-5));
          for (size_t i = 0; i < actual.parameters.size(); ++i) {
            EXPECT_TRUE(is_close(actual.parameters[i], expected.parameters[i], 1e-5)) << i;
          }
        }
      }
    }
  }
}

TEST(OffHeadsTest, AHeadThatIsOffInOneSampleGivesNothingToThatSamplesGradient) {
  const OffCase c{"one sample", MultiHeadAttentionOptions(E, H), {1}};
  for (const char* name : {"W_q.weight", "W_k.weight", "W_v.weight"}) {
    MultiHeadAttention module(c.options);
    test::randomise_parameters(*module, 83);
    put(module, c, name, 3e38);
    auto head_mask = at::ones({N, H});
    head_mask[0][1].fill_(0);
    torch::manual_seed(84);
    const auto result = run(module, at::randn({N, T, E}) * 10, head_mask);
    SCOPED_TRACE(name);
    EXPECT_TRUE(is_finite(result.output[0]));
    EXPECT_TRUE(is_finite(result.input[0]));
  }
}

TEST(OffHeadsTest, AHeadThatIsOffAndFiniteStillGivesGradientsThroughItsWeights) {
  MultiHeadAttention module(MultiHeadAttentionOptions(E, H));
  auto head_mask = at::ones({H});
  head_mask[1].fill_(0);
  const auto x = leaf(at::randn({N, T, E}));
  const auto weights = module->attend(x, CallOptions().head_mask(head_mask)).weights;
  const auto grad = torch::autograd::grad({weights.select(1, 1).square().sum()}, {x})[0];
  EXPECT_GT(grad.abs().max().item<double>(), 0);
}

}  // namespace
}  // namespace mha
