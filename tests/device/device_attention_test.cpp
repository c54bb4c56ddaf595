// Guards that the functional form gives on any device what it gives on the CPU in float64:
// every mask, option and dtype, gradients of first and second order, in one block and in
// several, and what its masks promise of NaN. Tolerances are those of `agree`.
#include <mha/scaled_dot_product_attention.h>

#include <cmath>

#include "attention/plain_attention.h"
#include "attention/plain_blocks.h"
#include "device/device_test.h"
#include "support/values.h"

namespace mha::test {
namespace {

constexpr int64_t N = 2, H = 2, Hk = 1, L = 5, S = 9, D = 8;

class DeviceAttentionTest : public DeviceTest {};

// Query, key and value of two heads that share keys, and gradients of output and weights.
Tensors draw_inputs(uint64_t seed) {
  Random random(seed);
  Tensors inputs{random.normal({N, H, L, D}, at::kDouble),
                 random.normal({N, Hk, S, D}, at::kDouble),
                 random.normal({N, Hk, S, D}, at::kDouble)};
  inputs.push_back(random.normal({N, H, L, D}, at::kDouble));
  inputs.push_back(random.normal({N, H, L, S}, at::kDouble));
  return inputs;
}

// Output and weights, then the gradients of query, key, value and `others`, which are leaves.
Tensors with_gradients(const AttentionOutput& result, const Tensors& leaves,
                       const Tensors& upstream) {
  Tensors all{result.output};
  if (result.weights.defined()) all.push_back(result.weights);
  const Tensors grads(upstream.begin(), upstream.begin() + static_cast<ptrdiff_t>(all.size()));
  const auto found = torch::autograd::grad(all, leaves, grads);
  all.insert(all.end(), found.begin(), found.end());
  return all;
}

// A call with that mask and these options.
PlacedCall attend(const Mask& mask, const AttentionOptions& options = {}) {
  return [=](const Place& place, const Tensors& inputs) {
    const auto leaves = put_leaves({inputs[0], inputs[1], inputs[2]}, place);
    const auto result = mha::scaled_dot_product_attention(leaves[0], leaves[1], leaves[2],
                                                          mask.to(place.device), options);
    auto upstream = put_leaves({inputs[3], inputs[4]}, place);
    if (options.weights() == Weights::averaged) upstream[1] = upstream[1].detach().mean(1);
    return with_gradients(result, leaves, upstream);
  };
}

TEST_F(DeviceAttentionTest, EveryMaskMeansTheSameThere) {
  const auto inputs = draw_inputs(1);
  for (const auto& [name, mask] : masks_of_every_kind(L, S)) {
    SCOPED_TRACE(::testing::Message() << name << ": " << mask);
    EXPECT_TRUE(agrees_on_device(attend(mask), inputs, at::kFloat));
    const at::NoGradGuard no_grad;
    const PlacedCall without = [mask = mask](const Place& place, const Tensors& in) -> Tensors {
      const auto [output, weights] = mha::scaled_dot_product_attention(
          put(in[0], place), put(in[1], place), put(in[2], place), mask.to(place.device));
      return {output, weights};
    };
    EXPECT_TRUE(agrees_on_device(without, inputs, at::kFloat));
  }
}

TEST_F(DeviceAttentionTest, EveryDtypeComputesThere) {
  const auto inputs = draw_inputs(2);
  for (const auto dtype : device_dtypes()) {
    SCOPED_TRACE(dtype);
    for (const auto& mask : {Mask(), Mask::causal() & Mask::lengths(torch::tensor({9, 6}))}) {
      EXPECT_TRUE(agrees_on_device(attend(mask), inputs, dtype));
    }
  }
}

TEST_F(DeviceAttentionTest, EveryOptionMeansTheSameThere) {
  const auto inputs = draw_inputs(3);
  const auto mask = Mask::causal();
  for (const auto weights : {Weights::none, Weights::averaged, Weights::per_head}) {
    const auto options = AttentionOptions().weights(weights);
    SCOPED_TRACE(weights);
    EXPECT_TRUE(agrees_on_device(attend(mask, options), inputs, at::kFloat));
    EXPECT_TRUE(agrees_on_device(attend(mask, AttentionOptions(options).softcap(1.5)), inputs,
                                 at::kFloat));
    EXPECT_TRUE(agrees_on_device(attend({}, AttentionOptions(options).softcap(1.5)), inputs,
                                 at::kFloat));
    EXPECT_TRUE(agrees_on_device(attend(mask, AttentionOptions(options).scale(-0.3)), inputs,
                                 at::kFloat));
  }
}

// Of a mask's terms and of the sinks, in the order in which they are given.
TEST_F(DeviceAttentionTest, GradientsReachTermsAndSinks) {
  auto inputs = draw_inputs(4);
  Random random(5);
  for (const auto& shape : {std::vector<int64_t>{L, S}, {N, S}, {H, L + S - 1}, {H}, {H}}) {
    inputs.push_back(random.normal(shape, at::kDouble));
  }
  const PlacedCall call = [](const Place& place, const Tensors& in) {
    const auto leaves =
        put_leaves({in[0], in[1], in[2], in[5], in[6], in[7], in[8], in[9]}, place);
    const auto mask = Mask::add(leaves[3]) & Mask::add_keys(leaves[4]) &
                      Mask::relative(leaves[5]) & Mask::alibi(leaves[6]) & Mask::window(4, 2);
    const auto result = mha::scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], mask,
                                                          AttentionOptions().sinks(leaves[7]));
    return with_gradients(result, leaves, put_leaves({in[3], in[4]}, place));
  };
  EXPECT_TRUE(agrees_on_device(call, inputs, at::kFloat));
}

