#pragma once

#include <gtest/gtest.h>
#include <mha/weight_file.h>

#include <map>
#include <string>
#include <vector>

#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::test {

using Tensors = std::map<std::string, at::Tensor>;

inline Tensors parameters_of(const torch::nn::Module& module) {
  Tensors tensors;
  for (const auto& parameter : module.named_parameters()) {
    tensors[parameter.key()] = parameter->detach().clone();
  }
  return tensors;
}

inline ::testing::AssertionResult are_bit_equal(const Tensors& actual,
                                                const Tensors& expected) {
  if (actual.size() != expected.size()) {
    return ::testing::AssertionFailure()
           << actual.size() << " tensors, not " << expected.size();
  }
  for (const auto& [name, tensor] : expected) {
    if (actual.count(name) == 0) return ::testing::AssertionFailure() << "no " << name;
    if (auto equal = is_bit_equal(actual.at(name), tensor); !equal)
      return equal << " in " << name;
  }
  return ::testing::AssertionSuccess();
}

/// The names and the sizes that a BERT encoder's files have, layer by layer, with `d_model`.
inline Tensors bert_model(int64_t layers, int64_t d_model,
                          const std::string& model_prefix = "") {
  Tensors tensors;
  const auto add = [&](const std::string& name, at::IntArrayRef shape) {
    tensors[model_prefix + name] = torch::randn(shape);
  };
  add("embeddings.word_embeddings.weight", {11, d_model});
  add("embeddings.LayerNorm.weight", {d_model});
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string start = "encoder.layer." + std::to_string(layer) + ".";
    for (const auto* part : {"attention.self.query", "attention.self.key",
                             "attention.self.value", "attention.output.dense"}) {
      add(start + part + ".weight", {d_model, d_model});
      add(start + part + ".bias", {d_model});
    }
    add(start + "attention.output.LayerNorm.weight", {d_model});
    add(start + "attention.output.LayerNorm.bias", {d_model});
    add(start + "intermediate.dense.weight", {4 * d_model, d_model});
    add(start + "output.dense.weight", {d_model, 4 * d_model});
  }
  add("pooler.dense.weight", {d_model, d_model});
  return tensors;
}

struct LayoutCase {
  MultiHeadAttentionOptions options;
  Layout layout;
};

