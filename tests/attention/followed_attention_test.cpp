// Guards that the attention core, maps and rotary positions are followed by traces and by
// forward-mode derivatives: the graph of a trace gives the answers of the call on other inputs,
// and tangents are those of central differences in float64. Tolerances: 2e-5 for float32
// results of unit scale, 1e-6 for differences in float64, 5e-3 for float16 and 4e-2 for
// bfloat16, a few of their roundings.
#include <mha/attention_map.h>
#include <mha/rotary.h>
#include <mha/scaled_dot_product_attention.h>

#include <cmath>
#include <limits>
#include <vector>

#include "support/expect.h"
#include "support/followed_call.h"

namespace mha {
namespace {

using test::central_differences;
using test::Followed;
using test::forward_mode;
using test::is_close;
using test::replay;

constexpr int64_t N = 2, H = 4, Hk = 2, L = 7, S = 9, D = 8;

struct FollowedCase {
  const char* name;
  Followed call;
};

// Of query, key, value, added terms (L, S) and sinks (H).
std::vector<FollowedCase> followed_calls() {
  const auto attend = [](const Mask& mask, const AttentionOptions& options) -> Followed {
    return [=](const std::vector<at::Tensor>& in) {
      const auto [output, weights] = mha::scaled_dot_product_attention(
          in[0], in[1], in[2], mask & Mask::add(in[3]), AttentionOptions(options).sinks(in[4]));
      return weights.defined() ? std::vector<at::Tensor>{output, weights}
                               : std::vector<at::Tensor>{output};
    };
  };
  const auto say = [](const AttentionMap& map) -> std::vector<at::Tensor> {
    const auto summary = map.summary();
    return {map.dense(),         map.mean(),
            summary.entropy,     summary.received,
            summary.distance,    map.log_sum_exp(),
            map.top_k(2).values, map.pooled(2, 3),
            map.head(1),         map.scores(ScoreStage::masked, 0, 2).clamp_min(-100)};
  };
  return {{"plain", attend({}, AttentionOptions())},
          {"causal without weights",
           attend(Mask::causal(), AttentionOptions().weights(Weights::none))},
          {"averaged, soft cap and lengths",
           attend(Mask::lengths(torch::tensor({3, 9})),
                  AttentionOptions().weights(Weights::averaged).softcap(2))},
          {"alibi and a window",
           attend(Mask::alibi(at::ones({H})) & Mask::window(3, 2), AttentionOptions())},
          {"the map of a trace",
           [say](const std::vector<at::Tensor>& in) {
             return say(mha::trace_scaled_dot_product_attention(
                            in[0], in[1], in[2], Mask::causal() & Mask::add(in[3]),
                            AttentionOptions().sinks(in[4]))
                            .map);
           }},
          {"a map", [say](const std::vector<at::Tensor>& in) {
             return say(AttentionMap(in[0], in[1], Mask::add(in[3]),
                                     AttentionOptions().sinks(in[4]).softcap(3)));
           }}};
}

std::vector<at::Tensor> draw_inputs(int64_t seed, at::ScalarType dtype) {
  torch::manual_seed(seed);
  std::vector<at::Tensor> inputs{at::randn({N, H, L, D}), at::randn({N, Hk, S, D}),
                                 at::randn({N, Hk, S, D}), at::randn({L, S}), at::randn({H})};
  for (auto& input : inputs) input = input.to(dtype);
  return inputs;
}

double tolerance_of(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 4e-2 : dtype == at::kHalf ? 5e-3 : 2e-5;
}

TEST(TracedAttentionTest, TheGraphGivesTheCallsAnswersOnOtherInputs) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const bool records : {false, true}) {
      const at::AutoGradMode mode(records);
      for (const auto& c : followed_calls()) {
        SCOPED_TRACE(::testing::Message() << c.name << " " << dtype << " records " << records);
        const auto others = draw_inputs(62, dtype);
        const auto expected = c.call(others);
        const auto actual = replay(c.call, draw_inputs(61, dtype), others);
        ASSERT_EQ(actual.size(), expected.size());
        for (size_t i = 0; i < actual.size(); ++i) {
          EXPECT_TRUE(is_close(actual[i], expected[i], 10 * tolerance_of(dtype))) << i;
        }
      }
    }
  }
}

// Numbers that are not finite are looked for by the graph, since those of the trace were.
TEST(TracedAttentionTest, NanInOtherInputsReachesTheRowsThatSeeItAndNoOthers) {
  const Followed call = [](const std::vector<at::Tensor>& in) {
    return std::vector<at::Tensor>{
        mha::scaled_dot_product_attention(in[0], in[1], in[2], Mask::causal()).output};
  };
  auto recorded = draw_inputs(61, at::kFloat);
  recorded.resize(3);
  for (size_t place = 0; place < 3; ++place) {
    for (const double number : {std::nan(""), std::numeric_limits<double>::infinity()}) {
      if (place < 2 && !std::isnan(number)) continue;
      auto given = draw_inputs(62, at::kFloat);
      given.resize(3);
      given[place].select(2, 4).fill_(number);
      const auto expected = call(given), actual = replay(call, recorded, given);
      SCOPED_TRACE(::testing::Message() << "input " << place << " " << number);
      EXPECT_TRUE(expected[0].isfinite().any().item<bool>());
      EXPECT_FALSE(expected[0].isfinite().all().item<bool>());
      EXPECT_TRUE(is_close(actual[0], expected[0], 1e-5));
    }
  }
}