TEST_F(DeviceAttentionTest, GradientsOfGradientsAreRightThere) {
  const auto inputs = draw_inputs(6);
  for (const auto& mask : {Mask(), Mask::causal() & Mask::lengths(torch::tensor({9, 4}))}) {
    const PlacedCall call = [mask](const Place& place, const Tensors& in) {
      auto leaves = put_leaves({in[0], in[1], in[2]}, place);
      const auto output = mha::scaled_dot_product_attention(
                              leaves[0], leaves[1], leaves[2], mask.to(place.device),
                              AttentionOptions().weights(Weights::none))
                              .output;
      leaves.push_back(leaf(put(in[3], place)));
      const auto first = torch::autograd::grad({output}, {leaves[0], leaves[1], leaves[2]},
                                               {leaves[3]}, true, /*create_graph=*/true);
      const auto sum = first[0].square().sum() + first[1].square().sum() + first[2].sum();
      return torch::autograd::grad({sum}, leaves);
    };
    EXPECT_TRUE(agrees_on_device(call, inputs, at::kFloat));
  }
}

// The composition below the public function, by blocks of that size or in one.
PlacedCall in_blocks(const Mask& mask, const detail::BlockSizes& sizes) {
  return [=](const Place& place, const Tensors& in) {
    auto leaves = put_leaves({in[0], in[1], in[2], at::ones({H})}, place);
    const auto resolved =
        detail::resolve(mask.to(place.device), {{}, N, H, L, S, {}, place.dtype}, place.device);
    detail::AttentionCall call{{0.3, 2.0, leaves[3]}, Weights::per_head};
    const auto result = detail::plain_attention_in_blocks(leaves[0], leaves[1], leaves[2],
                                                          resolved, call, sizes);
    const auto upstream = put_leaves({in[3], in[4]}, place);
    Tensors all{result.output, result.weights};
    const auto first =
        torch::autograd::grad(all, leaves, upstream, true, /*create_graph=*/true);
    all.insert(all.end(), first.begin(), first.end());
    const auto sum =
        first[0].square().sum() + first[1].square().sum() + first[3].square().sum();
    const auto second = torch::autograd::grad({sum}, leaves);
    all.insert(all.end(), second.begin(), second.end());
    return all;
  };
}

TEST_F(DeviceAttentionTest, BlocksGiveWhatOneBlockDoes) {
  const auto inputs = draw_inputs(7);
  for (const auto& mask :
       {Mask(), Mask::window(2, 1), Mask::causal() & Mask::lengths(torch::tensor({9, 4}))}) {
    for (const detail::BlockSizes sizes : {detail::BlockSizes{1, 1, 2}, {N, Hk, 3}}) {
      SCOPED_TRACE(mask);
      EXPECT_TRUE(agrees_on_device(in_blocks(mask, sizes), inputs, at::kFloat));
    }
  }
}

