// Guards the door: whatever place takes a tensor, one with the negative or the conjugate bit is
// read as its values and passes gradients on, and one of another layout or dtype, or without
// memory, is refused by name and leaves module and caches as they were. On every entry of the
// API (tensor_entries.cpp); equal values give equal bits, so there are no tolerances.
#include <ATen/native/quantized/AffineQuantizer.h>

#include "support/expect.h"
#include "support/values.h"
#include "wrong_calls/tensor_entries.h"

namespace mha {
namespace {

using test::is_bit_equal;
using test::is_same_but_for_blas;
using test::is_same_result;
using test::leaf;
using test::refuses;
using test::TensorEntry;

// Values with a bit in place of what the memory holds.
at::Tensor negated_twice(const at::Tensor& t) {
  return at::_neg_view(t.neg());
}

at::Tensor imaginary_part(const at::Tensor& t) {
  return at::imag(at::complex(at::zeros_like(t), t.neg()).conj());
}

class GivenTensorTest : public ::testing::Test {
 protected:
  // Each entry whose right tensor `fits`, refuses `wrong(right)` by `words`, with nothing
  // changed.
  void expect_refused(const std::function<bool(const at::Tensor&)>& fits,
                      const std::function<at::Tensor(const at::Tensor&)>& wrong,
                      std::initializer_list<std::string> words) {
    const auto before = setting_.state();
    int count = 0;
    for (const TensorEntry& entry : setting_.entries()) {
      if (!fits(entry.right)) continue;
      ++count;
      EXPECT_TRUE(refuses([&] { entry.call(wrong(entry.right)); }, words)) << entry.name;
    }
    EXPECT_GT(count, 0);
    const auto after = setting_.state();
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(is_bit_equal(after[i], before[i]));
  }

  at::NoGradGuard no_grad_;
  test::EntrySetting setting_;
};

bool any(const at::Tensor&) {
  return true;
}

bool floating(const at::Tensor& t) {
  return t.is_floating_point();
}

TEST_F(GivenTensorTest, ATensorWithTheNegativeBitIsReadAsItsValues) {
  for (const TensorEntry& entry : setting_.entries()) {
    if (entry.right.scalar_type() == at::kBool) continue;  // has no negative
    const auto lazy = negated_twice(entry.right);
    ASSERT_TRUE(lazy.is_neg());
    const auto found = entry.call(lazy), expected = entry.call(entry.right);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(is_same_result(found[i], expected[i])) << entry.name << ", result " << i;
    }
  }
}

TEST_F(GivenTensorTest, TheImaginaryPartOfAConjugateIsReadAsItsValues) {
  for (const TensorEntry& entry : setting_.entries()) {
    if (!floating(entry.right)) continue;
    const auto lazy = imaginary_part(entry.right);  // strided and with the bit
    ASSERT_TRUE(lazy.is_neg());
    const auto found = entry.call(lazy), expected = entry.call(entry.right);
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(is_same_result(found[i], expected[i])) << entry.name << ", result " << i;
    }
  }
}

TEST_F(GivenTensorTest, AComplexKeepMaskMayBeConjugated) {
  const auto flags = at::complex(at::tensor({0.0, 1.0, 0.0}), at::tensor({0.0, 0.0, 2.0}));
  EXPECT_EQ(test::visible(Mask::keep_keys(flags.conj()), {1, 1, 1, 3}), ".xx");
  EXPECT_EQ(test::visible(Mask::keep(flags.conj().view({1, 3})), {1, 1, 1, 3}), ".xx");
}

TEST_F(GivenTensorTest, AGradientFlowsThroughTheNegativeBit) {
  const at::AutoGradMode enable_grad(true);
  for (const TensorEntry& entry : setting_.entries()) {
    if (!floating(entry.right) || entry.name.rfind("KVCache", 0) == 0 ||
        entry.name.rfind("Mask::keep", 0) == 0 ||
        entry.name.rfind("AttentionAttribution", 0) == 0 ||
        entry.name.find("project_keys") != std::string::npos) {
      continue;  // where none flows
    }
    const auto plain = leaf(entry.right), lazy = leaf(entry.right.neg());
    const auto seed_of = [](const at::Tensor& t) {
      return at::sin(at::arange(t.numel())).view(t.sizes());
    };
    const auto expected = entry.call(plain)[0];
    expected.backward(seed_of(expected).to(expected.scalar_type()));
    const auto found = entry.call(at::_neg_view(lazy))[0];
    found.backward(seed_of(found).to(found.scalar_type()));
    ASSERT_TRUE(lazy.grad().defined()) << entry.name;
    EXPECT_TRUE(is_same_but_for_blas(lazy.grad().neg(), plain.grad())) << entry.name;
  }
}

TEST_F(GivenTensorTest, AnUndefinedTensorIsRefusedWhereOneIsNeeded) {
  for (const TensorEntry& entry : setting_.entries()) {
    if (entry.name.rfind("Mask::", 0) != 0) continue;
    EXPECT_TRUE(refuses([&] { entry.call({}); }, {"expected", "undefined"})) << entry.name;
  }
}

TEST_F(GivenTensorTest, OtherLayoutsThanStridedAreRefused) {
  expect_refused(any, [](auto& t) { return t.to_sparse(); },
                 {"expected", "strided", "found", "Sparse"});
  const auto two_dims = [](const at::Tensor& t) { return t.dim() == 2; };
  expect_refused(two_dims, [](auto& t) { return t.to_sparse_csr(); },
                 {"expected", "strided", "found", "SparseCsr"});
  expect_refused(any, [](auto& t) { return at::_nested_tensor_from_tensor_list({t}); },
                 {"expected", "strided", "found", "nested"});
  expect_refused(floating,
                 [](auto& t) { return at::quantize_per_tensor(t, 0.1, 0, at::kQInt8); },
                 {"expected", "found", "QInt8"});
  if (at::hasMKLDNN()) {
    expect_refused(floating, [](auto& t) { return t.to_mkldnn(); },
                   {"expected", "strided", "found", "Mkldnn"});
  }
}

TEST_F(GivenTensorTest, OtherFloatingDtypesThanTheFourAreRefused) {
  expect_refused(any, [](auto& t) { return t.to(at::kFloat).to(at::kFloat8_e4m3fn); },
                 {"expected", "found", "Float8_e4m3fn"});
  expect_refused(any, [](auto& t) { return t.to(at::kFloat).to(at::kFloat8_e5m2); },
                 {"expected", "found", "Float8_e5m2"});
}

TEST_F(GivenTensorTest, ATensorWithoutMemoryIsRefused) {
  expect_refused(any, [](auto& t) { return at::_efficientzerotensor(t.sizes(), t.options()); },
                 {"expected", "memory", "found"});
  expect_refused(any, [](auto& t) { return t.to(at::kMeta); }, {"expected", "found", "meta"});
  expect_refused(any, test::with_freed_memory, {"expected", "memory", "found", "1"});
}

}  // namespace
}  // namespace mha
