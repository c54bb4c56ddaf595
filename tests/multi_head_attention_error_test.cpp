// Guards that a wrong call or a wrong option of the module is refused with an error that names
// the argument, what was expected and what was found, and that a refused call changes nothing.
#include <mha/multi_head_attention.h>

#include <limits>

#include "expect.h"

namespace mha {
namespace {

using test::refuses;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

MultiHeadAttentionOptions options() {
  return MultiHeadAttentionOptions(12, 3);
}

::testing::AssertionResult refused_options(const MultiHeadAttentionOptions& wrong,
                                           std::initializer_list<std::string> words) {
  return refuses([&] { MultiHeadAttention module(wrong); }, words);
}

TEST(RefusedOptionsTest, SizesBelowOne) {
  for (const int64_t size : {0, -1, -12}) {
    const auto found = std::to_string(size);
    EXPECT_TRUE(refused_options(MultiHeadAttentionOptions(size, 3), {"d_model", found}));
    EXPECT_TRUE(refused_options(options().num_heads(size), {"num_heads", found}));
    EXPECT_TRUE(refused_options(options().head_dim(size), {"head_dim", found}));
    EXPECT_TRUE(refused_options(options().num_kv_heads(size), {"num_kv_heads", found}));
    EXPECT_TRUE(refused_options(options().kdim(size), {"kdim", found}));
    EXPECT_TRUE(refused_options(options().vdim(size), {"vdim", found}));
  }
}

TEST(RefusedOptionsTest, SizesWhoseProductOverflows) {
  const auto huge = std::numeric_limits<int64_t>::max() / 2;
  EXPECT_TRUE(refused_options(options().head_dim(huge), {"head_dim", std::to_string(huge)}));
  EXPECT_TRUE(
      refused_options(MultiHeadAttentionOptions(huge, 1), {"d_model", std::to_string(huge)}));
}

TEST(RefusedOptionsTest, HeadsThatDoNotDivideTheModelUnlessTheHeadSizeIsGiven) {
  EXPECT_TRUE(refused_options(options().num_heads(5), {"num_heads", "12", "5"}));
  EXPECT_NO_THROW(MultiHeadAttention(options().num_heads(5).head_dim(4)));
}

TEST(RefusedOptionsTest, KeyHeadsThatDoNotDivideTheHeads) {
  EXPECT_TRUE(refused_options(options().num_kv_heads(2), {"num_kv_heads", "3", "2"}));
  EXPECT_TRUE(refused_options(options().num_kv_heads(6), {"num_kv_heads", "3", "6"}));
  EXPECT_NO_THROW(MultiHeadAttention(options().num_kv_heads(1)));
}

TEST(RefusedOptionsTest, DropoutThatIsNoProbability) {
  for (const auto& [p, found] :
       {std::pair{-0.25, "-0.25"}, {1.25, "1.25"}, {infinity, "inf"}}) {
    EXPECT_TRUE(refused_options(options().dropout(p), {"dropout", "[0, 1]", found}));
  }
}

TEST(RefusedOptionsTest, ASoftCapThatIsNegativeOrOutOfRange) {
  for (const double softcap : {-1.0, 1e-40, 1e40, nan}) {
    EXPECT_TRUE(refused_options(options().softcap(softcap), {"softcap", "1e-30", "1e30"}))
        << softcap;
  }
}

TEST(RefusedOptionsTest, AScaleThatIsNotFinite) {
  for (const auto& [scale, found] :
       {std::pair{nan, "nan"}, {infinity, "inf"}, {-infinity, "-inf"}}) {
    EXPECT_TRUE(refused_options(options().scale(scale), {"scale", "finite", found}));
  }
}

TEST(RefusedOptionsTest, ADtypeThatIsNotFloating) {
  for (const auto dtype : {at::kLong, at::kBool, at::kComplexFloat}) {
    EXPECT_TRUE(
        refused_options(options().dtype(dtype), {"dtype", "floating", c10::toString(dtype)}));
  }
}

// A refused call must leave the inputs, the parameters and their gradients as they were.
class RefusedCallTest : public ::testing::Test {
 protected:
  ::testing::AssertionResult refused(const at::Tensor& query, const at::Tensor& key,
                                     const at::Tensor& value,
                                     std::initializer_list<std::string> words,
                                     const Mask& mask = {}) {
    const auto versions = [&] {
      std::vector<int64_t> all;
      for (const auto& t : {query, key, value}) all.push_back(t.defined() ? t._version() : 0);
      for (const auto& t : module_->parameters()) all.push_back(t._version());
      return all;
    };
    const auto before = versions();
    const auto generator = at::detail::getDefaultCPUGenerator().get_state();
    if (auto result = refuses([&] { module_(query, key, value, mask); }, words); !result) {
      return result;
    }
    if (versions() != before) return ::testing::AssertionFailure() << "a tensor was written to";
    if (!at::equal(at::detail::getDefaultCPUGenerator().get_state(), generator)) {
      return ::testing::AssertionFailure() << "random numbers were drawn";
    }
    return ::testing::AssertionSuccess();
  }