// Keys and values 3 to 5, which the masks block, hold anything.
TEST_F(DeviceAttentionTest, WhatIsBehindAMaskReachesNoResultAndNoGradient) {
  const auto inputs = draw_inputs(8);
  auto zeroed = inputs, spoilt = inputs;
  for (const size_t i : {1, 2}) {
    for (auto* all : {&zeroed, &spoilt}) (*all)[i] = (*all)[i].clone();
    zeroed[i].narrow(2, 3, 3).zero_();
    spoilt[i].select(2, 3).fill_(nan);
    spoilt[i].select(2, 4).fill_(infinity);
    spoilt[i].select(2, 5).fill_(-3e38);
  }
  const auto blocked = at::arange(S).ge(3).logical_and(at::arange(S).le(5));
  for (const auto& mask :
       {Mask::block_keys(blocked), Mask::keep(blocked.logical_not().expand({L, S})),
        Mask::documents(at::zeros({L}, at::kLong), blocked.to(at::kLong)),
        Mask::add(at::zeros({N, H, L, S}).masked_fill(blocked, -infinity)),
        Mask::add_keys(at::zeros({S}).masked_fill(blocked, -infinity))}) {
    SCOPED_TRACE(mask);
    const auto place = device_place(at::kFloat);
    const auto call = attend(mask, AttentionOptions().softcap(20));
    const auto expected = call(place, zeroed), found = call(place, spoilt);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(is_bit_equal(found[i].cpu(), expected[i].cpu())) << i;
    }
  }
  // Under a band: rows 0 to 2 of 5 see keys up to 6.
  auto late = inputs, late_zeroed = inputs;
  for (const size_t i : {1, 2}) {
    late[i] = late[i].clone();
    late_zeroed[i] = late_zeroed[i].clone();
    late[i].narrow(2, 7, 2).fill_(nan);
    late_zeroed[i].narrow(2, 7, 2).zero_();
  }
  for (const bool records : {true, false}) {
    const at::AutoGradMode mode(records);
    const auto output = [&](const Tensors& in) {
      const auto place = device_place(at::kFloat);
      const auto leaves = put_leaves({in[0], in[1], in[2]}, place);
      return mha::scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], Mask::causal())
          .output.cpu();
    };
    const auto found = output(late), expected = output(late_zeroed);
    EXPECT_TRUE(is_bit_equal(found.narrow(2, 0, 3), expected.narrow(2, 0, 3)));
    EXPECT_TRUE(found.narrow(2, 3, 2).isnan().all().item<bool>());
  }
}

// A number that is not finite, at one place of an input: the same rows and columns as on the
// CPU, whose kernels alone make weights of blocked keys NaN, too, in a row of NaN.
TEST_F(DeviceAttentionTest, NanReachesTheRowsThatSeeItAndNoOthers) {
  for (const auto& mask :
       {Mask::causal(), Mask::keep_keys(at::arange(S).ne(2)),
        Mask::keep(at::arange(L * S * H).view({1, H, L, S}).remainder(3).ne(0)) &
            Mask::causal()}) {
    for (size_t place = 0; place < 3; ++place) {
      for (const double number : {nan, infinity, -infinity}) {
        if (place < 2 && !std::isnan(number)) continue;
        auto inputs = draw_inputs(9);
        inputs[place].select(2, 4).select(2, 3).fill_(number);
        SCOPED_TRACE(::testing::Message() << mask << " input " << place << " " << number);
        const at::NoGradGuard no_grad;
        for (const bool records : {true, false}) {
          const at::AutoGradMode mode(records);
          const PlacedCall call = [mask = mask](const Place& at, const Tensors& in) -> Tensors {
            const auto leaves = put_leaves({in[0], in[1], in[2]}, at);
            const auto result = mha::scaled_dot_product_attention(
                leaves[0], leaves[1], leaves[2], mask.to(at.device));
            return {result.output.detach(),
                    test_device().is_cpu() ? at::Tensor() : result.weights.detach()};
          };
          EXPECT_TRUE(agrees_on_device(call, inputs, at::kFloat)) << "records " << records;
        }
      }
    }
  }
}

// Upstream gradients of NaN in a row: keys that nobody sees get none.
TEST_F(DeviceAttentionTest, AGradientOfNanDoesNotReachKeysThatNobodySees) {
  auto inputs = draw_inputs(10);
  inputs[3].select(2, 1).fill_(nan);
  const auto found =
      attend(Mask::keep_keys(at::arange(S).lt(6)))(device_place(at::kFloat), inputs);
  for (const size_t i : {3, 4}) EXPECT_TRUE(all_zero(found[i].narrow(2, 6, 3).cpu())) << i;
}

