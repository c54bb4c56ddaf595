// Guards which calls at::scaled_dot_product_attention is asked for, and how.
#include "attention/torch_form.h"

#include <string>

#include "attention/plain_blocks.h"
#include "attention/torch_attention_case.h"

namespace mha::detail {
namespace {

class TorchFormTest : public TorchAttentionTest {};

TorchForm form_of(const Mask& mask, const Sizes& s, const AttentionCall& call = call_for(8),
                  at::ScalarType dtype = at::kDouble) {
  const auto heads = draw_heads(s);
  return torch_form(heads.query.to(dtype), heads.key.to(dtype), heads.value.to(dtype),
                    resolved(mask, s), call);
}

bool refuses(const TorchForm& form, const std::string& part) {
  return form.refusal && std::string(form.refusal).find(part) != std::string::npos;
}

TEST_F(TorchFormTest, BandsBecomeCausalSquares) {
  const auto is = [](const TorchForm& form, Pairs pairs, int64_t dead, int64_t padding,
                     int64_t keys) {
    return !form.refusal && form.pairs == pairs && form.dead_queries == dead &&
           form.padding == padding && form.keys == keys;
  };
  const auto top_left = Mask::causal(Mask::Alignment::top_left);
  EXPECT_TRUE(is(form_of({}, {5, 9}), Pairs::all, 0, 0, 9));
  EXPECT_TRUE(is(form_of(Mask::causal(), {6, 6}), Pairs::causal, 0, 0, 6));
  EXPECT_TRUE(is(form_of(Mask::causal(), {1, 6}), Pairs::all, 0, 0, 6));
  EXPECT_TRUE(is(form_of(Mask::causal(), {4, 6}), Pairs::causal, 0, 2, 6));
  EXPECT_TRUE(is(form_of(Mask::causal(), {6, 4}), Pairs::causal, 2, 0, 4));
  EXPECT_TRUE(is(form_of(top_left, {4, 6}), Pairs::causal, 0, 0, 4));
  EXPECT_TRUE(is(form_of(top_left, {6, 4}), Pairs::causal, 0, 0, 4));
  EXPECT_TRUE(is(form_of(Mask::window(-1, 2), {6, 6}), Pairs::causal, 0, 2, 6));
  // Half of the square and more would be padding.
  EXPECT_TRUE(is(form_of(Mask::causal(), {2, 6}), Pairs::masked, 0, 0, 6));
  EXPECT_TRUE(is(form_of(Mask::window(2, 0), {6, 6}), Pairs::masked, 0, 0, 6));
  EXPECT_TRUE(
      is(form_of(Mask::lengths(torch::tensor({3, 6})), {6, 6}), Pairs::masked, 0, 0, 6));
}

TEST_F(TorchFormTest, WhatMeansAnotherThingThereIsRefused) {
  const Sizes s{6, 6};
  const auto with = [](auto change) {
    auto call = call_for(8);
    change(call);
    return call;
  };
  using Call = AttentionCall;
  EXPECT_TRUE(refuses(form_of({}, s, with([](Call& c) { c.weights = Weights::averaged; })),
                      "weights are returned"));
  EXPECT_TRUE(
      refuses(form_of({}, s, with([](Call& c) { c.scoring.softcap = 1; })), "soft cap"));
  EXPECT_TRUE(refuses(
      form_of({}, s, with([](Call& c) { c.scoring.sinks = torch::zeros({4}); })), "sinks"));
  EXPECT_TRUE(refuses(form_of({}, s, with([](Call& c) { c.dropout = 0.5; })), "drops"));
  EXPECT_TRUE(refuses(form_of(Mask::add(leaf(torch::zeros({6, 6}))), s), "gradient"));
  EXPECT_FALSE(form_of(Mask::add(torch::zeros({6, 6})), s).refusal);
  EXPECT_TRUE(refuses(form_of(Mask::add(torch::zeros({6, 6})), s, call_for(8), at::kHalf),
                      "half type"));
  EXPECT_TRUE(refuses(form_of({}, {6, 0}), "0"));
  EXPECT_TRUE(refuses(form_of(Mask::causal(Mask::Alignment::bottom_right), {6, 0}), "0"));
  // 4 bytes a pair beyond 32 MiB are in blocks, but a row of keys for each sample is not.
  const auto long_form = [](const Mask& mask) {
    return torch_form(torch::empty({1, 1, 1, 8}).expand({1, 1, 3000, 8}),
                      torch::empty({1, 1, 1, 8}).expand({1, 1, 3000, 8}),
                      torch::empty({1, 1, 1, 8}).expand({1, 1, 3000, 8}),
                      resolve(mask, {{}, 1, 1, 3000, 3000}, at::kCPU), call_for(8));
  };
  const int64_t fitting = plain_block_bytes(at::kCPU) / (3000 * 4);
  EXPECT_EQ(long_form(Mask::window(5, 5)).block_queries, fitting);
  // The kernels want a number for every key.
  const auto row_bias = torch::zeros({3000, 1}).expand({3000, 3000});
  EXPECT_EQ(long_form(Mask::add(row_bias)).block_queries, fitting);
  EXPECT_EQ(long_form(Mask::lengths(torch::tensor({9}))).block_queries, 0);
  // A number for every key of 8 samples and 32 heads is 1 MiB.
  const auto many = torch::empty({1}).expand({8, 32, 1024, 1});
  const auto keep = Mask::keep(torch::ones({8, 32, 64, 1024}, torch::kBool));
  EXPECT_TRUE(refuses(torch_form(many.narrow(2, 0, 64), many, many,
                                 resolve(keep, {{}, 8, 32, 64, 1024}, at::kCPU), call_for(1)),
                      "even for few queries"));
  EXPECT_EQ(long_form(Mask::causal()).block_queries, 0);
}

}  // namespace
}  // namespace mha::detail