  // kdim and vdim make the three widths differ: 12, 5 and 7.
  MultiHeadAttention module_{options().kdim(5).vdim(7).dropout(0.5)};
  at::Tensor query_ = at::randn({3, 4, 12}), key_ = at::randn({3, 6, 5}),
             value_ = at::randn({3, 6, 7});
};

TEST_F(RefusedCallTest, BatchSizesThatDiffer) {
  EXPECT_TRUE(refused(query_, key_, at::randn({2, 6, 7}), {"value", "3", "2"}));
  EXPECT_TRUE(refused(query_, at::randn({1, 6, 5}), value_, {"key", "3", "1"}));
}

TEST_F(RefusedCallTest, KeyAndValueOfDifferentLengths) {
  EXPECT_TRUE(refused(query_, key_, at::randn({3, 8, 7}), {"value", "key", "6", "8"}));
}

TEST_F(RefusedCallTest, WidthsOtherThanTheOptions) {
  EXPECT_TRUE(refused(at::randn({3, 4, 11}), key_, value_, {"query", "12", "11"}));
  EXPECT_TRUE(refused(query_, at::randn({3, 6, 12}), value_, {"key", "5", "12"}));
  EXPECT_TRUE(refused(query_, key_, at::randn({3, 6, 5}), {"value", "7", "5"}));
}

TEST_F(RefusedCallTest, DimensionsOtherThanTwoOrThree) {
  EXPECT_TRUE(refused(at::randn({12}), key_, value_, {"query", "3", "2", "1"}));
  EXPECT_TRUE(refused(query_, at::randn({1, 3, 6, 5}), value_, {"key", "3", "4"}));
  EXPECT_TRUE(refused(query_, at::randn({6, 5}), value_, {"key", "3", "[6, 5]"}));
  EXPECT_TRUE(refused(at::randn({4, 12}), key_, value_, {"key", "2", "[3, 6, 5]"}));
}

TEST_F(RefusedCallTest, DtypesOtherThanTheParameters) {
  EXPECT_TRUE(refused(query_.to(at::kDouble), key_, value_, {"query", "Float", "Double"}));
  EXPECT_TRUE(refused(query_, key_.to(at::kHalf), value_, {"key", "Float", "Half"}));
  EXPECT_TRUE(refused(query_, key_, value_.to(at::kLong), {"value", "Float", "Long"}));
}

TEST_F(RefusedCallTest, DevicesOtherThanTheParameters) {
  EXPECT_TRUE(refused(query_.to(at::kMeta), key_, value_, {"query", "cpu", "meta"}));
}

TEST_F(RefusedCallTest, UndefinedInputs) {
  EXPECT_TRUE(refused({}, key_, value_, {"query", "undefined"}));
  EXPECT_TRUE(refused(query_, key_, {}, {"value", "undefined"}));
  EXPECT_TRUE(refused(query_, {}, value_, {"key", "undefined"}));
}

TEST_F(RefusedCallTest, SelfAttentionWithOtherWidthsForKeyAndValue) {
  EXPECT_TRUE(refused(query_, {}, {}, {"key", "5", "12"}));
}

TEST_F(RefusedCallTest, AMaskOfOtherSizes) {
  EXPECT_TRUE(refused(query_, key_, value_, {"Mask::keep", "4", "6", "[4, 5]"},
                      Mask::keep(at::ones({4, 5}))));
  EXPECT_TRUE(refused(query_, key_, value_, {"Mask::lengths", "6", "9"},
                      Mask::lengths(torch::tensor({6, 9, 1}))));
}

TEST_F(RefusedCallTest, AMaskThatCountsTheAppendedKeys) {
  module_ = MultiHeadAttention(options().kdim(5).vdim(7).add_bias_kv(true));
  EXPECT_TRUE(refused(query_, key_, value_, {"Mask::keep", "6", "[4, 7]"},
                      Mask::keep(at::ones({4, 7}))));
}

}  // namespace
}  // namespace mha
