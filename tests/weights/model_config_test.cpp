// Guards what config.json is read as, where no Python is: both forms that transformers has
// written, layers of two kinds, and files that are wrong or hostile, each refused by the member
// that is. The numbers of whole models are tests/numerics/model_layers_test.cpp's.
#include <gtest/gtest.h>
#include <mha/model_config.h>

#include <filesystem>
#include <random>
#include <sstream>

#include "files/safetensors.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"
#include "support/weight_file_support.h"

namespace mha {
namespace {

using test::are_bit_equal;
using test::error_of;
using test::parameters_of;
using test::TemporaryDirectory;
using test::write_bytes;

// The configuration of a model as a hub has it, and its options.
ModelLayerOptions options_of(const std::string& text, int64_t layer = 0,
                             const std::string& part = {}) {
  const TemporaryDirectory directory;
  write_bytes(directory.file("config.json"), text);
  return options_from_config(directory.file("config.json"), layer, part);
}

std::string error_in(const std::string& text, int64_t layer = 0, const std::string& part = {}) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("config.json");
  write_bytes(path, text);
  const std::string error = error_of([&] { options_from_config(path, layer, part); });
  return error.compare(0, path.size() + 2, path + ": ") == 0 ? error.substr(path.size() + 2)
                                                             : error;
}

std::string shown(const Mask& mask) {
  return (std::ostringstream() << mask).str();
}

std::string shown(const std::optional<RotaryOptions>& rotary) {
  return rotary ? (std::ostringstream() << *rotary).str() : "none";
}

const std::string kSizes =
    R"("hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4)";

TEST(ModelConfigTest, BothFormsOfRotaryPositionsAreRead) {
  const std::string older = R"({"model_type": "llama", )" + kSizes +
                            R"(, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3",
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192}})";
  const std::string newer =
      R"({"model_type": "llama", )" + kSizes +
      R"(, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3",
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192}})";
  const ModelLayerOptions options = options_of(older);
  EXPECT_EQ(shown(options.attention.rotary()), shown(options_of(newer).attention.rotary()));
  EXPECT_EQ(shown(options.attention.rotary()),
            shown(RotaryOptions().base(5e5).scaling(
                Llama3Scaling(8, 8192).low_freq_factor(1).high_freq_factor(4))));
  EXPECT_EQ(options.attention.num_heads(), 8);
  EXPECT_EQ(options.attention.num_kv_heads(), 2);
  EXPECT_FALSE(options.attention.bias());
  EXPECT_EQ(options.num_layers, 4);
  EXPECT_EQ(shown(options.mask), shown(Mask::causal()));
  EXPECT_EQ(options.layout, Layout::llama);
  EXPECT_EQ(options.prefixes.front(), "model.layers.0.self_attn");
}

// Gemma 3's sliding layers have a base of their own, and no scaling; the published files have
// no list of kinds.
TEST(ModelConfigTest, SlidingAndFullLayersHaveTheirOwn) {
  const std::string text = R"({"model_type": "gemma3_text", )" + kSizes +
                           R"(, "head_dim": 16, "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 512, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6})";
  const ModelLayerOptions sliding = options_of(text, 1), full = options_of(text, 2);
  EXPECT_EQ(sliding.kind, "sliding_attention");
  EXPECT_EQ(full.kind, "full_attention");
  EXPECT_EQ(shown(sliding.mask), shown(Mask::window(511, 0)));
  EXPECT_EQ(shown(full.mask), shown(Mask::causal()));
  EXPECT_EQ(shown(sliding.attention.rotary()), shown(RotaryOptions()));
  EXPECT_EQ(shown(full.attention.rotary()),
            shown(RotaryOptions().base(1e6).scaling(LinearScaling(8))));
  EXPECT_EQ(sliding.attention.scale(), 0.25);
  EXPECT_EQ(sliding.attention.qk_norm(), QKNorm::rms);
}

