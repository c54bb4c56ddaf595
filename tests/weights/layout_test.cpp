// Guards the layouts of other models: which numbers stand where under which names, grouped
// heads, files of another dtype, models in several files, and modules built from a file alone.
// Weights are copied, so everything is exact.
#include <gtest/gtest.h>
#include <mha/weight_file.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <sstream>

#include "files/safetensors.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"
#include "support/weight_file_support.h"

namespace mha {
namespace {

using detail::read_safetensors;
using detail::TensorFile;
using detail::write_safetensors;
using test::are_bit_equal;
using test::error_of;
using test::is_bit_equal;
using test::layout_cases;
using test::parameters_of;
using test::read_bytes;
using test::TemporaryDirectory;
using test::Tensors;
using test::write_bytes;

std::string shown(const MultiHeadAttention& module) {
  return (std::ostringstream() << module).str();
}

Tensors saved_as(const MultiHeadAttention& module, Layout layout) {
  const TemporaryDirectory directory;
  save(module, directory.file("x"), WeightFileOptions().layout(layout));
  return read_safetensors(directory.file("x")).tensors;
}

TEST(LayoutTest, Gpt2PacksTheInputsAndTransposesTheLayers) {
  const MultiHeadAttention module(12, 3);
  auto p = parameters_of(*module);
  EXPECT_TRUE(are_bit_equal(
      saved_as(module, Layout::gpt2),
      {{"c_attn.weight",
        torch::cat({p["W_q.weight"].t(), p["W_k.weight"].t(), p["W_v.weight"].t()}, 1)},
       {"c_attn.bias", torch::cat({p["W_q.bias"], p["W_k.bias"], p["W_v.bias"]})},
       {"c_proj.weight", p["W_o.weight"].t()},
       {"c_proj.bias", p["W_o.bias"]}}));
}

TEST(LayoutTest, VitPacksTheInputs) {
  const MultiHeadAttention module(12, 3);
  auto p = parameters_of(*module);
  EXPECT_TRUE(are_bit_equal(
      saved_as(module, Layout::vit),
      {{"qkv.weight", torch::cat({p["W_q.weight"], p["W_k.weight"], p["W_v.weight"]})},
       {"qkv.bias", torch::cat({p["W_q.bias"], p["W_k.bias"], p["W_v.bias"]})},
       {"proj.weight", p["W_o.weight"]},
       {"proj.bias", p["W_o.bias"]}}));
}

// In timm's form, with its `qk_norm`.
TEST(LayoutTest, VitNormalisesQueriesAndKeysWithBiases) {
  const MultiHeadAttention module(
      MultiHeadAttentionOptions(12, 3).qk_norm(QKNorm::layer).qk_norm_bias(true));
  module->k_norm_bias.detach().normal_();
  auto p = parameters_of(*module);
  const auto saved = saved_as(module, Layout::vit);
  EXPECT_EQ(saved.size(), 8u);
  EXPECT_TRUE(is_bit_equal(saved.at("q_norm.weight"), p["q_norm"]));
  EXPECT_TRUE(is_bit_equal(saved.at("k_norm.bias"), p["k_norm_bias"]));
  const TemporaryDirectory directory;
  write_safetensors(directory.file("x"), {saved, {}});
  const auto loaded = load(directory.file("x"), 3);
  EXPECT_EQ(loaded->options.qk_norm(), QKNorm::layer);
  EXPECT_TRUE(are_bit_equal(parameters_of(*loaded), p));
  EXPECT_EQ(error_of([&] {
              save(module, directory.file("y"), WeightFileOptions().layout(Layout::llama));
            }),
            directory.file("y") +
                ": the llama layout has no place for q_norm_bias, found a module with "
                "qk_norm_bias");
}

TEST(LayoutTest, LlamaNamesFourLayersOfWhichTwoHaveGroupedHeads) {
  const MultiHeadAttention module(MultiHeadAttentionOptions(12, 6).num_kv_heads(2).bias(false));
  auto p = parameters_of(*module);
  EXPECT_EQ(p["W_k.weight"].sizes(), at::IntArrayRef({4, 12}));
  EXPECT_TRUE(
      are_bit_equal(saved_as(module, Layout::llama), {{"q_proj.weight", p["W_q.weight"]},
                                                      {"k_proj.weight", p["W_k.weight"]},
                                                      {"v_proj.weight", p["W_v.weight"]},
                                                      {"o_proj.weight", p["W_o.weight"]}}));
}

// As Qwen2 has them.
TEST(LayoutTest, InTheLlamaLayoutTheOutputMayLackTheBiasThatTheInputsHave) {
  const MultiHeadAttention module(
      MultiHeadAttentionOptions(12, 6).num_kv_heads(2).output_bias(false));
  auto p = parameters_of(*module);
  const Tensors expected{{"q_proj.weight", p["W_q.weight"]}, {"k_proj.weight", p["W_k.weight"]},
                         {"v_proj.weight", p["W_v.weight"]}, {"o_proj.weight", p["W_o.weight"]},
                         {"q_proj.bias", p["W_q.bias"]},     {"k_proj.bias", p["W_k.bias"]},
                         {"v_proj.bias", p["W_v.bias"]}};
  EXPECT_TRUE(are_bit_equal(saved_as(module, Layout::llama), expected));

  const TemporaryDirectory directory;
  const std::string path = directory.file("x");
  write_safetensors(path, {expected, {}});  // without metadata, as other programs do
  const auto options = options_from_file(path, 6);
  EXPECT_TRUE(options.bias());
  EXPECT_EQ(options.output_bias(), false);
  const auto loaded = load(path, 6);
  EXPECT_FALSE(loaded->W_o->bias.defined());
  EXPECT_TRUE(are_bit_equal(parameters_of(*loaded), p));
}

TEST(LayoutTest, AModuleIsBuiltFromAFileAloneAndSavedAgainAsEqualBytes) {
  const TemporaryDirectory directory;
  const std::string first = directory.file("first"), second = directory.file("second");
  for (const auto& [base, layout] : layout_cases()) {
    auto options = base;
    options.dropout(0.1).scale(0.3).add_zero_attn(true).batch_first(false);
    options.weights(Weights::none).weights_after_dropout(true).dtype(at::kDouble);
    const MultiHeadAttention saved(options);
    SCOPED_TRACE((std::ostringstream() << layout << " " << saved).str());
    const auto where = WeightFileOptions().prefix("p").layout(layout);
    save(saved, first, where);
    torch::manual_seed(3);
    const auto next_number = torch::rand({1});
    torch::manual_seed(3);
    const MultiHeadAttention loaded =
        load(first, std::nullopt, WeightFileOptions().prefix("p"));
    EXPECT_TRUE(is_bit_equal(torch::rand({1}), next_number));
    EXPECT_EQ(shown(loaded), shown(saved));
    EXPECT_TRUE(are_bit_equal(parameters_of(*loaded), parameters_of(*saved)));
    save(loaded, second, where);
    EXPECT_EQ(read_bytes(second), read_bytes(first));
  }
}

// As a loader of a whole model would meet them.
TEST(LayoutTest, WhatOtherModelsKeepBesideTheirAttentionIsPassedOver) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("model");
  const auto loads = [&](Layout layout, const Tensors& beside) {
    const MultiHeadAttention module(12, 3);
    TensorFile file;
    for (const auto& [name, tensor] : saved_as(module, layout))
      file.tensors["m." + name] = tensor;
    for (const auto& [name, tensor] : beside) file.tensors["m." + name] = tensor;
    write_safetensors(path, file);
    const auto where = WeightFileOptions().prefix("m");
    return are_bit_equal(parameters_of(*load(path, 3, where)), parameters_of(*module));
  };
  EXPECT_TRUE(loads(Layout::gpt2, {{"bias", torch::ones({1, 1, 4, 4})},
                                   {"masked_bias", torch::tensor(-1e4f)}}));
  EXPECT_TRUE(loads(Layout::llama, {{"rotary_emb.inv_freq", torch::ones({2})}}));
  EXPECT_TRUE(loads(Layout::bert, {{"output.LayerNorm.weight", torch::ones({12})}}));
  EXPECT_TRUE(loads(Layout::bert, {{"self.rotary_embeddings.inv_freq", torch::ones({2})}}));
  EXPECT_NE(error_of([&] {
              (void)loads(Layout::vit, {{"norm.weight", torch::ones({4})}});
            }).find("unexpected: 'm.norm.weight'"),
            std::string::npos);
}

TEST(LayoutTest, ALayoutRefusesAModuleThatItCannotExpress) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x");
  const auto error = [&](const MultiHeadAttentionOptions& options, Layout layout) {
    return error_of([&] {
             save(MultiHeadAttention(options), path, WeightFileOptions().layout(layout));
           })
        .substr(path.size() + 2);
  };
  const MultiHeadAttentionOptions plain(12, 6);
  const auto grouped = MultiHeadAttentionOptions(plain).num_kv_heads(2);
  for (const Layout& layout : {Layout::torch, Layout::bert, Layout::gpt2, Layout::vit}) {
    EXPECT_EQ(error(grouped, layout),
              (std::ostringstream()
               << "the " << layout
               << " layout needs num_kv_heads = num_heads, found projections of width 12 and 4")
                  .str());
  }
  for (const Layout& layout : {Layout::gpt2, Layout::vit}) {
    const std::string start = (std::ostringstream() << "the " << layout << " layout ").str();
    EXPECT_EQ(error(MultiHeadAttentionOptions(plain).kdim(7), layout),
              start + "needs kdim = vdim = d_model, found 7, 12 and 12");
    EXPECT_EQ(error(MultiHeadAttentionOptions(plain).head_dim(5), layout),
              start + "needs num_heads * head_dim = d_model, found 30 and 12");
  }
  EXPECT_EQ(error(MultiHeadAttentionOptions(plain).v_head_dim(5), Layout::named("phi3")),
            "the phi3 layout needs v_head_dim = head_dim, found heads of widths 12 and 30");
  for (const Layout& layout : {Layout::gpt2, Layout::vit, Layout::llama}) {
    EXPECT_EQ(error(MultiHeadAttentionOptions(plain).add_bias_kv(true), layout),
              (std::ostringstream() << "the " << layout
                                    << " layout has no place for bias_k and bias_v, found a "
                                       "module with add_bias_kv")
                  .str());
  }
  for (const Layout& layout : {Layout::torch, Layout::bert, Layout::gpt2}) {
    const std::string start =
        (std::ostringstream() << "the " << layout
                              << " layout needs biases of all projections or of none, found a "
                                 "module with ")
            .str();
    EXPECT_EQ(error(MultiHeadAttentionOptions(plain).output_bias(false), layout),
              start + "all but that of W_o");
    EXPECT_EQ(error(MultiHeadAttentionOptions(plain).bias(false).output_bias(true), layout),
              start + "that of W_o alone");
  }
  EXPECT_EQ(directory.count(), 0);
}

