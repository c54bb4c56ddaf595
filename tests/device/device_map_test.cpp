// Guards that every method of a map gives on any device what it gives on the CPU in float64,
// with gradients, from a call's trace and from projections. Tolerances are those of `agree`.
#include <mha/attention_attribution.h>
#include <mha/attention_map.h>

#include "device/device_test.h"

namespace mha::test {
namespace {

constexpr int64_t N = 2, H = 2, Hk = 1, L = 5, S = 9, D = 8;

class DeviceMapTest : public DeviceTest {};

Tensors draw_inputs(uint64_t seed) {
  Random random(seed);
  return {random.normal({N, H, L, D}, at::kDouble), random.normal({N, Hk, S, D}, at::kDouble),
          random.normal({N, Hk, S, D}, at::kDouble), random.normal({H}, at::kDouble)};
}

AttentionMap trace(const Tensors& leaves, const Mask& mask, const Place& place) {
  return trace_scaled_dot_product_attention(leaves[0], leaves[1], leaves[2],
                                            mask.to(place.device),
                                            AttentionOptions().softcap(3).sinks(leaves[3]))
      .map;
}

TEST_F(DeviceMapTest, EveryMethodAgrees) {
  const auto inputs = draw_inputs(1);
  for (const auto& mask : {Mask(), Mask::causal() & Mask::lengths(torch::tensor({9, 6})),
                           Mask::alibi(alibi_slopes(H))}) {
    for (const auto& method : map_methods()) {
      SCOPED_TRACE(::testing::Message() << method.name << ", " << mask);
      const PlacedCall call = [&](const Place& place, const Tensors& in) {
        const at::NoGradGuard no_grad;
        return method.call(trace(put_leaves(in, place), mask, place));
      };
      EXPECT_TRUE(agrees_on_device(call, inputs, at::kFloat));
    }
  }
}

TEST_F(DeviceMapTest, GradientsOfEveryMethodAgree) {
  const auto inputs = draw_inputs(2);
  const auto mask =
      Mask::causal() & Mask::relative(at::linspace(-1, 1, L + S - 1).unsqueeze(0));
  for (const auto& method : map_methods()) {
    if (!method.is_differentiable) continue;
    SCOPED_TRACE(method.name);
    const PlacedCall call = [&](const Place& place, const Tensors& in) {
      const auto leaves = put_leaves(in, place);
      at::Tensor sum;
      for (const auto& result : method.call(trace(leaves, mask, place))) {
        sum = sum.defined() ? sum + result.square().sum() : result.square().sum();
      }
      return torch::autograd::grad({sum}, {leaves[0], leaves[1], leaves[3]});
    };
    EXPECT_TRUE(agrees_on_device(call, inputs, at::kFloat));
  }
}

TEST_F(DeviceMapTest, MapsOfProjectionsOfHalfTypesAgree) {
  const auto inputs = draw_inputs(3);
  for (const auto dtype : device_dtypes()) {
    const PlacedCall call = [](const Place& place, const Tensors& in) {
      const AttentionMap map(put(in[0], place), put(in[1], place), Mask::causal());
      const auto found = map.detach().summary();
      EXPECT_EQ(map.query().device(), place.device);
      return Tensors{found.entropy, found.received, found.distance};
    };
    // Half types are widened: the map's own numbers are float32.
    EXPECT_TRUE(agrees_on_device(call, {rounded(inputs[0], dtype), rounded(inputs[1], dtype)},
                                 dtype == at::kDouble ? at::kDouble : at::kFloat));
  }
}

TEST_F(DeviceMapTest, AMapGoesToAnotherDeviceAndBack) {
  const auto inputs = draw_inputs(5);
  const auto mask = Mask::lengths(torch::tensor({9, 6})) & Mask::alibi(alibi_slopes(H));
  const PlacedCall call = [&](const Place& place, const Tensors& in) {
    const auto leaves = put_leaves(in, place);
    const auto there = trace(leaves, mask, place), here = there.to(at::kCPU);
    EXPECT_TRUE(here.query().device().is_cpu());
    EXPECT_TRUE(here.mean().device().is_cpu());
    const auto back = here.to(place.device).mean();
    auto results =
        torch::autograd::grad({back.square().sum()}, {leaves[0], leaves[1], leaves[3]});
    results.push_back(back.detach());
    return results;
  };
  EXPECT_TRUE(agrees_on_device(call, inputs, at::kFloat));
}

// What a loss attributes to the pairs, by every method.
TEST_F(DeviceMapTest, AttributionsAgree) {
  auto inputs = draw_inputs(6);
  Random random(7);
  inputs.push_back(random.normal({N, H, L, D}, at::kDouble));  // the gradient
  for (const auto& mask : {Mask(), Mask::causal() & Mask::lengths(torch::tensor({9, 6}))}) {
    for (const auto shown :
         {Attribution::gradient, Attribution::relevance, Attribution::positive_relevance}) {
      SCOPED_TRACE(::testing::Message() << shown << ", " << mask);
      const PlacedCall call = [&](const Place& place, const Tensors& in) {
        const AttentionAttribution found(trace(put_leaves(in, place), mask, place).detach(),
                                         put(in[2], place), put(in[4], place));
        const auto sums = found.sums(shown);
        const auto there = found.to(at::kCPU).sums(shown).by_key.to(place.device);
        return Tensors{found.dense(shown),
                       found.head(shown, 1),
                       found.rows(shown, 1, 4),
                       found.mean(shown),
                       found.pooled(shown, 2, 3),
                       found.top_k(shown, 3).values,
                       found.block(shown, 1, {1, 4}, {2, 7}),
                       sums.by_head,
                       sums.by_query,
                       sums.by_key,
                       there};
      };
      EXPECT_TRUE(agrees_on_device(call, inputs, at::kFloat));
    }
  }
}

TEST_F(DeviceMapTest, ARolloutStaysThere) {
  const PlacedCall call = [](const Place& place, const Tensors& in) {
    std::vector<AttentionMap> layers;
    for (const auto& tokens : in) layers.emplace_back(put(tokens, place), put(tokens, place));
    return Tensors{attention_rollout(layers)};
  };
  Random random(4);
  EXPECT_TRUE(agrees_on_device(
      call,
      {random.normal({N, H, L, D}, at::kDouble), random.normal({N, H, L, D}, at::kDouble)},
      at::kFloat));
}

}  // namespace
}  // namespace mha::test