TEST(ModelConfigTest, AWrongConfigurationIsRefusedByTheMemberThatIs) {
  const std::string start = R"({"model_type": "llama", )";
  const std::string whole = "a whole number from 1 to 2^31, found ";
  EXPECT_EQ(error_in("{}"), "model_type: expected the name of an architecture, found none");
  EXPECT_EQ(error_in(R"({"model_type": 3})"),
            "model_type: expected the name of an architecture, found number");
  EXPECT_EQ(error_in(R"({"model_type": "llama9"})"),
            "model_type: expected an architecture that is known, found 'llama9'");
  EXPECT_EQ(error_in(R"({"model_type": "any"})"),
            "model_type: expected an architecture that is known, found 'any'");
  EXPECT_EQ(error_in("["), "expected it to begin with '{', found '['");
  EXPECT_EQ(error_in(R"({"model_type": )"), "expected valid JSON, found none");
  EXPECT_EQ(error_in(R"({"model_type": "llama"})"),
            "num_hidden_layers: expected " + whole + "none");
  EXPECT_EQ(error_in(start + R"("num_hidden_layers": 2, "hidden_size": "64"})"),
            "hidden_size: expected " + whole + "'\"64\"'");
  EXPECT_EQ(error_in(start + R"("num_hidden_layers": 2, "hidden_size": -64})"),
            "hidden_size: expected " + whole + "'-64'");
  EXPECT_EQ(error_in(start + R"("num_hidden_layers": 2, "hidden_size": 1e300})"),
            "hidden_size: expected " + whole + "'1e+300'");
  EXPECT_EQ(error_in(start + R"("num_hidden_layers": 2, "hidden_size": 9000000000})"),
            "hidden_size: expected " + whole + "'9000000000'");
  EXPECT_EQ(error_in(start + R"("num_hidden_layers": 2, "hidden_size": {"a": []}})"),
            "hidden_size: expected " + whole + "object");
  const std::string sizes = start + kSizes + ", ";
  EXPECT_EQ(error_in(sizes + R"("attention_bias": 1})"),
            "attention_bias: expected true or false, found '1'");
  EXPECT_EQ(error_in(sizes + R"("num_key_value_heads": 3})"),
            "number of key and value heads: expected a divisor of 8, found 3");
  EXPECT_EQ(error_in(sizes + R"("rope_scaling": {"type": "spiral"}})"),
            "rope_scaling.rope_type: expected default, linear, yarn, llama3, longrope or "
            "proportional, found 'spiral'");
  EXPECT_EQ(error_in(sizes + R"("rope_scaling": {"type": "linear"}})"),
            "rope_scaling.factor: expected a number, found none");
  EXPECT_EQ(error_in(sizes + R"("rope_scaling": {"type": "linear", "factor": -2}})"),
            "rope_scaling.factor: expected a number above 0, found '-2.0'");
  EXPECT_EQ(error_in(sizes + R"("rope_scaling": {"type": "linear", "factor": 2, "twist": 1}})"),
            "rope_scaling: expected numbers that are known, found 'twist'");
  EXPECT_EQ(error_in(sizes + R"("rope_parameters": []})"),
            "rope_parameters: expected an object, found array");
  EXPECT_EQ(error_in(sizes + R"("layer_types": ["full_attention"]})", 1),
            "layer_types: expected an entry for layer 1, found 1");
  EXPECT_EQ(error_in(sizes + R"("layer_types": ["mamba"]})"),
            "layer 0: expected full_attention or sliding_attention, found 'mamba'");
  EXPECT_EQ(error_in(sizes + R"("layer_types": ["sliding_attention"]})"),
            "layer 0: expected a sliding window's size, found none");
  EXPECT_EQ(error_in(sizes + R"("x": 1})", 4), "layer: expected one from 0 to 3, found 4");
  EXPECT_EQ(error_in(sizes + R"("x": 1})", -1), "layer: expected one from 0 to 3, found -1");
  EXPECT_EQ(error_in(sizes + R"("x": 1})", 0, "decoder"),
            "part: expected none, since llama has one attention in a layer, found 'decoder'");
  EXPECT_EQ(error_in(R"({"model_type": "bart"})"),
            "part: expected one of cross, decoder, encoder, found ''");
  EXPECT_EQ(error_in(R"({"model_type": "deepseek_v3"})"),
            "model_type: the attention of deepseek_v3 is latent attention (MLA), which this "
            "module does not compute");
  EXPECT_EQ(error_in(R"({"model_type": "gemma3"})"),
            "text_config: expected an object, found none");
  EXPECT_EQ(error_in(R"({"model_type": "gemma3", "text_config": {"model_type": "gemma3"}})"),
            "model_type of a section: expected one without parts, found 'gemma3'");
  EXPECT_EQ(error_in("{" + std::string(1 << 20, ' ') + "}"),
            "expected a model's configuration of at most 1048576 bytes, found 1048578");
}

