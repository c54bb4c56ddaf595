// Guards attention by at::scaled_dot_product_attention in blocks of queries, where a mask of
// all pairs would be a large tensor: blocks of any size give what the composition of ATen calls
// gives, gradients of both orders included, and no (L, S) tensor is held, whatever the mask.
#include "attention/torch_blocks.h"

#include "attention/torch_attention_case.h"
#include "runtime/attention_path.h"
#include "support/peak_memory.h"
#include "support/thread_count.h"

namespace mha::detail {
namespace {

class TorchBlocksTest : public TorchAttentionTest {};

// By one query, by three, which leaves a rest, and by all.
TEST_F(TorchBlocksTest, AnySizeGivesWhatTheCompositionDoes) {
  const Sizes s{8, 8};
  const auto heads = draw_heads(s);
  const auto grad = torch::randn({2, 4, 8, 8}, torch::kDouble);
  const auto ids = torch::tensor({0, 0, 0, 1, 1, 2, 2, -1});
  auto dead = torch::ones({8, 8}, torch::kBool);
  dead.narrow(0, 3, 2).fill_(false);
  for (const auto& mask :
       {Mask::causal() & Mask::lengths(torch::tensor({8, 3})), Mask::window(2, 0),
        Mask::window(1, 2) & Mask::lengths(torch::tensor({8, 0})), Mask::documents(ids),
        Mask::alibi(alibi_slopes(4)), Mask::add(torch::randn({2, 1, 8, 8})),
        Mask::keep(dead)}) {
    const auto whole = resolved(mask, s);
    const auto compose = [&](auto& q, auto& k, auto& v) {
      return plain_attention(q, k, v, whole, call_for(8)).output;
    };
    auto form = torch_form(heads.query, heads.key, heads.value, whole, call_for(8));
    ASSERT_FALSE(form.refusal) << form.refusal;
    for (const int64_t queries : {1, 3, 8}) {
      SCOPED_TRACE(c10::str(mask, ", blocks of ", queries));
      form.block_queries = queries;
      const auto attend = [&](auto& q, auto& k, auto& v) {
        return torch_attention_in_blocks(q, k, v, whole, call_for(8), form).output;
      };
      expect_same(outcome(heads, grad, attend), outcome(heads, grad, compose));
      expect_same(second_order(heads, attend), second_order(heads, compose));
    }
  }
}

TEST_F(TorchBlocksTest, NaNBehindAMaskStaysInItsRows) {
  const Sizes s{6, 6};
  auto heads = draw_heads(s);
  heads.value.select(2, 5).fill_(NAN);
  const auto mask = resolved(Mask::window(1, 0), s);
  auto form = torch_form(heads.query, heads.key, heads.value, mask, call_for(8));
  form.block_queries = 2;
  const auto output =
      torch_attention_in_blocks(heads.query, heads.key, heads.value, mask, call_for(8), form)
          .output;
  EXPECT_TRUE(test::is_finite(output.narrow(2, 0, 5)));
  EXPECT_TRUE(output.select(2, 5).isnan().all().item<bool>());
}

// Sums over many blocks are of float32.
TEST_F(TorchBlocksTest, GradientsOfKeysInHalfTypesAreRoundedOnce) {
  const Sizes s{512, 4, 2, 1};
  const auto heads = draw_heads(s);
  const auto mask = resolved(Mask::keep(torch::ones({512, 4}, torch::kBool)), s);
  const auto key_gradient = [&](int64_t queries) {
    const Tensors leaves{leaf(heads.query.to(at::kBFloat16)), leaf(heads.key.to(at::kBFloat16)),
                         leaf(heads.value.to(at::kBFloat16))};
    auto form = torch_form(leaves[0], leaves[1], leaves[2], mask, call_for(8));
    EXPECT_FALSE(form.refusal) << form.refusal;
    form.block_queries = queries;
    const auto output =
        torch_attention_in_blocks(leaves[0], leaves[1], leaves[2], mask, call_for(8), form)
            .output;
    output.sum().backward();
    return leaves[2].grad().to(at::kDouble);
  };
  // Each weight is rounded to bfloat16, 2^-9 of it, each block's part and the sum too, on
  // either side at most four times. Sums in bfloat16 itself would stand still where a part is
  // 1/512 of the sum.
  const auto all = key_gradient(512);
  EXPECT_LT(((key_gradient(1) - all).abs() / all).max().item<double>(), 4 * 0x1p-9);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// One map of one head would be 512 MiB. Causal needs no tensor of a mask, a window does.
TEST_F(TorchBlocksTest, NoMapIsHeld) {
  if (forced_path() == Path::plain) GTEST_SKIP() << "MHA_PATH=plain: another path";
  constexpr int64_t length = 8192;
  const auto lengths = Mask::lengths(torch::tensor({length - 5}));
  for (const auto& mask : {Mask::causal(), Mask::window(99, 0) & lengths}) {
    SCOPED_TRACE(c10::str(mask));
    Tensors leaves;
    for (int64_t i = 0; i < 3; ++i) {
      leaves.push_back(leaf(torch::randn({1, 2, length, 16}, torch::kDouble)));
    }
    const test::ThreadCount threads(2);
    test::PeakMemory::reset();
    const double before = test::PeakMemory::mib();
    if (before == 0) GTEST_SKIP() << "no VmHWM in /proc/self/status";
    const auto output = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], mask,
                                                     AttentionOptions().weights(Weights::none))
                            .output;
    EXPECT_LT(test::PeakMemory::mib() - before, 2 + 100) << "the output is 2 MiB";
    output.sum().backward();
    EXPECT_LT(test::PeakMemory::mib() - before, 4 * 2 + 250)
        << "training: the output, gradients of q, k and v are 2 MiB each";
  }
}
#endif

}  // namespace
}  // namespace mha::detail
