// Guards what random settings of the attention core have in common beside their numbers, on
// every instruction set: large finite numbers behind any mask change no bit; without queries or
// keys every result is computed; half types without gradients are within their roundings; and
// masks and inputs that share memory (stride 0) are read as their copies are.
#include <mha/cpu_isa.h>

#include <vector>

#include "attention/fused_attention.h"
#include "mask/dense_mask.h"
#include "support/attention_setting.h"
#include "support/every_isa_test.h"
#include "support/expect.h"

namespace mha::detail {
namespace {

using test::is_bit_equal;
using test::is_close;
using test::is_finite;

struct SweepInputs {
  at::Tensor query, key, value, grad_output;
};

SweepInputs draw_sweep_inputs(const AttentionSetting& s, int64_t seed) {
  torch::manual_seed(seed);
  const int64_t keys = s.keys + s.extra;
  return {torch::randn({s.batch, s.queries, s.heads, s.head_dim}).transpose(1, 2),
          torch::randn({s.batch, s.kv_heads, keys, s.head_dim}),
          torch::randn({s.batch, s.kv_heads, keys, s.value_dim}),
          torch::randn({s.batch, s.heads, s.queries, s.value_dim})};
}

// Output, weights if wanted, and gradients.
std::vector<at::Tensor> attend(const AttentionSetting& s, const SweepInputs& in) {
  std::vector<at::Tensor> leaves{test::leaf(in.query), test::leaf(in.key),
                                 test::leaf(in.value)};
  auto mask = resolved_mask(s);
  for (auto* list : added_lists(mask)) {
    for (auto& term : *list) leaves.push_back(term = test::leaf(term));
  }
  const auto [output, weights, statistics] =
      fused_attention(leaves[0], leaves[1], leaves[2], mask, s.call);
  auto results = torch::autograd::grad({output}, leaves, {in.grad_output});
  results.push_back(output.detach());
  if (weights.defined()) results.push_back(weights.detach());
  const at::NoGradGuard no_grad;
  results.push_back(
      fused_attention(leaves[0].detach(), leaves[1].detach(), leaves[2].detach(), mask, s.call)
          .output);
  return results;
}

at::Tensor in_rows(const at::Tensor& tensor, const at::Tensor& rows, double number) {
  auto signs = at::ones({tensor.size(3)});
  signs.slice(0, 0, tensor.size(3), 2).fill_(-1);
  return at::where(rows.unsqueeze(-1), signs * number, tensor);
}

class AttentionSweepTest : public test::EveryIsaTest {};

TEST_F(AttentionSweepTest, LargeFiniteNumbersBehindAnyMaskChangeNoBit) {
  for (int64_t seed = 0; seed < 150; ++seed) {
    const auto s = draw_setting(seed);
    const auto inputs = draw_sweep_inputs(s, seed);
    const auto mask = resolved_mask(s);
    auto allowed = allowed_pairs(mask, at::kCPU);
    if (!allowed.defined()) continue;
    allowed = allowed.expand({s.batch, s.heads, s.queries, s.keys + s.extra});
    const auto unseen = allowed.any(2)
                            .view({s.batch, s.kv_heads, s.heads / s.kv_heads, -1})
                            .any(2)
                            .logical_not();
    const auto dead = allowed.any(3).logical_not();
    const auto with = [&](double number) {
      return SweepInputs{
          in_rows(inputs.query, dead, number), in_rows(inputs.key, unseen, number),
          in_rows(inputs.value, unseen, number), in_rows(inputs.grad_output, dead, number)};
    };
    const auto isas = available_cpu_isas();
    set_cpu_isa(isas[static_cast<size_t>(seed) % isas.size()]);
    const auto expected = attend(s, with(0)), actual = attend(s, with(seed % 2 ? 3e38 : 1e30));
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_TRUE(is_bit_equal(actual[i], expected[i]))
          << "result " << i << "; seed " << seed << "; " << s;
    }
  }
}

TEST_F(AttentionSweepTest, WithoutQueriesOrKeysEveryResultIsComputed) {
  for (int64_t seed = 0; seed < 60; ++seed) {
    auto s = draw_setting(seed);
    s.mask = seed % 2 ? Mask::causal() : Mask();
    s.extra = seed % 3;
    (seed % 4 < 3 ? s.keys : s.queries) = 0;
    const auto isas = available_cpu_isas();
    set_cpu_isa(isas[static_cast<size_t>(seed / 6) % isas.size()]);
    const auto inputs = draw_sweep_inputs(s, seed);
    for (const auto weights : {Weights::none, Weights::averaged, Weights::per_head}) {
      s.call.weights = weights;
      for (const auto& result : attend(s, inputs)) {
        ASSERT_TRUE(is_finite(result)) << "seed " << seed << "; " << s;
      }
      const auto mask = resolved_mask(s);
      const auto plain = plain_attention(inputs.query, inputs.key, inputs.value, mask, s.call);
      const auto fused = fused_attention(inputs.query, inputs.key, inputs.value, mask, s.call);
      ASSERT_TRUE(is_close(fused.output, plain.output, 1e-5)) << "seed " << seed << "; " << s;
      if (weights == Weights::none) continue;
      ASSERT_TRUE(is_close(fused.weights, plain.weights, 1e-6)) << "seed " << seed << "; " << s;
    }
  }
}

// Rounded on the way in, of which both take the rounded numbers, and on the way out; bfloat16
// also rounds weights. Scores are of unit scale; values up to 5.
TEST_F(AttentionSweepTest, HalfTypesWithoutGradientsAreWithinTheirRoundings) {
  const at::NoGradGuard no_grad;
  for (int64_t seed = 0; seed < 150; ++seed) {
    const auto s = draw_setting(seed);
    const auto inputs = draw_sweep_inputs(s, seed);
    const auto dtype = seed % 2 ? at::kHalf : at::kBFloat16;
    const auto q = inputs.query.to(dtype), k = inputs.key.to(dtype), v = inputs.value.to(dtype);
    const auto mask = resolved_mask(s);
    const auto wide = [](const at::Tensor& t) { return t.to(at::kDouble); };
    const auto exact = plain_attention(wide(q), wide(k), wide(v), mask, s.call);
    const auto isas = available_cpu_isas();
    set_cpu_isa(isas[static_cast<size_t>(seed / 2) % isas.size()]);
    const auto actual = fused_attention(q, k, v, mask, s.call);
    const double tolerance = 16 * test::unit_roundoff(dtype);
    ASSERT_EQ(actual.output.scalar_type(), dtype);
    ASSERT_TRUE(is_close(actual.output, exact.output, tolerance))
        << "seed " << seed << "; " << s;
    if (!exact.weights.defined()) continue;
    ASSERT_EQ(actual.weights.scalar_type(), dtype);
    ASSERT_TRUE(is_close(actual.weights, exact.weights, tolerance))
        << "seed " << seed << "; " << s;
  }
}

TEST_F(AttentionSweepTest, InputsAndMasksThatShareMemoryAreReadAsTheirCopies) {
  for (int64_t seed = 0; seed < 100; ++seed) {
    auto s = draw_setting(seed);
    auto shared = draw_sweep_inputs(s, seed);
    // One key of each head for all tokens, one query for all heads, one term for all queries.
    shared.key = shared.key.narrow(2, 0, 1).expand_as(shared.key);
    shared.query = shared.query.narrow(1, 0, 1).expand_as(shared.query);
    torch::manual_seed(seed);
    const auto row = at::randn({1, 1, 1, s.keys});
    const std::vector<int64_t> sizes{s.batch, s.heads, s.queries, s.keys};
    auto copies = shared;
    copies.key = shared.key.contiguous();
    copies.query = shared.query.contiguous();
    const auto isas = available_cpu_isas();
    set_cpu_isa(isas[static_cast<size_t>(seed) % isas.size()]);
    const auto given = s.mask;
    s.mask =
        given & Mask::keep(row.gt(-1).expand(sizes)) & Mask::block(row.gt(2).expand(sizes));
    const auto actual = attend(s, shared);
    s.mask = given & Mask::keep(row.gt(-1).expand(sizes).contiguous()) &
             Mask::block(row.gt(2).expand(sizes).contiguous());
    const auto expected = attend(s, copies);
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_TRUE(is_bit_equal(actual[i], expected[i]))
          << "result " << i << "; seed " << seed << "; " << s;
    }
  }
}

}  // namespace
}  // namespace mha::detail