// Before anything is computed with them, whatever room checks them.
TEST(ModelConfigTest, ANumberOutOfRangeIsAnErrorOfTheFile) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("config.json");
  const auto is_refused = [&](const std::string& type, const std::string& more) {
    write_bytes(path, R"({"model_type": ")" + type + "\", " + kSizes + ", " + more + "}");
    const std::string error = error_of([&] { options_from_config(path, 0); });
    return error.compare(0, path.size() + 2, path + ": ") == 0
               ? ::testing::AssertionSuccess() << error
               : ::testing::AssertionFailure() << error;
  };
  EXPECT_TRUE(is_refused("llama", R"("rope_theta": -5)"));
  EXPECT_TRUE(is_refused("llama", R"("rope_scaling": {"type": "linear", "factor": 0.5})"));
  EXPECT_TRUE(is_refused("qwen3", R"("rms_norm_eps": 0)"));
  EXPECT_TRUE(is_refused("llama", R"("head_dim": 2147483648)"));
  EXPECT_TRUE(is_refused("mpnet", R"("relative_attention_num_buckets": 7)"));
}

TEST(ModelConfigTest, ThereIsALimitToTheNumberOfLayers) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("config.json");
  const auto with = [&](const std::string& type, const std::string& layers) {
    write_bytes(path, R"({"model_type": ")" + type +
                          R"(", "hidden_size": 64, "num_attention_heads": 8,
                             "num_hidden_layers": )" +
                          layers + "}");
  };
  with("llama", "2147483648");
  const std::string error =
      path + ": num_hidden_layers: expected at most 4096, found 2147483648";
  EXPECT_EQ(error_of([&] { options_from_config(path, 0); }), error);
  EXPECT_EQ(error_of([&] { num_layers_from_config(path); }), error);
  with("llama", "4096");
  EXPECT_EQ(num_layers_from_config(path), 4096);
  // Of which layer 0 is not computed.
  with("lfm2", "3");
  EXPECT_NE(error_of([&] { options_from_config(path, 0); }), "no error");
  EXPECT_EQ(num_layers_from_config(path), 3);
}

TEST(ModelConfigTest, AConditionIsTrueFalseOrANumber) {
  const auto olmo = [](const std::string& value) {
    return error_in(R"({"model_type": "olmo", )" + kSizes + R"(, "clip_qkv": )" + value + "}");
  };
  EXPECT_EQ(olmo("null"), "no error");
  EXPECT_EQ(olmo("false"), "no error");
  EXPECT_EQ(olmo("8.5"),
            "the attention of olmo here clips queries, keys and values (clip_qkv), which this "
            "module does not compute");
  EXPECT_EQ(olmo(R"("false")"),
            "clip_qkv: expected true, false or a number, found '\"false\"'");
  EXPECT_EQ(olmo("[]"), "clip_qkv: expected true, false or a number, found array");
  // Null is as the default.
  EXPECT_EQ(
      error_in(R"({"model_type": "bert", "position_embedding_type": null, )" + kSizes + "}"),
      "no error");
}

