// Guards the pretend device itself: what the tests of devices conclude rests on its refusing
// what a GPU would refuse, and on its counting what a GPU would wait for.
#include "support/pretend_device.h"

#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "support/expect.h"

namespace mha::test {
namespace {

using Names = std::vector<std::string>;

at::Tensor here(const at::Tensor& tensor) {
  return tensor.to(pretend_device());
}

TEST(PretendDeviceTest, ItsTensorsSayThatTheyAreElsewhere) {
  const auto tensor = here(at::arange(6).view({2, 3}));
  EXPECT_EQ(tensor.device(), pretend_device());
  EXPECT_FALSE(tensor.is_cpu());
  EXPECT_TRUE(at::equal((tensor * 2 + 1).cpu(), at::arange(6).view({2, 3}) * 2 + 1));
}

TEST(PretendDeviceTest, ViewsShareMemoryAndWritesReachIt) {
  const auto tensor = here(at::zeros({4, 3}));
  tensor.t().narrow(0, 1, 1).fill_(5);
  tensor.view({2, 6}).select(1, 0).add_(1);
  tensor.unfold(0, 2, 1).select(0, 0).mul_(2);
  auto expected = at::zeros({4, 3});
  expected.t().narrow(0, 1, 1).fill_(5);
  expected.view({2, 6}).select(1, 0).add_(1);
  expected.unfold(0, 2, 1).select(0, 0).mul_(2);
  EXPECT_TRUE(is_bit_equal(tensor.cpu(), expected));
}

TEST(PretendDeviceTest, TensorsOfBothDevicesAreRefused) {
  const auto ours = here(at::ones({2, 2})), theirs = at::ones({2, 2});
  EXPECT_THROW(ours + theirs, c10::Error);
  EXPECT_THROW(at::matmul(ours, theirs), c10::Error);
  EXPECT_THROW(ours.masked_fill(theirs.to(at::kBool), 0), c10::Error);
  EXPECT_THROW(ours.index_select(0, at::arange(1)), c10::Error);
  EXPECT_THROW(at::where(ours.gt(0), ours, theirs), c10::Error);
  EXPECT_THROW(at::cat({ours, theirs}), c10::Error);
  EXPECT_THROW(ours.index({at::arange(1)}), c10::Error);
  EXPECT_THROW(ours.copy_(at::ones({3, 2})), c10::Error);
  EXPECT_TRUE(at::equal((ours + 1).cpu(), theirs + 1));  // a number is no tensor
}

TEST(PretendDeviceTest, WhatTheHostReadsIsNamed) {
  const auto tensor = here(at::ones({2, 2}));
  const auto reads = [](const std::function<void()>& call) { return traffic_of(call).reads; };
  EXPECT_EQ(reads([&] { (void)(tensor.sum() * 2).masked_fill(tensor.gt(0), 1); }), Names{});
  EXPECT_EQ(reads([&] { (void)tensor.sum().item<double>(); }), Names{"item"});
  EXPECT_EQ(reads([&] { (void)tensor.gt(0).any().is_nonzero(); }), Names{"item"});
  EXPECT_EQ(reads([&] { (void)tensor.cpu(); }), Names{"copy to the CPU"});
  EXPECT_EQ(reads([&] { (void)tensor.nonzero(); }), Names{"aten::nonzero"});
  EXPECT_EQ(reads([&] { (void)at::equal(tensor, tensor); }), Names{"aten::equal"});
  EXPECT_NE(reads([&] { (void)tensor.index({tensor.gt(0)}); }), Names{});
  EXPECT_EQ(reads([&] { (void)tensor.masked_select(tensor.gt(0)); }),
            Names{"aten::masked_select"});
  EXPECT_EQ(traffic_of([&] { (void)here(at::ones({1})); }).writes, 1);
}

// Its gradient reads.
struct Reads : torch::autograd::Function<Reads> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& given) {
    return given * 2;
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          const std::vector<at::Tensor>& grads) {
    return {grads[0] * grads[0].sum().item()};
  }
};

TEST(PretendDeviceTest, ABackwardIsCountedToo) {
  const auto x = leaf(here(at::ones({2})));
  EXPECT_EQ(traffic_of([&] { Reads::apply(x).sum().backward(); }).reads, Names{"item"});
  EXPECT_EQ(x.grad().device(), pretend_device());
}

TEST(PretendDeviceTest, MemoryIsNanUntilItIsComputed) {
  EXPECT_TRUE(at::empty({3}, at::TensorOptions(pretend_device())).isnan().all().item<bool>());
}

TEST(PretendDeviceTest, ItDrawsFromAGeneratorOfItsOwn) {
  const auto options = at::TensorOptions(pretend_device());
  torch::manual_seed(5);
  const auto first = at::randn({4}, options).cpu();
  (void)at::randn({4});
  torch::manual_seed(5);
  EXPECT_TRUE(is_bit_equal(at::randn({4}, options).cpu(), first));
}

TEST(PretendDeviceTest, ItsMemoryIsCounted) {
  const auto bytes = device_peak_of([] {
    const auto a = at::zeros({1000}, at::TensorOptions(pretend_device()));
    const auto b = a.view({10, 100});
  });
  EXPECT_EQ(bytes, 4000);
}

}  // namespace
}  // namespace mha::test
