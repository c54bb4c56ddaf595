// Guards that no result ever holds memory that was not computed, whatever dimension is 0: the
// output, each kind of weights, the gradients and what a map says, in every dtype and with
// every part of a call that takes memory of its own. The run with MHA_POISON_SCRATCH=1 fills
// such memory with NaN; without it, memory that was just freed holds some.
#include <mha/attention_map.h>
#include <mha/multi_head_attention.h>
#include <mha/scaled_dot_product_attention.h>

#include <cmath>
#include <vector>

#include "support/expect.h"

namespace mha {
namespace {

using test::all_zero;
using test::is_finite;
using test::leaf;

// Memory that the allocator hands out again.
void leave_nan_behind() {
  std::vector<at::Tensor> freed;
  for (const int64_t count : {8, 64, 512, 4096}) {
    freed.push_back(at::full({count}, std::nan("")));
  }
}

struct EmptyCase {
  int64_t n, l, s, kv_heads;
  at::ScalarType dtype;
  Weights weights;
  int variant;  // which of the masks, and whether dropout, soft cap and sinks take part
};

constexpr int64_t H = 4, D = 8;

Mask mask_of(const EmptyCase& c) {
  switch (c.variant) {
    case 1:
      return Mask::causal();
    case 2:
      return Mask::keep(at::ones({c.n, H, c.l, c.s})) &
             Mask::lengths(at::zeros({c.n}, at::kLong));
    case 3:
      return Mask::add(leaf(at::ones({c.l, c.s}))) & Mask::alibi(at::ones({H}));
    case 4:
      return Mask::keep_keys(at::ones({c.n, c.s})) &
             Mask::documents(at::zeros({c.l}, at::kLong), at::zeros({c.s}, at::kLong));
    default:
      return {};
  }
}

AttentionOptions options_of(const EmptyCase& c) {
  auto options = AttentionOptions().weights(c.weights);
  if (c.variant == 1) options.dropout(0.3);
  if (c.variant == 2) options.softcap(3).dropout(0.3).weights_after_dropout(true);
  if (c.variant == 4) options.sinks(at::ones({H}));
  return options;
}

void expect_all_computed(const EmptyCase& c) {
  const auto query = leaf(at::ones({c.n, H, c.l, D}, c.dtype));
  const auto key = leaf(at::ones({c.n, c.kv_heads, c.s, D}, c.dtype));
  const auto value = leaf(at::ones({c.n, c.kv_heads, c.s, D}, c.dtype));
  for (const bool records : {false, true}) {
    const at::AutoGradMode mode(records);
    leave_nan_behind();
    const auto [output, weights] =
        mha::scaled_dot_product_attention(query, key, value, mask_of(c), options_of(c));
    EXPECT_EQ(output.sizes(), query.sizes());
    EXPECT_TRUE(is_finite(output));
    if (c.s == 0) {
      EXPECT_TRUE(all_zero(output));
    }
    EXPECT_EQ(weights.defined(), c.weights != Weights::none);
    if (weights.defined()) {
      EXPECT_TRUE(is_finite(weights));
      EXPECT_EQ(weights.scalar_type(), c.dtype);
    }
    if (!records) continue;
    leave_nan_behind();
    output.sum().backward();
    for (const auto& tensor : {query, key, value}) EXPECT_TRUE(is_finite(tensor.grad()));
  }
}

TEST(EmptyDimensionsTest, NoResultOfACallHoldsMemoryThatWasNotComputed) {
  for (const int64_t n : {0, 2}) {
    for (const int64_t l : {0, 1, 50}) {
      for (const int64_t s : {0, 1, 300}) {
        if (n > 0 && l > 0 && s > 0) continue;
        for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
          for (const auto weights : {Weights::none, Weights::averaged, Weights::per_head}) {
            for (int variant = 0; variant < 5; ++variant) {
              SCOPED_TRACE(::testing::Message()
                           << "N=" << n << " L=" << l << " S=" << s << " " << dtype
                           << " weights " << weights << " variant " << variant);
              expect_all_computed({n, l, s, variant % 2 == 0 ? H : 2, dtype, weights, variant});
            }
          }
        }
      }
    }
  }
}

TEST(EmptyDimensionsTest, WithoutKeysEveryHeadIsZeroBesideAveragedWeights) {
  const auto query = at::ones({3, H, 5, D}), none = at::ones({3, H, 0, D});
  leave_nan_behind();
  const auto [output, weights] = mha::scaled_dot_product_attention(
      query, none, none, {}, AttentionOptions().weights(Weights::averaged));
  EXPECT_TRUE(all_zero(output));
  EXPECT_EQ(weights.sizes(), at::IntArrayRef({3, 5, 0}));
}

TEST(EmptyDimensionsTest, AModuleWithoutKeysGivesItsOutputsBiasForEveryKindOfWeights) {
  for (const auto weights : {Weights::none, Weights::averaged, Weights::per_head}) {
    MultiHeadAttention module(MultiHeadAttentionOptions(16, 4).weights(weights));
    const auto none = at::ones({2, 0, 16});
    for (const bool records : {false, true}) {
      const at::AutoGradMode mode(records);
      leave_nan_behind();
      const auto output = module->forward(at::ones({2, 3, 16}), none, none).output;
      EXPECT_TRUE(test::is_close(output, module->W_o->bias.expand({2, 3, 16}), 1e-7));
    }
  }
}

TEST(EmptyDimensionsTest, AMapOfNoKeysOrNoQueriesSaysOnlyWhatWasComputed) {
  for (const int64_t l : {0, 5}) {
    for (const int64_t s : {0, 5}) {
      if (l > 0 && s > 0) continue;
      for (const auto& mask : {Mask(), Mask::causal(), Mask::alibi(at::ones({H}))}) {
        SCOPED_TRACE(::testing::Message() << "L=" << l << " S=" << s << " " << mask);
        leave_nan_behind();
        const AttentionMap map(at::ones({2, H, l, D}), at::ones({2, H, s, D}), mask);
        const auto summary = map.summary();
        EXPECT_TRUE(all_zero(summary.entropy));
        EXPECT_TRUE(all_zero(summary.received));
        EXPECT_TRUE(all_zero(summary.distance));
        EXPECT_TRUE(is_finite(map.dense()));
        EXPECT_TRUE(is_finite(map.mean()));
        EXPECT_TRUE(map.log_sum_exp().isneginf().all().item<bool>());
      }
    }
  }
}

}  // namespace
}  // namespace mha