TEST(ModelConfigTest, WhatCannotBeComputedIsRefusedByItsMember) {
  const auto is_refused = [](const std::string& text, const std::string& member) {
    return error_in(text).find("(" + member + "), which this module does not compute") !=
           std::string::npos;
  };
  EXPECT_TRUE(
      is_refused(R"({"model_type": "nomic_bert", "rotary_scaling_factor": 2, )" + kSizes + "}",
                 "rotary_scaling_factor"));
  const std::string mpt =
      R"({"model_type": "mpt", "d_model": 64, "n_heads": 8, "n_layers": 2, "attn_config": )";
  EXPECT_TRUE(is_refused(mpt + R"({"prefix_lm": true}})", "prefix_lm"));
  EXPECT_TRUE(is_refused(mpt + R"({"rope": true}})", "rope"));
  EXPECT_EQ(error_in(mpt + R"({"prefix_lm": false, "rope": false}})"), "no error");
}

TEST(ModelConfigTest, LongropeIsReadInBothForms) {
  const std::string factors = R"("short_factor": [1, 1.5, 2, 4], "long_factor": [2, 3, 4, 8])";
  const auto phi3 = [&](const std::string& rope) {
    return R"({"model_type": "phi3", )" + kSizes + R"(, "max_position_embeddings": 128, )" +
           rope + "}";
  };
  const std::string older = phi3(R"("original_max_position_embeddings": 32, "rope_scaling":
    {"type": "su", )" + factors + "}");
  const std::string newer = phi3(R"("rope_parameters": {"rope_type": "longrope",
    "rope_theta": 10000.0, "original_max_position_embeddings": 32, )" +
                                 factors + "}");
  const auto expected = shown(
      RotaryOptions().scaling(LongRopeScaling({1, 1.5, 2, 4}, {2, 3, 4, 8}, 32).factor(4)));
  EXPECT_EQ(shown(options_of(older).attention.rotary()), expected);
  EXPECT_EQ(shown(options_of(newer).attention.rotary()), expected);
  EXPECT_EQ(error_in(phi3(R"("rope_scaling": {"type": "longrope", "short_factor": [1],
                              "long_factor": [1, 1, 1, 1]})")),
            "LongRopeScaling: short_factor: expected a factor for each of 4 pairs, found 1");
  EXPECT_EQ(error_in(phi3(R"("rope_scaling": {"type": "longrope", "short_factor": 2,
                              "long_factor": [1, 1, 1, 1]})")),
            "rope_scaling.short_factor: expected an array of numbers, found '2'");
  EXPECT_EQ(error_in(phi3(R"("rope_scaling": {"type": "yarn", "factor": 2, )" + factors + "}")),
            "rope_scaling: expected numbers that are known, found 'long_factor'");
}

TEST(ModelConfigTest, TheOriginalLengthBesideTheTableGoesBeforeThatInIt) {
  const auto config = [&](const std::string& beside) {
    return R"({"model_type": "llama", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, )" + beside +
           kSizes + R"(, "rope_scaling": {"rope_type": "llama3", "factor": 8,
             "low_freq_factor": 1, "high_freq_factor": 4,
             "original_max_position_embeddings": 64}})";
  };
  const auto length = [](const ModelLayerOptions& options) {
    return std::get<Llama3Scaling>(options.attention.rotary()->scaling())
        .original_max_position();
  };
  EXPECT_EQ(length(options_of(config(""))), 64);
  EXPECT_EQ(length(options_of(config(R"("original_max_position_embeddings": 32, )"))), 32);
}

TEST(ModelConfigTest, AProportionalRotationTurnsThePartThatTheModelSays) {
  const auto config = [&](const std::string& beside) {
    return R"({"model_type": "llama", "rms_norm_eps": 1e-6, )" + beside + kSizes +
           R"(, "rope_parameters": {"rope_type": "proportional", "rope_theta": 10000.0}})";
  };
  const auto turning = [](const ModelLayerOptions& options) {
    const auto& all = options.attention.rotary()->frequencies();
    return all.size() - size_t(std::count(all.begin(), all.end(), 0.0));
  };
  const size_t pairs = turning(options_of(config("")));
  EXPECT_GT(pairs, 1U);
  EXPECT_EQ(turning(options_of(config(R"("partial_rotary_factor": 0.5, )"))), pairs / 2);
  for (const char* wrong : {"-0.5", "2", "1e300"}) {
    EXPECT_NE(error_in(config(std::string(R"("partial_rotary_factor": )") + wrong + ", "))
                  .find("expected a number above 0 and at most 1"),
              std::string::npos);
  }
}

