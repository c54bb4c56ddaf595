// Guards that a module uses what it has registered: a parameter or layer that was replaced by
// assignment would be used by calls and missing in `parameters()`, files and clones, so the
// next call refuses it by its name. Everything that changes a parameter in place goes on.
#include <mha/multi_head_attention.h>
#include <mha/relative_position_bias.h>
#include <mha/torch_conversion.h>
#include <mha/weight_file.h>

#include <functional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/expect.h"
#include "support/support.h"

namespace mha::test {
namespace {

MultiHeadAttentionOptions every_parameter() {
  return MultiHeadAttentionOptions(16, 2)
      .add_bias_kv(true)
      .sinks(true)
      .qk_norm(QKNorm::layer)
      .qk_norm_bias(true)
      .output_gate(OutputGate::per_head);
}

std::vector<std::pair<const char*, std::function<void()>>> uses(MultiHeadAttention& module) {
  const auto x = at::randn({2, 3, 16});
  return {{"forward", [=]() mutable { module->forward(x); }},
          {"trace", [=]() mutable { module->trace(x); }},
          {"cached", [=]() mutable { module->attend(x, CallOptions().cache(KVCache())); }},
          {"project_keys", [=]() mutable { module->project_keys(x); }},
          {"prune_heads", [=]() mutable { module->prune_heads({0}); }},
          {"reset_parameters", [=]() mutable { module->reset_parameters(); }},
          {"clone", [=] { module->clone(); }},
          {"save", [=] { save(module, "unwritten"); }},
          {"to_torch", [=] { to_torch(module); }},
          {"torch::save", [=] {
             std::stringstream file;
             torch::save(module, file);
           }}};
}

TEST(RegisteredMembersTest, AParameterOrLayerReplacedByAssignmentIsRefusedByItsName) {
  using Change = std::function<void(MultiHeadAttentionImpl&)>;
  const auto fresh = [](int64_t in, int64_t out) { return torch::nn::Linear(in, out); };
  const std::vector<std::pair<std::string, Change>> changes{
      {"sinks", [](auto& m) { m.sinks = at::zeros({2}); }},
      {"bias_k", [](auto& m) { m.bias_k = m.bias_k.detach(); }},
      {"bias_v", [](auto& m) { m.bias_v = m.bias_v.clone(); }},
      {"q_norm", [](auto& m) { m.q_norm = at::ones({8}); }},
      {"k_norm", [](auto& m) { m.k_norm = m.q_norm; }},
      {"q_norm_bias", [](auto& m) { m.q_norm_bias = at::ones({8}); }},
      {"k_norm_bias", [](auto& m) { m.k_norm_bias = m.k_norm_bias + 1; }},
      {"W_q", [&](auto& m) { m.W_q = fresh(16, 16); }},
      {"W_k", [&](auto& m) { m.W_k = m.W_v; }},
      {"W_v", [&](auto& m) { m.W_v = fresh(16, 16); }},
      {"W_o", [&](auto& m) { m.W_o = fresh(16, 16); }},
      {"W_g", [&](auto& m) { m.W_g = fresh(16, 2); }},
      {"W_q", [&](auto& m) { m.W_q = torch::nn::Linear(nullptr); }},
      {"W_q", [](auto& m) { std::swap(m.W_q, m.W_o); }},
      {"W_q", [&](auto& m) { m.replace_module("W_q", fresh(16, 16)); }},
      {"W_v", [](auto& m) { m.unregister_module("W_v"); }},
      {"W_q.weight",
       [](auto& m) {
         m.W_q->weight = at::zeros({16, 16});
       }},
      {"W_k.weight", [](auto& m) { m.W_k->weight = m.W_k->weight.clone(); }},
      {"W_v.bias", [](auto& m) { m.W_v->bias = at::zeros({16}); }},
      {"W_o.bias", [](auto& m) { m.W_o->bias = m.W_o->bias.detach(); }},
      {"W_g.weight",
       [](auto& m) {
         m.W_g->weight = at::zeros({2, 16});
       }},
      {"W_g.bias", [](auto& m) { std::swap(m.W_g->bias, m.sinks); }},
  };
  for (const auto& [name, change] : changes) {
    MultiHeadAttention module(every_parameter());
    change(*module);
    for (const auto& [use, call] : uses(module)) {
      EXPECT_TRUE(refuses(call, {name})) << use;
    }
    EXPECT_NO_THROW((std::ostringstream() << *module)) << name;
  }
}

TEST(RegisteredMembersTest, TheErrorSaysHowToReplaceAParameter) {
  MultiHeadAttention module(every_parameter());
  module->sinks = at::zeros({2});
  const auto x = at::randn({2, 3, 16});
  EXPECT_TRUE(refuses([&] { module->forward(x); }, {"sinks", "registered", "set_data"}));
}

TEST(RegisteredMembersTest, WhatChangesParametersInPlaceGoesOn) {
  MultiHeadAttention module(every_parameter()), other(every_parameter());
  const auto x = at::randn({2, 3, 16});
  const auto works = [&] { module->forward(x.to(module->W_q->weight.scalar_type())); };
  module->to(at::kDouble);
  EXPECT_NO_THROW(works());
  module->to(at::Device(at::kCPU), at::kFloat);
  EXPECT_NO_THROW(works());
  module->sinks.set_data(at::ones({2}));
  EXPECT_NO_THROW(works());
  std::stringstream file;
  torch::save(other, file);
  torch::load(module, file);
  EXPECT_NO_THROW(works());
  module->reset_parameters();
  module->prune_heads({1});
  EXPECT_NO_THROW(works());
  MultiHeadAttentionImpl copy = *module;
  EXPECT_NO_THROW(copy.forward(x));
}

TEST(RegisteredMembersTest, ALayerReplacedTheProperWayIsUsed) {
  at::NoGradGuard no_grad;
  MultiHeadAttention module(16, 2);
  const auto x = at::randn({2, 3, 16});
  torch::nn::Linear zeros(16, 16);
  zeros->weight.zero_();
  zeros->bias.fill_(3);
  module->W_o = torch::nn::Linear(module->replace_module("W_o", zeros));
  EXPECT_TRUE(is_close(module->forward(x).output, at::full({2, 3, 16}, 3), 0));
  // Modules of the user's beside them, in any order, are none of ours.
  module->register_module("adapter", torch::nn::Linear(2, 2));
  module->register_parameter("extra", at::zeros({1}));
  const auto layer = module->W_q;
  module->unregister_module("W_q");
  module->W_q = torch::nn::Linear(module->register_module("W_q", layer));
  EXPECT_TRUE(is_close(module->forward(x).output, at::full({2, 3, 16}, 3), 0));
}

TEST(RegisteredMembersTest, ABiasTableReplacedByAssignmentIsRefused) {
  RelativePositionBias bias(RelativePositionBiasOptions(2));
  bias->weight = at::zeros({32, 2});
  EXPECT_TRUE(refuses([&] { bias->forward(3, 3); }, {"weight", "registered", "set_data"}));
  EXPECT_TRUE(refuses([&] { bias->clone(); }, {"weight", "registered"}));
}

}  // namespace
}  // namespace mha::test
