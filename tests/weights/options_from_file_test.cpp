// Guards options_from_file: that it gives the options of the module that was saved, asks for
// what a file does not tell, and is as strict as load. Everything here is exact.
#include <gtest/gtest.h>
#include <mha/weight_file.h>

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
using test::bert_model;
using test::error_of;
using test::layout_cases;
using test::parameters_of;
using test::TemporaryDirectory;
using test::Tensors;

// What a module is built from, as text.
std::string describe(const MultiHeadAttentionOptions& options) {
  return (std::ostringstream() << MultiHeadAttention(options)).str();
}

TEST(OptionsFromFileTest, OptionsFromAFileGiveTheModuleThatWasSaved) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  for (auto [options, layout] : layout_cases()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      options.dtype(dtype).scale(0.1).dropout(0.3).add_zero_attn(true).batch_first(false);
      options.weights(Weights::averaged).weights_after_dropout(true);
      const auto where = WeightFileOptions().prefix("p").layout(layout);
      const MultiHeadAttention saved(options);
      if (options.sinks()) saved->sinks.detach().normal_();
      SCOPED_TRACE((std::ostringstream() << layout << " " << saved).str());
      save(saved, path, where);
      const auto found = options_from_file(path, std::nullopt, WeightFileOptions().prefix("p"));
      EXPECT_EQ(describe(found), describe(options));
      MultiHeadAttention loaded(found);
      load(loaded, path, WeightFileOptions().prefix("p"));
      EXPECT_TRUE(are_bit_equal(parameters_of(*loaded), parameters_of(*saved)));
      EXPECT_EQ(loaded->options.scale(), 0.1);
      EXPECT_EQ(loaded->options.dropout(), 0.3);
    }
  }
}

TEST(OptionsFromFileTest, OptionsThatWereNotSetStayDefaults) {
  const TemporaryDirectory directory;
  save(MultiHeadAttention(12, 3), directory.file("weights"));
  const auto found = options_from_file(directory.file("weights"));
  EXPECT_FALSE(found.scale().has_value());
  EXPECT_FALSE(found.head_dim().has_value());
  EXPECT_FALSE(found.kdim().has_value());
  EXPECT_FALSE(found.vdim().has_value());
  EXPECT_EQ(describe(found), describe(MultiHeadAttentionOptions(12, 3).dtype(at::kFloat)));
}

TEST(OptionsFromFileTest, OptionsFromAFileOfAnotherWriterNeedTheNumberOfHeads) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  write_safetensors(path, {bert_model(1, 6), {{"format", "pt"}}});
  const auto where = WeightFileOptions().prefix("encoder.layer.0.attention");
  EXPECT_EQ(error_of([&] { options_from_file(path, std::nullopt, where); }),
            path +
                ": num_heads: expected it as an argument, found none in the file's metadata, "
                "and shapes do not tell it");
  EXPECT_EQ(describe(options_from_file(path, 2, where)),
            describe(MultiHeadAttentionOptions(6, 2).dtype(at::kFloat)));
  for (const int64_t heads : {4, 7, 0, -2}) {
    EXPECT_EQ(error_of([&] { options_from_file(path, heads, where); }),
              path + ": num_heads: expected a divisor of the projections' width 6, found " +
                  std::to_string(heads));
  }
}

TEST(OptionsFromFileTest, AGivenNumberOfHeadsHasToBeThatOfTheFile) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  save(MultiHeadAttention(12, 3), path);
  EXPECT_EQ(options_from_file(path, 3).num_heads(), 3);
  EXPECT_EQ(error_of([&] { options_from_file(path, 4); }),
            path +
                ": the native layer at prefix '' does not fit:\n"
                "  num_heads: expected 4, found 3 in the metadata");
}