TEST(LayoutTest, ALayoutIsOneOfThoseThatThereAre) {
  EXPECT_EQ(Layout::named("phi3").name(), "phi3");
  const std::string error = error_of([] { Layout::named("phi33"); });
  EXPECT_EQ(error.substr(0, 50), "layout: expected one of native, torch, bert, gpt2,");
  EXPECT_NE(error.find(", found 'phi33'"), std::string::npos);
}

// A layer of every kind that a layout may have a place for.
MultiHeadAttentionOptions options_for(const Layout& layout) {
  const LayoutDescription& description = layout.description();
  const auto holds = [&](const std::string& parameter) {
    return std::any_of(description.tensors.begin(), description.tensors.end(),
                       [&](const LayoutTensor& tensor) {
                         const auto& held = tensor.parameters;
                         return std::find(held.begin(), held.end(), parameter) != held.end();
                       });
  };
  MultiHeadAttentionOptions options(16, 4);
  if (description.grouped_heads) options.num_kv_heads(2);
  if (description.free_head_dim) options.head_dim(6);
  if (holds("q_norm")) {
    options.qk_norm(holds("q_norm_bias") ? QKNorm::layer : QKNorm::rms)
        .qk_norm_bias(holds("q_norm_bias"));
  }
  const bool has_one_for_each = std::any_of(
      description.tensors.begin(), description.tensors.end(),
      [](const LayoutTensor& tensor) { return tensor.name.find("{}") != std::string::npos; });
  if (has_one_for_each) options.qk_norm_gain(QKNormGain::per_head);
  if (holds("W_g.weight")) options.output_gate(OutputGate::elementwise);
  return options.sinks(holds("sinks"));
}