/// Every layout with everything that it can express.
inline std::vector<LayoutCase> layout_cases() {
  const MultiHeadAttentionOptions plain(12, 3);
  auto other_widths = plain;
  other_widths.kdim(7).vdim(8);
  auto everything = other_widths;
  everything.add_bias_kv(true);
  auto no_bias = other_widths;
  no_bias.bias(false);
  auto packed = plain;
  packed.add_bias_kv(true);
  auto free_heads = everything;
  free_heads.head_dim(5);
  auto free_heads_bert = other_widths;
  free_heads_bert.head_dim(5);
  auto plain_no_bias = plain;
  plain_no_bias.bias(false);
  auto grouped = MultiHeadAttentionOptions(12, 6).num_kv_heads(2);
  auto grouped_everything = grouped;
  grouped_everything.head_dim(5).kdim(7).vdim(8).bias(false).softcap(20).sinks(true);
  auto grouped_bias_kv = grouped;
  grouped_bias_kv.add_bias_kv(true);
  auto rotated = grouped;
  rotated.head_dim(8)
      .bias(false)
      .qk_norm(QKNorm::rms)
      .qk_norm_eps(1e-5)
      .rotary(RotaryOptions().base(5e5).scaling(Llama3Scaling(8, 8192).low_freq_factor(2)));
  auto gated = free_heads;
  gated.head_dim(6)
      .qk_norm(QKNorm::layer)
      .output_gate(OutputGate::elementwise)
      .rotary(
          RotaryOptions()
              .pairing(RotaryPairing::interleaved)
              .rotary_dim(4)
              .scaling(YarnScaling(4, 64).beta_fast(20).attention_factor(1.1).truncate(false)));
  auto gated_heads = plain;
  gated_heads.output_gate(OutputGate::per_head).rotary(RotaryOptions().scaling(NtkScaling(2)));
  auto linear = plain;
  linear.rotary(RotaryOptions().scaling(LinearScaling(2.5)));
  auto qwen2 = grouped;
  qwen2.output_bias(false).rotary(RotaryOptions().base(1e6));
  auto output_bias_alone = plain_no_bias;
  output_bias_alone.output_bias(true);
  auto timm = plain;
  timm.qk_norm(QKNorm::layer).qk_norm_bias(true);
  auto timm_rms = plain;
  timm_rms.qk_norm(QKNorm::rms);
  auto olmo = grouped;
  olmo.qk_norm(QKNorm::rms).qk_norm_scope(QKNormScope::all_heads).bias(false);
  auto cohere = grouped;
  cohere.bias(false).qk_norm(QKNorm::layer).qk_norm_gain(QKNormGain::per_head);
  auto per_head = grouped;
  per_head.qk_norm(QKNorm::layer).qk_norm_gain(QKNormGain::per_head).qk_norm_bias(true);
  auto llama4 = grouped;
  llama4.qk_norm(QKNorm::rms)
      .qk_norm_gain(QKNormGain::none)
      .qk_norm_order(QKNormOrder::after_rotary)
      .rotary(RotaryOptions().frequencies({0.125}))
      .temperature_tuning(TemperatureTuning(0.1, 8192).offset(1));
  auto mimo = grouped;
  mimo.head_dim(8).v_head_dim(5).value_scale(0.707).output_gate(OutputGate::elementwise);
  auto mimo_llama = mimo;
  mimo_llama.output_gate(OutputGate::none).temperature_tuning(TemperatureTuning(0.1, 16));
  auto appended = mimo;
  appended.add_bias_kv(true).rotary(RotaryOptions().scaling(
      LongRopeScaling({1, 1, 2, 2.5}, {3, 3, 4, 4.5}, 64).factor(4).attention_factor(1.25)));
  auto mscale = plain;
  mscale.rotary(RotaryOptions().scaling(YarnScaling(4, 64).mscale(1.5).mscale_all_dim(0.5)));
  return {{olmo, Layout::llama},
          {olmo, Layout::native},
          {cohere, Layout::llama},
          {cohere, Layout::native},
          {per_head, Layout::native},
          {llama4, Layout::llama},
          {mimo, Layout::native},
          {mimo_llama, Layout::llama},
          {appended, Layout::native},
          {mscale, Layout::vit},
          {timm, Layout::vit},
          {timm_rms, Layout::vit},
          {timm, Layout::native},
          {qwen2, Layout::llama},
          {qwen2, Layout::native},
          {output_bias_alone, Layout::llama},
          {output_bias_alone, Layout::vit},
          {output_bias_alone, Layout::native},
          {rotated, Layout::llama},
          {rotated, Layout::native},
          {gated, Layout::native},
          {gated_heads, Layout::native},
          {linear, Layout::bert},
          {linear, Layout::gpt2},
          {plain, Layout::gpt2},
          {plain_no_bias, Layout::gpt2},
          {plain, Layout::vit},
          {plain_no_bias, Layout::vit},
          {plain, Layout::llama},
          {other_widths, Layout::llama},
          {no_bias, Layout::llama},
          {free_heads_bert, Layout::llama},
          {grouped, Layout::llama},
          {grouped_everything, Layout::llama},
          {grouped, Layout::native},
          {grouped_bias_kv, Layout::native},
          {plain, Layout::native},
          {everything, Layout::native},
          {no_bias, Layout::native},
          {free_heads, Layout::native},
          {plain, Layout::torch},
          {packed, Layout::torch},
          {plain_no_bias, Layout::torch},
          {everything, Layout::torch},
          {no_bias, Layout::torch},
          {plain, Layout::bert},
          {other_widths, Layout::bert},
          {no_bias, Layout::bert},
          {free_heads_bert, Layout::bert},
          {plain_no_bias, Layout::bert}};
}

}  // namespace mha::test
