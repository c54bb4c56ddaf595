// Guards that a mask of a wrong dtype or size is refused with an error that names the
// constructor, what it accepts and what it was given, and that nothing is silently broadcast.
#include <mha/mask.h>

#include <string>

#include "support/expect.h"

namespace mha {
namespace {

using test::infinity;
using test::nan;
using test::refuses;

// N = 2, H = 3, L = 4, S = 5; no two sizes or products agree.
::testing::AssertionResult call_refuses(const Mask& mask,
                                        std::initializer_list<std::string> words) {
  return refuses([&] { test::uniform_weights(mask, {2, 3, 4, 5}); }, words);
}

TEST(MaskErrorTest, BlockTakesBoolOnly) {
  for (const auto dtype : {at::kByte, at::kLong, at::kFloat}) {
    EXPECT_TRUE(refuses([&] { Mask::block(at::zeros({4, 5}, dtype)); },
                        {"Mask::block", "bool", c10::toString(dtype)}));
    EXPECT_TRUE(refuses([&] { Mask::block_keys(at::zeros({2, 5}, dtype)); },
                        {"Mask::block_keys", "bool", c10::toString(dtype)}));
  }
}

TEST(MaskErrorTest, AddTakesFloatingOnly) {
  for (const auto dtype : {at::kBool, at::kLong, at::kComplexFloat}) {
    EXPECT_TRUE(refuses([&] { Mask::add(at::zeros({4, 5}, dtype)); },
                        {"Mask::add", "floating", c10::toString(dtype)}));
  }
}

TEST(MaskErrorTest, LengthsTakesIntegersOnly) {
  for (const auto dtype : {at::kBool, at::kFloat}) {
    EXPECT_TRUE(refuses([&] { Mask::lengths(at::zeros({2}, dtype)); },
                        {"Mask::lengths", "integer", c10::toString(dtype)}));
  }
}

TEST(MaskErrorTest, AnUndefinedTensorIsNoMask) {
  EXPECT_TRUE(refuses([] { Mask::keep({}); }, {"Mask::keep", "undefined"}));
  EXPECT_TRUE(refuses([] { Mask::block({}); }, {"Mask::block", "undefined"}));
  EXPECT_TRUE(refuses([] { Mask::add({}); }, {"Mask::add", "undefined"}));
  EXPECT_TRUE(refuses([] { Mask::keep_keys({}); }, {"Mask::keep_keys", "undefined"}));
  EXPECT_TRUE(refuses([] { Mask::block_keys({}); }, {"Mask::block_keys", "undefined"}));
  EXPECT_TRUE(refuses([] { Mask::lengths({}); }, {"Mask::lengths", "undefined"}));
}

// A mask of 0 and -inf, given as flags, would be read reversed.
TEST(MaskErrorTest, AFlagBelowZeroOrNanIsRefused) {
  const auto refuse_all = [](const at::Tensor& keys, const std::string& found) {
    EXPECT_TRUE(refuses([&] { Mask::keep(keys.dim() == 1 ? keys.unsqueeze(0) : keys); },
                        {"Mask::keep", "mask", "0 or above", found, "Mask::add"}));
    EXPECT_TRUE(refuses([&] { Mask::keep_keys(keys); },
                        {"Mask::keep_keys", "mask", "0 or above", found, "Mask::add_keys"}));
    EXPECT_TRUE(refuses([&] { Mask::real_queries(keys); },
                        {"Mask::real_queries", "mask", "0 or above", found}));
  };
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    refuse_all(torch::tensor({0.0, -infinity, 0.0}).to(dtype), "-inf");
    refuse_all(torch::tensor({1.0, nan}).to(dtype), "nan");
    refuse_all(torch::tensor({1.0, -0.5}).to(dtype), "-0.5");
    refuse_all(torch::tensor({5.0, -1.0}).to(dtype).expand({3, 2}).transpose(0, 1), "-1");
  }
  for (const auto dtype : {at::kChar, at::kShort, at::kInt, at::kLong}) {
    refuse_all(torch::tensor({3, 0, -2}).to(dtype), "-2");
  }
  Mask::keep(torch::tensor({255, 0}).to(at::kByte).view({1, 2}));
  Mask::keep(at::empty({0, 3}));
  Mask::keep_keys(at::empty({0}));
}

TEST(MaskErrorTest, AnAlignmentIsOneOfTheTwo) {
  const auto wrong = static_cast<Mask::Alignment>(9);
  EXPECT_TRUE(refuses([&] { Mask::causal(wrong); }, {"Mask::causal", "alignment", "9"}));
  EXPECT_TRUE(refuses([&] { Mask::window(1, 1, wrong); }, {"Mask::window", "alignment", "9"}));
  EXPECT_TRUE(
      refuses([&] { Mask::alibi(at::ones({2}), wrong); }, {"Mask::alibi", "alignment", "9"}));
}

TEST(MaskErrorTest, SlopesAreForANumberOfHeadsThatThereMayBe) {
  for (const int64_t heads : {int64_t{1} << 40, int64_t{-1}, (int64_t{1} << 20) + 1}) {
    EXPECT_TRUE(refuses([&] { alibi_slopes(heads); },
                        {"alibi_slopes", "num_heads", "2^20", std::to_string(heads)}));
  }
  EXPECT_EQ(alibi_slopes(1000).size(0), 1000);
}

TEST(MaskErrorTest, AWindowExtentIsAtLeastMinusOne) {
  EXPECT_TRUE(refuses([] { Mask::window(-2, 0); }, {"Mask::window", "-1", "-2"}));
  EXPECT_TRUE(refuses([] { Mask::window(0, -7); }, {"Mask::window", "-1", "-7"}));
}

TEST(MaskErrorTest, ATensorOfAnotherShapeIsRefused) {
  const std::vector<std::vector<int64_t>> shapes = {
      {},        {5},          {4, 6},       {5, 4},       {1, 5},          {4, 1},
      {1, 1},    {1, 4, 5},    {3, 4, 5},    {12, 4, 5},   {2, 1, 5},       {2, 5, 4},
      {0, 4, 5}, {2, 3, 1, 5}, {2, 3, 4, 1}, {2, 2, 4, 5}, {2, 3, 1, 4, 5}, {3, 3, 4, 5}};
  for (const auto& shape : shapes) {
    const auto found_text = (std::ostringstream() << at::IntArrayRef(shape)).str();
    EXPECT_TRUE(
        call_refuses(Mask::keep(at::ones(shape)), {"Mask::keep", "4", "5", found_text}));
    EXPECT_TRUE(call_refuses(Mask::block(at::zeros(shape, at::kBool)),
                             {"Mask::block", "4", "5", found_text}));
    EXPECT_TRUE(call_refuses(Mask::add(at::zeros(shape)), {"Mask::add", "4", "5", found_text}));
  }
}

TEST(MaskErrorTest, AKeyMaskOfAnotherShapeIsRefused) {
  const std::vector<std::vector<int64_t>> shapes = {{},     {4},    {6},       {1},    {2, 6},
                                                    {1, 5}, {3, 5}, {2, 1, 5}, {2, 1}, {5, 2}};
  for (const auto& shape : shapes) {
    const auto found_text = (std::ostringstream() << at::IntArrayRef(shape)).str();
    EXPECT_TRUE(call_refuses(Mask::keep_keys(at::ones(shape)),
                             {"Mask::keep_keys", "2", "5", found_text}));
    EXPECT_TRUE(call_refuses(Mask::block_keys(at::zeros(shape, at::kBool)),
                             {"Mask::block_keys", "2", "5", found_text}));
  }
}

TEST(MaskErrorTest, LengthsAreOneForEachSample) {
  EXPECT_TRUE(
      call_refuses(Mask::lengths(torch::tensor({1, 2, 3})), {"Mask::lengths", "2", "[3]"}));
  EXPECT_TRUE(call_refuses(Mask::lengths(torch::tensor({1})), {"Mask::lengths", "2", "[1]"}));
  EXPECT_TRUE(call_refuses(Mask::lengths(torch::tensor(1)), {"Mask::lengths", "2", "[]"}));
  EXPECT_TRUE(call_refuses(Mask::lengths(at::ones({2, 1}, at::kLong)),
                           {"Mask::lengths", "2", "[2, 1]"}));
}

TEST(MaskErrorTest, ALengthLiesBetweenZeroAndTheNumberOfKeys) {
  EXPECT_TRUE(call_refuses(Mask::lengths(torch::tensor({6, 2})), {"Mask::lengths", "5", "6"}));
  EXPECT_TRUE(
      call_refuses(Mask::lengths(torch::tensor({2, -1})), {"Mask::lengths", "0", "-1"}));
}

TEST(MaskErrorTest, EveryTermOfACombinationIsChecked) {
  EXPECT_TRUE(call_refuses(Mask::causal() & Mask::keep(at::ones({4, 5})) &
                               Mask::block_keys(at::zeros({9}, at::kBool)),
                           {"Mask::block_keys", "5", "[9]"}));
}

TEST(MaskErrorTest, AMaskOnAnotherDeviceIsRefused) {
  const auto mask = at::ones({4, 5}, at::TensorOptions(at::kMeta));
  EXPECT_TRUE(call_refuses(Mask::keep(mask), {"Mask", "cpu", "meta"}));
}

}  // namespace
}  // namespace mha