TEST(ModelConfigTest, NumbersOfOneArchitectureAreUnknownToOthers) {
  const auto with = [&](const std::string& type, const std::string& rope) {
    return R"({"model_type": ")" + type + R"(", "rms_norm_eps": 1e-6, )" + kSizes +
           R"(, "rope_parameters": {"rope_theta": 10000.0, )" + rope + "}}";
  };
  const std::string alpha = R"("rope_type": "dynamic", "factor": 1.0, "alpha": 50.0)";
  EXPECT_EQ(shown(options_of(with("hunyuan_v1_dense", alpha)).attention.rotary()),
            shown(RotaryOptions().scaling(NtkScaling(50))));
  EXPECT_NE(error_in(with("llama", alpha)).find("found 'dynamic'"), std::string::npos);
  const std::string beta = R"("original_max_position_embeddings": 16, "factor": 4,
    "rope_type": "yarn", "llama_4_scaling_beta": 0.25)";
  const auto ministral = options_of(with("ministral3", R"("rope_type": "default",
    "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.25)"));
  ASSERT_TRUE(ministral.attention.temperature_tuning().has_value());
  EXPECT_EQ(ministral.attention.temperature_tuning()->scale(), 0.25);
  EXPECT_EQ(ministral.attention.temperature_tuning()->floor_scale(), 16);
  EXPECT_EQ(error_in(with("mistral", beta)),
            "rope_parameters: expected numbers that are known, found 'llama_4_scaling_beta'");
  const std::string older =
      R"({"model_type": "ministral3", )" + kSizes + R"(, "rope_scaling": {)" + beta + "}}";
  EXPECT_EQ(options_of(older).attention.temperature_tuning()->scale(), 0.25);
  EXPECT_EQ(error_in(R"({"model_type": "ministral3", )" + kSizes + "}"),
            "rope_parameters.llama_4_scaling_beta: expected a finite number, found 'null'");
}

TEST(ModelConfigTest, KindsOfLayersDifferInMoreThanTheirMask) {
  const std::string llama4 = R"({"model_type": "llama4_text", "rms_norm_eps": 1e-5,
    "no_rope_layers": [], )" +
                             kSizes + "}";
  const auto chunked = options_of(llama4, 2), full = options_of(llama4, 3);
  EXPECT_EQ(chunked.kind, "chunked_attention");
  EXPECT_EQ(chunked.chunk, 8192);
  EXPECT_EQ(chunked.attention.qk_norm_gain(), QKNormGain::none);
  EXPECT_FALSE(chunked.attention.temperature_tuning().has_value());
  EXPECT_EQ(full.kind, "full_attention");
  EXPECT_FALSE(full.chunk.has_value());
  EXPECT_FALSE(full.attention.rotary().has_value());
  EXPECT_EQ(full.attention.qk_norm(), QKNorm::none);
  EXPECT_EQ(full.attention.temperature_tuning()->floor_scale(), 8192);
  EXPECT_EQ(error_in(R"({"model_type": "llama4_text", "rms_norm_eps": 1e-5,
    "layer_types": ["chunked_attention"], "attention_chunk_size": null, )" +
                     kSizes + "}"),
            "layer 0: expected attention_chunk_size beside chunked_attention, found none");
  // A query at position 4 of chunks of 3 sees 3 and 4.
  ModelLayer layer{chunked};
  layer.options.chunk = 3;
  MultiHeadAttention module(4, 1);
  const auto x = at::ones({1, 5, 4});
  EXPECT_TRUE(at::allclose(module->forward(x, x, x, layer.mask(5, 5)).weights[0][0][4],
                           at::tensor({0.0F, 0.0F, 0.0F, 0.5F, 0.5F})));

  const std::string mimo = R"({"model_type": "mimo_v2_flash", "head_dim": 24, "v_head_dim": 16,
    "attention_value_scale": null, "rope_theta": 5e6, "swa_rope_theta": 20000,
    "sliding_window": 3, "sliding_window_size": 3, )" +
                           kSizes + "}";
  const auto first = options_of(mimo, 0), second = options_of(mimo, 1);
  EXPECT_EQ(first.attention.num_kv_heads(), 2);
  EXPECT_EQ(second.attention.num_kv_heads(), 4);
  EXPECT_EQ(first.attention.rotary()->base(), 5e6);
  EXPECT_EQ(second.attention.rotary()->base(), 20000);
  EXPECT_EQ(shown(second.mask), shown(Mask::window(3, 0)));
  EXPECT_FALSE(first.attention.sinks());
  EXPECT_TRUE(second.attention.sinks());
  EXPECT_EQ(second.attention.v_head_dim(), 16);
  EXPECT_EQ(second.attention.value_scale(), 1);
}