// What a layout makes of a layer, by a loop over rows that shares nothing with `save`.
at::Tensor stacked_by_rows(const LayoutTensor& tensor, const Tensors& parameters) {
  const int64_t blocks = tensor.packing == Packing::groups  ? 2
                         : tensor.packing == Packing::heads ? 4
                                                            : tensor.repeats;
  std::vector<at::Tensor> rows;
  for (int64_t block = 0; block < blocks; ++block) {
    for (const std::string& name : tensor.parameters) {
      const at::Tensor& parameter = parameters.at(name);
      const int64_t share = parameter.size(0) / blocks;
      for (int64_t row = 0; row < share; ++row) rows.push_back(parameter[block * share + row]);
    }
  }
  const at::Tensor stacked = torch::stack(rows) - tensor.plus;
  return tensor.transposed ? stacked.t() : stacked;
}

TEST(LayoutTest, EveryLayoutIsWrittenAsItsDescriptionSaysAndReadBack) {
  for (const Layout& layout : Layout::built_in()) {
    SCOPED_TRACE(layout.name());
    torch::manual_seed(3);
    MultiHeadAttention module(options_for(layout));
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : module->named_parameters()) parameter->uniform_(0.5, 1.5);
      const std::set<std::string> without_key_bias = {"whisper", "beit", "videomae"};
      if (without_key_bias.count(layout.name()) != 0) module->W_k->bias.zero_();
    }
    const Tensors parameters = parameters_of(*module);
    Tensors expected;
    for (const LayoutTensor& tensor : layout.description().tensors) {
      const auto parameter = parameters.find(tensor.parameters[0]);
      if (parameter == parameters.end()) continue;
      const size_t number = tensor.name.find("{}");
      if (number == std::string::npos) {
        expected[tensor.name] = stacked_by_rows(tensor, parameters);
        continue;
      }
      for (int64_t head = 0; head < parameter->second.size(0); ++head) {
        std::string name = tensor.name;
        expected[name.replace(number, 2, std::to_string(head))] = parameter->second[head];
      }
    }
    EXPECT_TRUE(are_bit_equal(saved_as(module, layout), expected));

    const TemporaryDirectory directory;
    const std::string path = directory.file("x");
    auto where = WeightFileOptions().prefix("model.layers.3.attention");
    save(module, path, WeightFileOptions(where).layout(layout));
    // Its names tell it, unless they are another's.
    if (!layout.description().told_by_names) where.layout(layout);
    auto read = load(path, std::nullopt, where);
    for (const auto& [name, parameter] : parameters_of(*read)) {
      EXPECT_TRUE(torch::allclose(parameter, parameters.at(name), 0, 2e-7)) << name;
    }
    EXPECT_EQ(read->named_parameters().size(), module->named_parameters().size());
  }
}