TEST(TracedAttentionTest, DropoutIsDrawnAnewByEveryRunOfTheGraph) {
  const Followed call = [](const std::vector<at::Tensor>& in) {
    return std::vector<at::Tensor>{
        mha::scaled_dot_product_attention(
            in[0], in[1], in[2], {}, AttentionOptions().dropout(0.5).weights(Weights::none))
            .output};
  };
  const auto value = at::ones({1, 1, 2000, 4});
  const std::vector<at::Tensor> inputs{at::zeros({1, 1, 4, 4}), at::zeros({1, 1, 2000, 4}),
                                       value};
  torch::manual_seed(63);
  const auto output = replay(call, inputs, inputs)[0];
  // 2,000 coins: a standard deviation of 0.022.
  EXPECT_TRUE(is_close(output, at::ones_like(output), 0.2));
  EXPECT_FALSE(at::equal(output, replay(call, inputs, inputs)[0]));
}

TEST(ForwardModeAttentionTest, TangentsAreThoseOfCentralDifferences) {
  for (const auto& c : followed_calls()) {
    const auto exact = draw_inputs(64, at::kDouble), directions = draw_inputs(65, at::kDouble);
    for (size_t along = 0; along <= exact.size(); ++along) {  // one input at a time, then all
      std::vector<at::Tensor> tangents(exact.size());
      for (size_t i = 0; i < exact.size(); ++i) {
        if (along == i || along == exact.size()) tangents[i] = directions[i];
      }
      const auto expected = central_differences(c.call, exact, tangents);
      for (const auto dtype : {at::kFloat, at::kDouble}) {
        for (const bool asks : {false, true}) {
          SCOPED_TRACE(::testing::Message()
                       << c.name << " along " << along << " " << dtype << " asks " << asks);
          std::vector<at::Tensor> inputs, given(exact.size());
          for (size_t i = 0; i < exact.size(); ++i) {
            inputs.push_back(exact[i].to(dtype, false, true).requires_grad_(asks));
            if (tangents[i].defined()) given[i] = tangents[i].to(dtype);
          }
          const auto actual = forward_mode(c.call, inputs, given);
          for (size_t i = 0; i < expected.size(); ++i) {
            const double scale = std::max(1.0, expected[i].abs().max().item<double>());
            const double tolerance = (dtype == at::kFloat ? 2e-5 : 1e-6) * scale;
            const auto found = actual[i].defined() ? actual[i] : at::zeros_like(expected[i]);
            EXPECT_TRUE(is_close(found, expected[i], tolerance)) << "result " << i;
          }
        }
      }
    }
  }
}

// LibTorch's softmax has no tangent of its gradient.
TEST(ForwardModeAttentionTest, ATangentOfAGradientIsAnError) {
  auto inputs = draw_inputs(63, at::kFloat);
  inputs.resize(3);
  for (auto& input : inputs) input.requires_grad_();
  const Followed gradients = [&](const std::vector<at::Tensor>& in) {
    const auto output =
        mha::scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], Mask::causal(),
                                          AttentionOptions().weights(Weights::none))
            .output;
    return torch::autograd::grad({output}, inputs, {in[0]});
  };
  const auto upstream = at::randn({N, H, L, D});
  EXPECT_THROW(forward_mode(gradients, {upstream}, {upstream}), c10::Error);
  // Zeros that have no memory are zeros.
  for (const auto& gradient : gradients({at::_efficientzerotensor({N, H, L, D})})) {
    EXPECT_TRUE(is_close(gradient + 0, at::zeros(gradient.sizes()), 0));
  }
}

TEST(FollowedRotaryTest, TracesAndTangentsOfARotationAreRight) {
  const auto positions = at::arange(L), others = at::arange(L) * 3 + 2;
  const Followed call = [](const std::vector<at::Tensor>& in) {
    return std::vector<at::Tensor>{apply_rotary(in[0], in[1], RotaryOptions())};
  };
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto x = at::randn({N, H, L, D}).to(dtype), y = at::randn({N, H, L, D}).to(dtype);
    EXPECT_TRUE(is_close(replay(call, {x, positions}, {y, others})[0], call({y, others})[0],
                         tolerance_of(dtype)));
    const auto tangent = forward_mode(call, {x, positions}, {y, {}})[0];
    EXPECT_TRUE(is_close(tangent, call({y, positions})[0], tolerance_of(dtype)));
  }
}

}  // namespace
}  // namespace mha
