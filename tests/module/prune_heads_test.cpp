// Guards that a module without some of its heads is the module in which they were masked:
// output, parameters, packed weights, frozen flags. The same products in another order, of
// numbers of unit scale in float32: 2e-6 is some twenty roundings.
#include <gtest/gtest.h>
#include <mha/multi_head_attention.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/expect.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha {
namespace {

using test::is_bit_equal;
using test::is_close;
using test::is_same_result;
using test::Random;
using test::refuses;

MultiHeadAttentionOptions base() {
  return MultiHeadAttentionOptions(48, 6).num_kv_heads(2);
}

std::vector<std::pair<std::string, MultiHeadAttentionOptions>> settings() {
  const auto rotary = base().rotary(RotaryOptions()).qk_norm(QKNorm::rms);
  return {{"plain", base()},
          {"without bias", base().bias(false).head_dim(32)},
          {"appended keys", base().add_bias_kv(true).add_zero_attn(true)},
          {"gains per head, with bias",
           base().qk_norm(QKNorm::layer).qk_norm_gain(QKNormGain::per_head).qk_norm_bias(true)},
          {"value heads of another size",
           base().v_head_dim(12).add_bias_kv(true).output_gate(OutputGate::elementwise)},
          {"sinks", base().sinks(true).softcap(2)},
          {"gate per head", base().output_gate(OutputGate::per_head)},
          {"gate elementwise",
           MultiHeadAttentionOptions(rotary).output_gate(OutputGate::elementwise)}};
}

// With gains that are no ones and sinks that differ.
MultiHeadAttention make(const MultiHeadAttentionOptions& options) {
  torch::manual_seed(21);
  MultiHeadAttention module(options);
  torch::NoGradGuard no_grad;
  for (const auto& parameter : {module->q_norm, module->k_norm, module->sinks}) {
    if (parameter.defined()) at::Tensor(parameter).copy_(at::rand_like(parameter) + 0.5);
  }
  return module;
}

at::Tensor mask_without(int64_t heads, const std::vector<int64_t>& pruned) {
  auto mask = at::ones({heads});
  for (const int64_t head : pruned) mask[head] = 0;
  return mask;
}

TEST(PruneHeadsTest, TheOutputIsThatOfTheMaskedHeadsAndTheParametersShrink) {
  Random random(51);
  const auto x = random.normal({2, 7, 48});
  const std::vector<std::pair<int64_t, std::vector<int64_t>>> cases{
      {6, {4, 0}}, {2, {0, 1, 2}}, {2, {5, 0}}, {2, {3, 4, 5, 1, 2}}, {1, {1, 2}}, {3, {2, 3}}};
  for (const auto& [name, given] : settings()) {
    for (const auto& [kv_heads, pruned] : cases) {
      SCOPED_TRACE(name + (" of " + std::to_string(kv_heads)));
      auto options = given;
      auto module = make(options.num_kv_heads(kv_heads));
      for (const bool records : {true, false}) {  // so that packed weights are there
        torch::AutoGradMode mode(records);
        module(x);
      }
      CallOptions call;
      call.head_mask(mask_without(6, pruned));
      const auto expected = module->attend(x, call).output.detach();
      module->W_k->weight.set_requires_grad(false);
      module(x).output.sum().backward();
      module->prune_heads(pruned);
      const int64_t left = 6 - static_cast<int64_t>(pruned.size());
      EXPECT_EQ(module->options.num_heads(), left);
      EXPECT_EQ(module->W_q->weight.size(0), left * module->head_dim());
      EXPECT_EQ(module->W_q->options.out_features(), left * module->head_dim());
      EXPECT_EQ(module->W_o->options.in_features(), left * module->v_head_dim());
      EXPECT_EQ(module->W_k->weight.size(0), module->num_kv_heads() * module->head_dim());
      EXPECT_FALSE(module->W_k->weight.requires_grad());
      EXPECT_FALSE(module->W_q->weight.grad().defined());
      for (const bool records : {true, false}) {
        torch::AutoGradMode mode(records);
        EXPECT_TRUE(is_close(module(x).output, expected, 2e-6));
      }
      // It trains, copies and describes itself as the smaller module that it is.
      module(x).output.sum().backward();
      EXPECT_EQ(module->W_q->weight.grad().sizes(), module->W_q->weight.sizes());
      const auto copy = std::dynamic_pointer_cast<MultiHeadAttentionImpl>(module->clone());
      EXPECT_TRUE(is_same_result(copy->forward(x).output, module(x).output));
    }
  }
}

TEST(PruneHeadsTest, AHeadThatOverflowsIsGoneWhereItIsMasked) {
  Random random(53);
  auto x = random.normal({2, 7, 48});
  x[0].fill_(0);  // its heads are finite
  auto module = make(base().num_kv_heads(6)), pruned = make(base().num_kv_heads(6));
  pruned->prune_heads({2});
  {
    torch::NoGradGuard no_grad;
    module->W_v->weight.narrow(0, 16, 8).fill_(3e38);
  }
  for (const bool records : {true, false}) {
    torch::AutoGradMode mode(records);
    const auto all = module(x).output, without = pruned(x).output;
    EXPECT_FALSE(at::isfinite(all[1]).any().item<bool>());
    const auto masked = [&](const at::Tensor& head_mask) {
      return module->attend(x, CallOptions().head_mask(head_mask)).output;
    };
    EXPECT_TRUE(is_close(masked(mask_without(6, {2})), without, 2e-6));
    const auto of_one = masked(at::stack({at::ones({6}), mask_without(6, {2})}));
    EXPECT_TRUE(is_close(of_one[0], all[0], 2e-6));
    EXPECT_TRUE(is_close(of_one[1], without[1], 2e-6));
  }
}

TEST(PruneHeadsTest, WhatWouldLeaveNoWholeGroupsIsRefusedAndChangesNothing) {
  auto module = make(base());
  const auto text = [&] { return (std::ostringstream() << *module).str(); };
  const auto before = text();
  const auto weight = module->W_q->weight.clone();
  const auto pruning = [&](const std::vector<int64_t>& heads) {
    return [&module, heads] { module->prune_heads(heads); };
  };
  EXPECT_TRUE(refuses(pruning({6}), {"heads", "5", "6"}));
  EXPECT_TRUE(refuses(pruning({-1}), {"heads", "-1"}));
  EXPECT_TRUE(refuses(pruning({2, 2}), {"heads", "2", "twice"}));
  MultiHeadAttention together(
      base().qk_norm(QKNorm::rms).qk_norm_scope(QKNormScope::all_heads));
  EXPECT_TRUE(refuses([&] { together->prune_heads({0, 1, 2}); }, {"qk_norm_scope", "all_heads"}));
  together->prune_heads({});
  EXPECT_TRUE(refuses(pruning({0, 1, 2, 3, 4, 5}), {"heads", "5", "6"}));
  EXPECT_TRUE(refuses(pruning({0}), {"heads", "2", "3"}));
  EXPECT_TRUE(refuses(pruning({0, 1, 5}), {"heads", "1", "2"}));
  module->prune_heads({});
  EXPECT_EQ(text(), before);
  EXPECT_TRUE(is_bit_equal(module->W_q->weight, weight));
}

}  // namespace
}  // namespace mha