TEST(LayoutTest, ABiasThatALayoutHasNoPlaceForMustBeZero) {
  const MultiHeadAttention module(12, 3);
  EXPECT_NE(error_of([&] {
              saved_as(module, Layout::named("whisper"));
            }).find("the whisper layout has no place for W_k.bias, found one that is not zero"),
            std::string::npos);
}

TEST(LayoutTest, ALayoutOfOnesOwnIsReadFromAFileOrMadeInCode) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("mine.json");
  write_bytes(path, R"({"name": "mine", "ignored": ["rotary.*"],
    "tensors": [{"name": "qkv", "holds": ["W_q", "W_k", "W_v"], "packing": "groups"},
                {"name": "out", "holds": "W_o", "transposed": true},
                {"name": "q_gain", "holds": "q_norm", "plus": 1},
                {"name": "k_gain", "holds": "k_norm", "plus": 1}]})");
  const Layout from_file = Layout::from_file(path);
  LayoutDescription description;
  description.name = "mine";
  description.ignored = {"rotary.*"};
  const std::vector<std::string> weights = {"W_q.weight", "W_k.weight", "W_v.weight"},
                                 biases = {"W_q.bias", "W_k.bias", "W_v.bias"};
  description.tensors = {{"qkv.weight", weights, false, Packing::groups},
                         {"qkv.bias", biases, false, Packing::groups},
                         {"out.weight", {"W_o.weight"}, true},
                         {"out.bias", {"W_o.bias"}},
                         {"q_gain", {"q_norm"}, false, Packing::rows, 1, 1.0},
                         {"k_gain", {"k_norm"}, false, Packing::rows, 1, 1.0}};
  const Layout in_code(description);
  const MultiHeadAttention module(
      MultiHeadAttentionOptions(12, 6).num_kv_heads(2).qk_norm(QKNorm::rms));
  const Tensors saved = saved_as(module, from_file);
  EXPECT_TRUE(are_bit_equal(saved, saved_as(module, in_code)));
  EXPECT_EQ(saved.at("qkv.weight").sizes(), (std::vector<int64_t>{20, 12}));
  EXPECT_TRUE(torch::equal(saved.at("q_gain"), torch::zeros({2})));
  save(module, directory.file("x"), WeightFileOptions().layout(in_code));
  auto read = load(directory.file("x"), std::nullopt, WeightFileOptions().layout(from_file));
  EXPECT_TRUE(are_bit_equal(parameters_of(*read), parameters_of(*module)));
}