TEST(ModelConfigTest, PartsOfHeadsAreRotatedWhereTheFileSaysSo) {
  const ModelLayerOptions phi3 = options_of(
      R"({"model_type": "phi3", "hidden_size": 128, "num_attention_heads": 8,
          "num_hidden_layers": 2, "partial_rotary_factor": 0.75})");
  EXPECT_EQ(shown(phi3.attention.rotary()), shown(RotaryOptions().rotary_dim(12)));
}

// As transformers fills them in.
TEST(ModelConfigTest, ASectionOfAnEmptyObjectHasTheDefaultsOfItsModel) {
  const auto sizes = [](const std::string& type, const std::string& part) {
    const auto options = options_of(
        R"({"model_type": ")" + type + R"(", "text_config": {}, "vision_config": {}})", 0,
        part);
    return std::vector<int64_t>{options.attention.d_model(), options.attention.num_heads(),
                                options.attention.num_kv_heads().value_or(0),
                                options.num_layers};
  };
  EXPECT_EQ(sizes("gemma3", "text"), (std::vector<int64_t>{2304, 8, 4, 26}));
  EXPECT_EQ(sizes("clip", "text"), (std::vector<int64_t>{512, 8, 0, 12}));
  EXPECT_EQ(sizes("clip", "vision"), (std::vector<int64_t>{768, 12, 0, 12}));
  EXPECT_EQ(sizes("siglip", "text"), (std::vector<int64_t>{768, 12, 0, 12}));
  EXPECT_EQ(sizes("siglip", "vision"), (std::vector<int64_t>{768, 12, 0, 12}));
}

TEST(ModelConfigTest, ALayerLiesWhereItsModelPutsIt) {
  EXPECT_EQ(options_of(R"({"model_type": "ijepa", )" + kSizes + "}", 1).prefixes,
            (std::vector<std::string>{"ijepa.encoder.layer.1.attention",
                                      "encoder.layer.1.attention"}));
}

TEST(ModelConfigTest, AConfigurationMayBeginWithWhiteSpace) {
  EXPECT_EQ(error_in("\n\t\r {\"model_type\": \"llama\", " + kSizes + "}\n"), "no error");
  EXPECT_EQ(error_in(" \n"), "expected it to begin with '{', found ''");
}

TEST(ModelConfigTest, DeepTextsAreRefusedAndDoNotExhaustTheStack) {
  const auto nested = [](size_t levels) {
    return R"({"model_type": "llama", "num_hidden_layers": )" + std::string(levels, '[') +
           std::string(levels, ']') + "}";
  };
  EXPECT_EQ(error_in(nested(500000)), "expected JSON of at most 32 levels, found more");
  EXPECT_EQ(error_in(nested(20)),
            "num_hidden_layers: expected a whole number from 1 to 2^31, found array");
}