TEST(OptionsFromFileTest, ALayerThatIsNotWholeGivesNoOptions) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  const auto error_without = [&](Layout layout, const Tensors& change) {
    save(MultiHeadAttention(4, 2), path, WeightFileOptions().layout(layout));
    TensorFile file = read_safetensors(path);
    for (const auto& [name, tensor] : change) {
      if (tensor.defined())
        file.tensors[name] = tensor;
      else
        file.tensors.erase(name);
    }
    write_safetensors(path, file);
    const std::string error = error_of([&] { options_from_file(path); });
    return error.substr(std::min(error.size(), path.size() + 2));
  };
  const at::Tensor none;
  const std::string native = "the native layer at prefix '' does not fit:\n  ";
  EXPECT_EQ(error_without(Layout::native, {{"W_q.weight", none}}),
            "tensor 'W_q.weight': missing; its shape tells the sizes of the layer");
  EXPECT_EQ(error_without(Layout::native, {{"W_k.weight", none}}),
            native + "missing: 'W_k.weight', F32 [4, 4]");
  EXPECT_EQ(error_without(Layout::native, {{"W_o.bias", none}}),
            native + "missing: 'W_o.bias', F32 [4]");
  EXPECT_EQ(error_without(Layout::native, {{"bias_k", torch::zeros({1, 1, 4})}}),
            native + "missing: 'bias_v', F32 [1, 1, 4]");
  EXPECT_EQ(error_without(Layout::native, {{"W_k.weight", torch::zeros({4})}}),
            native + "shape of 'W_k.weight': expected [4, 4], found [4]");
  EXPECT_EQ(error_without(Layout::native, {{"W_q.weight", torch::zeros({4})}}),
            "tensor 'W_q.weight': expected 2 dimensions above 0, found [4]");
  EXPECT_EQ(error_without(Layout::native, {{"W_q.weight", torch::zeros({0, 4})}}),
            "tensor 'W_q.weight': expected 2 dimensions above 0, found [0, 4]");
  EXPECT_EQ(error_without(Layout::native, {{"W_v.weight", torch::zeros({4, 4}, at::kHalf)}}),
            native +
                "dtype of 'W_v.weight': expected F32, found F16, which convert_dtype(true) "
                "would convert");
  EXPECT_EQ(error_without(Layout::torch, {{"in_proj_weight", torch::zeros({8, 4})}}),
            "the torch layer at prefix '' does not fit:\n"
            "  shape of 'in_proj_weight': expected [12, 4], found [8, 4]");
  EXPECT_EQ(error_without(Layout::torch, {{"in_proj_bias", torch::zeros({12}, at::kLong)}}),
            "the torch layer at prefix '': dtype of 'in_proj_bias': expected a floating one, "
            "found I64");
  EXPECT_EQ(error_without(Layout::torch,
                          {{"in_proj_weight", none}, {"q_proj_weight", torch::zeros({6, 4})}}),
            "the torch layout needs num_heads * head_dim = d_model, found 6 and 4");
  EXPECT_EQ(error_without(Layout::bert, {{"bias_k", torch::zeros({1, 1, 4})}}),
            "the bert layer at prefix '' does not fit:\n  unexpected: 'bias_k'");
}

TEST(OptionsFromFileTest, OfTwoGainsTheOneThatMakesNoHeadsIsBlamed) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  const auto error_with = [&](int64_t q, int64_t k, bool saved, std::optional<int64_t> heads) {
    save(MultiHeadAttention(MultiHeadAttentionOptions(64, 8).qk_norm(QKNorm::rms)), path);
    TensorFile file = read_safetensors(path);
    file.tensors["q_norm"] = torch::ones({q});
    file.tensors["k_norm"] = torch::ones({k});
    if (!saved) file.metadata.clear();
    write_safetensors(path, file);
    return error_of([&] { options_from_file(path, heads); }).substr(path.size() + 2);
  };
  const std::string start = "the native layer at prefix '' does not fit:\n  shape of ";
  EXPECT_EQ(error_with(9, 8, true, {}), start + "'q_norm': expected [8], found [9]");
  EXPECT_EQ(error_with(8, 9, true, {}), start + "'k_norm': expected [8], found [9]");
  EXPECT_EQ(error_with(16, 8, true, {}), start + "'q_norm': expected [8], found [16]");
  EXPECT_EQ(error_with(16, 8, false, 8), start + "'q_norm': expected [8], found [16]");
  EXPECT_EQ(error_with(16, 8, false, 4), start + "'k_norm': expected [16], found [8]");
}

TEST(OptionsFromFileTest, ShapesTellWhatIsNormalisedAndHowLargeValueHeadsAre) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  const auto written = [&](const MultiHeadAttentionOptions& options) {
    save(MultiHeadAttention(options), path);
    TensorFile file = read_safetensors(path);
    file.metadata.clear();
    write_safetensors(path, file);
  };
  const auto base = MultiHeadAttentionOptions(64, 8).num_kv_heads(2);
  auto olmo = base;
  written(olmo.qk_norm(QKNorm::rms).qk_norm_scope(QKNormScope::all_heads));
  const auto found = options_from_file(path, 8);
  EXPECT_EQ(found.qk_norm_scope(), QKNormScope::all_heads);
  EXPECT_EQ(found.num_kv_heads(), 2);
  EXPECT_EQ(load(path, 8)->k_norm.sizes(), at::IntArrayRef({16}));

  auto per_head = base;
  written(per_head.qk_norm(QKNorm::layer).qk_norm_gain(QKNormGain::per_head));
  EXPECT_EQ(
      error_of([&] { options_from_file(path, 8); }),
      path +
          ": q_norm: expected metadata that say whether gains per head are of qk_norm rms "
          "or layer, found none; models have either");
  auto mimo = base;
  written(mimo.head_dim(12).v_head_dim(5));
  EXPECT_EQ(options_from_file(path, 8).head_dim(), 12);
  EXPECT_EQ(options_from_file(path, 8).v_head_dim(), 5);
  EXPECT_NE(error_of([&] { options_from_file(path, 32); }).find("num_heads: expected"),
            std::string::npos);
}