// A layout that holds W_q to W_o as `native` does, but for what is given.
Layout own_layout(const std::string& query, const std::string& rest,
                  const std::string& output = R"({"name": "W_o"})") {
  const TemporaryDirectory directory;
  const std::string path = directory.file("mine.json");
  write_bytes(path, R"({"name": "mine", "tensors": [)" + query +
                        R"(, {"name": "W_k"}, {"name": "W_v"}, )" + output + rest + "]}");
  return Layout::from_file(path);
}

// Neither lost by `save` nor left undefined by `load`.
TEST(LayoutTest, AParameterThatALayoutHasNoPlaceForIsRefused) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x"), found = directory.file("found");
  const std::string query = R"({"name": "W_q"})",
                    no_place = ": the mine layout has no place for ";
  const auto refused = [&](const Layout& layout, const MultiHeadAttentionOptions& options) {
    MultiHeadAttention module(options);
    const auto where = WeightFileOptions().layout(layout);
    const std::string error = error_of([&] { save(module, path, where); });
    EXPECT_EQ(directory.count(), 0);
    save(module, found);
    EXPECT_EQ(error_of([&] { load(module, found, where); }),
              found + error.substr(std::min(error.size(), path.size())));
    EXPECT_NE(error_of([&] { load(found, std::nullopt, where); }), "no error");
    std::remove(found.c_str());
    return error.substr(std::min(error.size(), path.size()));
  };
  const MultiHeadAttentionOptions plain(12, 3);
  EXPECT_EQ(refused(own_layout(R"({"name": "W_q", "bias": false})", ""), plain),
            no_place + "W_q.bias");
  EXPECT_EQ(refused(own_layout(query, R"(, {"name": "q_norm"})"),
                    MultiHeadAttentionOptions(plain).qk_norm(QKNorm::rms)),
            no_place + "k_norm");
  EXPECT_EQ(refused(own_layout(query, R"(, {"name": "bias_k"})"),
                    MultiHeadAttentionOptions(plain).add_bias_kv(true)),
            no_place + "bias_v");
  EXPECT_EQ(refused(own_layout(R"({"name": "W_q", "holds": ["W_g", "W_q"]})", ""), plain),
            ": the mine layout needs W_g.weight, found a module without");
}