// Whatever the bytes are, there are options or there is an error.
TEST(ModelConfigTest, AChangedConfigurationIsReadOrRefused) {
  const std::string good = R"({"model_type": "gemma3", "text_config": {"model_type":
    "gemma3_text", "head_dim": 16, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    "layer_types": ["sliding_attention", "full_attention"], "rope_scaling": {"rope_type":
    "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32},
    "sliding_window": 512, "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6, )" +
                           kSizes + "}}";
  ASSERT_EQ(error_in(good, 1), "no error");
  const TemporaryDirectory directory;
  const std::string path = directory.file("config.json");
  std::mt19937 random(4);
  const auto below = [&](size_t n) { return random() % n; };
  size_t refused = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string text = good;
    for (size_t change = 0; change <= below(3); ++change) {
      const char byte = "0123456789-.e\"{}[]:,ntf\x80\xff"[below(26)];
      text[below(text.size())] = byte;
    }
    if (below(4) == 0) text.erase(below(text.size()), below(40));
    write_bytes(path, text);
    refused += error_of([&] { options_from_config(path, 1); }) != "no error";
  }
  EXPECT_GT(refused, 500U);
}

// A model's folder with the weights of `module`.
void write_model(const TemporaryDirectory& directory, const MultiHeadAttention& module,
                 const std::string& config) {
  save(module, directory.file("model.safetensors"),
       WeightFileOptions().prefix("model.layers.1.self_attn").layout(Layout::llama));
  // What another program leaves, which is no metadata of ours.
  auto file = detail::read_safetensors(directory.file("model.safetensors"));
  file.metadata.clear();
  detail::write_safetensors(directory.file("model.safetensors"), file);
  write_bytes(directory.file("config.json"), config);
}

TEST(ModelConfigTest, ALayerIsLoadedFromAModelsFolder) {
  const TemporaryDirectory directory;
  const MultiHeadAttention module(
      MultiHeadAttentionOptions(64, 8).num_kv_heads(2).bias(false).rotary(RotaryOptions()));
  write_model(directory, module,
              R"({"model_type": "mistral", "sliding_window": 3, )" + kSizes + "}");
  const std::string folder = std::filesystem::path(directory.file("x")).parent_path().string();
  ModelLayer layer = load_layer(folder, 1);
  EXPECT_TRUE(are_bit_equal(parameters_of(*layer.attention), parameters_of(*module)));
  EXPECT_FALSE(layer.attention->is_training());
  EXPECT_EQ(shown(layer.mask(5, 5)), shown(Mask::window(2, 0)));
  EXPECT_EQ(layer.options.prefixes, (std::vector<std::string>{"model.layers.1.self_attn"}));
  const ModelLayer half = load_layer(folder, 1, ModelLayerLoadOptions().dtype(at::kBFloat16));
  EXPECT_EQ(half.attention->W_q->weight.scalar_type(), at::kBFloat16);

  const std::string weights = directory.file("model.safetensors");
  EXPECT_EQ(error_of([&] { load_layer(folder, 0); }),
            weights +
                ": expected the llama layer of a mistral at 'model.layers.0.self_attn' or "
                "'layers.0.self_attn' or 'model.language_model.layers.0.self_attn' or "
                "'language_model.model.layers.0.self_attn', found none");
  // Weights that are not those that the configuration tells of: nothing as large is made.
  write_bytes(directory.file("config.json"),
              R"({"model_type": "mistral", "hidden_size": 1048576, "num_attention_heads": 8,
                  "num_hidden_layers": 2, "sliding_window": null})");
  const std::string error = error_of([&] { load_layer(folder, 1); });
  EXPECT_NE(error.find("'model.layers.1.self_attn.q_proj.weight': expected [1048576, "
                       "1048576], found [64, 64]"),
            std::string::npos)
      << error;
  std::filesystem::remove(weights);
  EXPECT_EQ(error_of([&] { load_layer(folder, 1); }),
            folder +
                ": expected a model's weights in one of model.safetensors, "
                "model.safetensors.index.json, pytorch_model.bin, "
                "pytorch_model.bin.index.json, found none");
}

}  // namespace
}  // namespace mha