// Whatever draws it, a weight is dropped or divided by the chance to stay; the backward
// multiplies by what the forward did.
TEST_F(DeviceAttentionTest, DropoutKeepsOrDropsAndItsBackwardKnowsWhich) {
  const auto place = device_place(at::kFloat);
  const Mask mask = Mask::causal().to(place.device);
  Random random(11);
  const auto inputs = put_leaves(
      {random.normal({1, 4, 40, D}, at::kDouble), random.normal({1, 4, 40, D}, at::kDouble),
       random.normal({1, 4, 40, D}, at::kDouble)},
      place);
  const auto resolved =
      detail::resolve(mask, {{}, 1, 4, 40, 40, {}, place.dtype}, place.device);
  detail::AttentionCall call{{0.3}, Weights::per_head, /*weights_after_dropout=*/true, 0.25};
  const auto whole =
      detail::plain_attention(inputs[0], inputs[1], inputs[2], resolved,
                              detail::AttentionCall{{0.3}, Weights::per_head, false, 0});
  for (const detail::BlockSizes sizes : {detail::BlockSizes{1, 4, 40}, {1, 1, 16}}) {
    torch::manual_seed(12);
    call.dropout_seed = 12;
    const auto result = detail::plain_attention_in_blocks(inputs[0], inputs[1], inputs[2],
                                                          resolved, call, sizes);
    const auto used = result.weights.detach().cpu(), kept = whole.weights.detach().cpu();
    const auto dropped = used.eq(0);
    EXPECT_TRUE(is_close(used, (kept / 0.75).masked_fill(dropped, 0), 1e-5));
    // Of 3,280 open pairs: a standard deviation of 0.008.
    const double share = dropped.logical_and(kept.gt(0)).sum().item<double>() / 3280;
    EXPECT_NEAR(share, 0.25, 0.05);
    EXPECT_TRUE(is_close(result.output.detach().cpu(),
                         at::matmul(used, inputs[2].detach().cpu()), 1e-5));
    const auto upstream = at::randn_like(result.output);
    const auto grad = torch::autograd::grad({result.output}, {inputs[2]}, {upstream})[0];
    EXPECT_TRUE(is_close(grad.cpu(), at::matmul(used.transpose(2, 3), upstream.cpu()), 1e-4));
    torch::manual_seed(12);
    const auto again = detail::plain_attention_in_blocks(inputs[0], inputs[1], inputs[2],
                                                         resolved, call, sizes);
    EXPECT_TRUE(is_close(again.weights.detach().cpu(), used, 1e-6));
  }
}

TEST_F(DeviceAttentionTest, EmptyDimensionsAreDefinedThere) {
  for (const auto& sizes : {Sizes{0, 2, 3, 4}, {2, 2, 0, 4}, {2, 2, 3, 0}}) {
    const auto inputs = draw_call_inputs(13, sizes, at::kDouble);
    const PlacedCall call = [](const Place& place, const Tensors& in) -> Tensors {
      const auto [output, weights] = mha::scaled_dot_product_attention(
          put(in[0], place), put(in[1], place), put(in[2], place), Mask::causal());
      return {output, weights};
    };
    EXPECT_TRUE(agrees_on_device(call, {inputs.query, inputs.key, inputs.value}, at::kFloat));
  }
}

TEST_F(DeviceAttentionTest, TensorsOfAnotherDeviceAreNamed) {
  if (test_device().is_cpu()) GTEST_SKIP() << "the CPU is no other device";
  const auto place = device_place(at::kFloat);
  const auto query = at::zeros({1, 1, 2, 4}), there = put(query, place);
  EXPECT_TRUE(
      refuses([&] { mha::scaled_dot_product_attention(there, query, there); }, {"key", "cpu"}));
  EXPECT_TRUE(refuses([&] { mha::scaled_dot_product_attention(there, there, query); },
                      {"value", "cpu"}));
  EXPECT_TRUE(refuses(
      [&] {
        mha::scaled_dot_product_attention(there, there, there, Mask::lengths(numbers({2})));
      },
      {"Mask", "cpu"}));
}

}  // namespace
}  // namespace mha::test