TEST(LayoutTest, ABiasOfTheOutputWithoutAPlaceIsZero) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x");
  const Layout layout =
      own_layout(R"({"name": "W_q"})", "", R"({"name": "out", "holds": "W_o", "bias": false})");
  const auto where = WeightFileOptions().layout(layout);
  MultiHeadAttention module(12, 3);
  module->W_o->bias.detach().fill_(1);
  EXPECT_EQ(error_of([&] { save(module, path, where); }),
            path + ": the mine layout has no place for W_o.bias, found one that is not zero");
  module->W_o->bias.detach().zero_();
  save(module, path, where);
  MultiHeadAttention other(12, 3);
  other->W_o->bias.detach().fill_(1);
  load(other, path, where);
  EXPECT_TRUE(are_bit_equal(parameters_of(*other), parameters_of(*module)));
}

// What has a place in `tensors_apart` alone is read where these are in use.
TEST(LayoutTest, ABiasIsReadWhereTheTensorsInUseHoldIt) {
  const TemporaryDirectory directory;
  const std::string file = directory.file("mine.json"), path = directory.file("x");
  write_bytes(file, R"({"name": "mine",
    "tensors": [{"name": "W_q"}, {"name": "W_k", "bias": false}, {"name": "W_v"}, {"name": "W_o"}],
    "tensors_apart": [{"name": "W_q"}, {"name": "W_k"}, {"name": "W_v"}, {"name": "W_o"}]})");
  const auto where = WeightFileOptions().layout(Layout::from_file(file));
  const auto options = MultiHeadAttentionOptions(12, 3).kdim(5);
  const MultiHeadAttention module(options);
  module->W_k->bias.detach().fill_(2);
  save(module, path, where);
  MultiHeadAttention other(options);
  load(other, path, where);
  EXPECT_TRUE(are_bit_equal(parameters_of(*other), parameters_of(*module)));
}

TEST(LayoutTest, ALayoutThatMakesNoSenseIsRefusedByName) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("mine.json");
  const auto error = [&](const std::string& text) {
    write_bytes(path, text);
    const std::string found = error_of([&] { Layout::from_file(path); });
    return found.substr(std::min(found.size(), path.size()));
  };
  const std::string rest =
      R"({"name": "k", "holds": "W_k"}, {"name": "v", "holds": "W_v"}, {"name": "o", "holds": "W_o"}])";
  const auto with = [&](const std::string& tensor) {
    return error(R"({"name": "mine", "tensors": [)" + tensor + ", " + rest + "}");
  };
  with(R"({"name": "q", "holds": "W_q"})");
  EXPECT_EQ(Layout::from_file(path).name(), "mine");
  EXPECT_EQ(with(R"({"name": "q", "holds": "q_norm"})"),
            ": layout 'mine': expected a tensor that holds W_q.weight, found none");
  EXPECT_EQ(with(R"({"name": "q", "holds": ["W_q", "W_k"]})"),
            ": layout 'mine': tensor 'k.weight': expected one place for W_k.weight, found two");
  EXPECT_EQ(with(R"({"name": "k", "holds": "W_q"})"),
            ": layout 'mine': tensor 'k.weight': expected one of that name, found two");
  EXPECT_EQ(with(R"({"name": "q", "holds": "W_x"})"),
            ": layout 'mine': tensor 'q.weight': expected parameters of the module, found "
            "'W_x.weight'");
  EXPECT_EQ(with(R"({"name": "q", "holds": "W_q", "plus": 1})"),
            ": layout 'mine': tensor 'q.weight': plus: expected a finite number, of what is no "
            "projection, found 1");
  EXPECT_EQ(with(R"({"name": "q", "holds": "W_q", "packing": "columns"})"),
            ": tensors[0].packing: expected \"rows\", \"groups\" or \"heads\", found "
            "'\"columns\"'");
  EXPECT_EQ(with(R"({"name": "q", "holds": 3})"),
            ": tensors[0].holds: expected a string or an array of strings, found '3'");
  EXPECT_EQ(with(R"({"name": "q", "holds": "W_q", "repeats": 0})"),
            ": tensors[0].repeats: expected a whole number from 1 to 1024, found '0'");
  EXPECT_EQ(with(R"({"names": "q"})"),
            ": tensors[0]: expected name, holds, transposed, packing, repeats, plus or bias, "
            "found 'names'");
  EXPECT_EQ(
      error(R"({"name": "bert", "tensors": [{"name": "q", "holds": "W_q"}, )" + rest + "}"),
      ": layout: expected a name that no built-in one has, found 'bert'");
  EXPECT_EQ(error("{"), ": expected valid JSON, found none");
  EXPECT_EQ(error("[]"), ": expected it to begin with '{', found '['");
  EXPECT_EQ(error(R"({"tensors": {}})"),
            ": tensors: expected an array of objects, found object");
}

