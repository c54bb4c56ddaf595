// Calls without gradients read keys and values as they are stored: float32, bfloat16 or
// float16, in any layout, by chunks of keys where there are few queries, and bfloat16 without
// widening where the CPU multiplies it. On every instruction set that this CPU has.
//
// Tolerance, for each element: u is half of the result's last place, relative. The result is
// rounded once, u |o|. Weights that are rounded to bfloat16 before the product err by u each,
// in all u attention(|v|). What float32 sums and exponentials err by, 1e-5 of that for scores
// of these sizes, would hide nothing: one key lost or counted twice is 1e-3 of it or more.

#include <gtest/gtest.h>
#include <mha/cpu_isa.h>

#include <vector>

#include "attention/fused_attention.h"
#include "support/attention_setting.h"
#include "support/every_isa_test.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::detail {
namespace {

using test::unit_roundoff;

// Numbers that every one of the types holds exactly.
at::Tensor draw(at::IntArrayRef sizes) {
  return torch::randn(sizes).to(at::kHalf).to(at::kBFloat16).to(at::kDouble);
}

// Keys or values (N, H, S, D) of a cache with room for more, heads or tokens outside.
at::Tensor draw_cache(const AttentionSetting& s, int64_t dim, bool heads_outside) {
  const int64_t room = s.keys + s.extra + 7;
  return heads_outside ? draw({s.batch, s.kv_heads, room, dim})
                       : draw({s.batch, room, s.kv_heads, dim}).transpose(1, 2);
}

enum class Queries { as_stored, float32 };

void expect_stored_keys_are_read(const AttentionSetting& s, int64_t seed,
                                 Queries queries = Queries::as_stored) {
  at::NoGradGuard no_grad;
  torch::manual_seed(seed);
  const bool heads_outside = seed % 2 == 0;
  const int64_t keys = s.keys + s.extra;
  const bool wide = queries == Queries::float32;  // of numbers that no half type holds
  const std::vector<int64_t> query_sizes{s.batch, s.heads, s.queries, s.head_dim};
  const auto query =
      wide ? torch::randn(query_sizes, at::kFloat).to(at::kDouble) : draw(query_sizes);
  const auto key_cache = draw_cache(s, s.head_dim, heads_outside);
  const auto value_cache = draw_cache(s, s.value_dim, heads_outside);
  const auto mask = resolved_mask(s);
  const auto exact = [&](const at::Tensor& value) {
    return plain_attention(query, key_cache.narrow(2, 0, keys), value.narrow(2, 0, keys), mask,
                           s.call)
        .output;
  };
  const auto expected = exact(value_cache), magnitude = exact(value_cache.abs());
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto key = key_cache.to(dtype).narrow(2, 0, keys);
    const auto value = value_cache.to(dtype).narrow(2, 0, keys);
    const auto of_query = wide ? at::kFloat : dtype;
    const double u = unit_roundoff(of_query), in_weights = of_query == at::kBFloat16 ? u : 0;
    const double smallest = of_query == at::kHalf ? 0x1p-24 : 0x1p-126;  // where u ends
    const auto allowed = magnitude * (in_weights + 1e-5) * 1.01 + expected.abs() * u + smallest;
    for (const CpuIsa isa : available_cpu_isas()) {
      set_cpu_isa(isa);
      const auto actual = fused_attention(query.to(of_query), key, value, mask, s.call).output;
      EXPECT_EQ(actual.scalar_type(), of_query);
      const auto excess = (actual.to(at::kDouble) - expected).abs() - allowed;
      EXPECT_TRUE(excess.numel() == 0 || excess.max().item<double>() <= 0)
          << dtype << "; seed " << seed << "; " << s;
    }
  }
}

class StoredKeysTest : public test::EveryIsaTest {};

TEST_F(StoredKeysTest, AreReadInAnyTypeAndLayoutByFewQueries) {
  for (int64_t seed = 0; seed < 60; ++seed) {
    auto s = draw_setting(seed);
    s.call.weights = Weights::none;  // with weights or dropout the other kernel is for it
    s.call.dropout = 0;
    if (s.keys < 257) {
      s.keys += 257;
      s.queries = 1 + seed % 4;
      s.mask = seed % 3 == 0 ? Mask::causal() : seed % 3 == 1 ? Mask::window(300, 0) : Mask();
    }
    expect_stored_keys_are_read(s, seed);
  }
}

TEST_F(StoredKeysTest, AreReadInAnyTypeAndLayoutByManyQueries) {
  for (int64_t seed = 200; seed < 260; ++seed)
    expect_stored_keys_are_read(draw_setting(seed), seed);
}

TEST_F(StoredKeysTest, AreReadForEveryHeadSizeAroundTheVectorWidths) {
  int64_t seed = 0;
  for (const int64_t dim :
       {1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256}) {
    for (const int64_t group : {1, 2, 3, 4, 8}) {
      expect_stored_keys_are_read(
          {1, group, 1, 1, 511 + seed % 3, 0, dim, dim, Mask(), call_for(dim)}, seed);
      ++seed;
    }
    expect_stored_keys_are_read({1, 2, 1, 50, 99, 0, dim, dim, Mask::causal(), call_for(dim)},
                                seed);
  }
}

// As a float32 module over a bfloat16 cache: the query is not rounded, nor are the weights.
TEST_F(StoredKeysTest, OfHalfTypesRoundNothingOfAFloat32Query) {
  for (int64_t seed = 300; seed < 320; ++seed) {
    auto s = draw_setting(seed);
    s.call.weights = Weights::none;
    s.call.dropout = 0;
    expect_stored_keys_are_read(s, seed, Queries::float32);
    s.queries = 1 + seed % 3;
    s.keys = 600;
    s.mask = seed % 2 == 0 ? Mask::causal() : Mask();
    expect_stored_keys_are_read(s, seed, Queries::float32);
  }
  for (const int64_t dim : {64, 128}) {
    for (const int64_t count : {1, 40}) {
      expect_stored_keys_are_read({1, 4, 2, count, 600, 0, dim, dim, Mask(), call_for(dim)},
                                  dim, Queries::float32);
    }
  }
}

// The whole key range at every place of the pairs that bfloat16 takes keys by.
TEST_F(StoredKeysTest, MayBeginAndEndAtOddPlaces) {
  for (int64_t seed = 0; seed < 24; ++seed) {
    const int64_t left = 20 + seed % 4, length = 60 + seed / 4;
    const auto lengths = torch::tensor({length - 1 - seed % 3, length});
    expect_stored_keys_are_read({2, 2, 1, 40, length, 0, 16, 16,
                                 Mask::window(left, 1) & Mask::lengths(lengths), call_for(16)},
                                seed);
  }
}

}  // namespace
}  // namespace mha::detail