TEST(OptionsFromFileTest, ListsInMetadataAreNumbers) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  for (const std::string value : {"", "1", "[1", "[[1, 2]]", "[1, null]", "[1, \"2\"]", "{}"}) {
    save(MultiHeadAttention(MultiHeadAttentionOptions(8, 2).rotary(RotaryOptions())), path);
    TensorFile file = read_safetensors(path);
    file.metadata["mha.rotary.frequencies"] = value;
    write_safetensors(path, file);
    const std::string error = error_of([&] { options_from_file(path); });
    EXPECT_NE(error.find("'mha.rotary.frequencies': expected an array of numbers"),
              std::string::npos)
        << value << ": " << error;
  }
}

TEST(OptionsFromFileTest, MetadataThatIsNoOptionIsRefused) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  const auto error_with = [&](const std::string& key, const std::string& value) {
    save(MultiHeadAttention(4, 2), path);
    TensorFile file = read_safetensors(path);
    file.metadata[key] = value;
    write_safetensors(path, file);
    const std::string error = error_of([&] { options_from_file(path); });
    return error == "no error" ? error : error.substr(path.size() + 2);
  };
  for (const std::string value : {"", "two", "0", "-2", "2.0", "9223372036854775808", "[2]",
                                  "2 2", "99999999999999999999"}) {
    EXPECT_EQ(
        error_with("mha.num_heads", value),
        "metadata 'mha.num_heads': expected a whole number above 0, found '" + value + "'");
  }
  EXPECT_EQ(error_with("mha.dropout", "a lot"),
            "metadata 'mha.dropout': expected a number, found 'a lot'");
  EXPECT_EQ(error_with("mha.scale", "1e999"),
            "metadata 'mha.scale': expected a number, found '1e999'");
  EXPECT_EQ(
      error_with("mha.scale", std::string(1000, '[')),
      "metadata 'mha.scale': expected a number, found '" + std::string(200, '[') + "...'");
  EXPECT_EQ(error_with("mha.batch_first", "1"),
            "metadata 'mha.batch_first': expected true or false, found '1'");
  EXPECT_EQ(error_with("mha.weights", "some"),
            "metadata 'mha.weights': expected none, averaged or per_head, found 'some'");
  EXPECT_EQ(error_with("mha.output_gate", "all"),
            "metadata 'mha.output_gate': expected per_head or elementwise, found 'all'");
  EXPECT_EQ(error_with("mha.qk_norm", "batch"),
            "metadata 'mha.qk_norm': expected rms or layer, found 'batch'");
  EXPECT_EQ(error_with("mha.rotary.base", "ten"),
            "metadata 'mha.rotary.base': expected a number, found 'ten'");
  // What is a number but no probability is the constructor's to refuse.
  EXPECT_EQ(error_with("mha.dropout", "1.5"), "no error");
  EXPECT_NE(error_of([&] { MultiHeadAttention module(options_from_file(path)); }).find("1.5"),
            std::string::npos);
}

TEST(OptionsFromFileTest, TheDtypeIsThatOfTheProjectionsWhateverTheGainsHave) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  const auto converting = WeightFileOptions().convert_dtype(true);
  for (const auto& [wide, narrow] : {std::pair{at::kFloat, at::kBFloat16},
                                     {at::kBFloat16, at::kFloat},
                                     {at::kDouble, at::kHalf}}) {
    const MultiHeadAttention saved(
        MultiHeadAttentionOptions(12, 3).dtype(wide).add_bias_kv(true).qk_norm(QKNorm::rms));
    save(saved, path);
    TensorFile file = read_safetensors(path);
    for (const char* name : {"k_norm", "q_norm", "bias_k", "W_k.bias"}) {
      file.tensors[name] = file.tensors[name].to(narrow);
    }
    write_safetensors(path, file);
    EXPECT_EQ(options_from_file(path, std::nullopt, converting).dtype(), wide);
    const auto loaded = load(path, std::nullopt, converting);
    EXPECT_TRUE(test::is_bit_equal(loaded->W_k->weight, saved->W_k->weight));
    EXPECT_TRUE(test::is_bit_equal(loaded->W_o->bias, saved->W_o->bias));
    const auto error = error_of([&] { load(path, std::nullopt, {}); });
    EXPECT_NE(error.find("dtype of 'k_norm'"), std::string::npos) << error;
    EXPECT_EQ(error.find("dtype of 'W_q.weight'"), std::string::npos) << error;
  }
}

TEST(OptionsFromFileTest, ProjectionsOfSeveralDtypesGiveTheOneThatHoldsThemAll) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  const MultiHeadAttention saved(12, 3);
  save(saved, path);
  TensorFile file = read_safetensors(path);
  for (const char* name : {"W_k.weight", "W_k.bias"}) {
    file.tensors[name] = file.tensors[name].to(at::kBFloat16);
  }
  file.tensors["W_v.weight"] = file.tensors["W_v.weight"].to(at::kHalf);
  write_safetensors(path, file);
  const auto loaded = load(path, std::nullopt, WeightFileOptions().convert_dtype(true));
  EXPECT_TRUE(test::is_bit_equal(loaded->W_q->weight, saved->W_q->weight));
}

}  // namespace
}  // namespace mha