TEST(LayoutTest, NumbersOfHeadsThatDoNotFitTheShapesAreRefused) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x");
  save(MultiHeadAttention(MultiHeadAttentionOptions(12, 6).num_kv_heads(2)), path);
  TensorFile file = read_safetensors(path);
  const auto error = [&](std::optional<int64_t> heads) {
    write_safetensors(path, file);
    return error_of([&] { options_from_file(path, heads); }).substr(path.size() + 2);
  };
  file.metadata["mha.num_kv_heads"] = "3";
  EXPECT_EQ(error(std::nullopt),
            "num_kv_heads: expected 2 by the shapes, found 3 in the metadata");
  MultiHeadAttention module(MultiHeadAttentionOptions(12, 6).num_kv_heads(2));
  EXPECT_EQ(error_of([&] { load(module, path); }),
            path +
                ": the native layer at prefix '' does not fit:\n"
                "  num_kv_heads: expected 2, found 3 in the metadata");
  file.metadata["mha.num_kv_heads"] = "two";
  EXPECT_EQ(error(std::nullopt),
            "metadata 'mha.num_kv_heads': expected a whole number above 0, found 'two'");
  file.metadata.clear();
  EXPECT_EQ(error(2),
            "num_heads: expected one that makes whole groups of the heads in 4 of 12 "
            "columns of keys, found 2");
  write_safetensors(path, file);
  EXPECT_EQ(options_from_file(path, 3).num_kv_heads(), 1);
  EXPECT_EQ(options_from_file(path, 6).num_kv_heads(), 2);
}

TEST(ConvertDtypeTest, AFileOfAnotherDtypeIsConvertedOnlyWhenAsked) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x");
  const at::ScalarType dtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  for (const at::ScalarType from : dtypes) {
    const MultiHeadAttention saved(MultiHeadAttentionOptions(8, 2).dtype(from));
    save(saved, path);
    for (const at::ScalarType to : dtypes) {
      MultiHeadAttention module(MultiHeadAttentionOptions(8, 2).dtype(to));
      const Tensors before = parameters_of(*module);
      if (from != to) {
        const std::string error = error_of([&] { load(module, path); });
        EXPECT_NE(error.find(", which convert_dtype(true) would convert"), std::string::npos)
            << error;
        EXPECT_TRUE(are_bit_equal(parameters_of(*module), before));
      }
      load(module, path, WeightFileOptions().convert_dtype(true));
      for (const auto& [name, tensor] : parameters_of(*saved)) {
        EXPECT_TRUE(is_bit_equal(parameters_of(*module).at(name), tensor.to(to))) << name;
      }
    }
  }
}

TEST(ConvertDtypeTest, OnlyFloatingNumbersAreConverted) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x");
  MultiHeadAttention module(4, 2);
  save(module, path);
  TensorFile file = read_safetensors(path);
  file.tensors["W_q.bias"] = torch::zeros({4}, at::kLong);
  file.tensors["W_k.bias"] = torch::zeros({4}, at::kHalf);
  write_safetensors(path, file);
  EXPECT_EQ(error_of([&] { load(module, path, WeightFileOptions().convert_dtype(true)); }),
            path +
                ": the native layer at prefix '' does not fit:\n"
                "  dtype of 'W_q.bias': expected F32, found I64");
}

}  // namespace
}  // namespace mha
