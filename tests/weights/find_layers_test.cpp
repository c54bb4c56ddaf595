// Guards how a layer is found among what models keep beside it: dtypes that cannot be read,
// names that mean nothing here, norms beside attention, and names that two layouts share.
// Exact.
#include <gtest/gtest.h>
#include <mha/weight_file.h>

#include <sstream>

#include "files/safetensors.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"
#include "support/weight_file_support.h"
#include "weights/find_layers.h"

namespace mha {
namespace {

using detail::write_safetensors;
using test::are_bit_equal;
using test::bert_model;
using test::error_of;
using test::parameters_of;
using test::TemporaryDirectory;
using test::Tensors;
using test::write_bytes;

// A layer at `m` and one of eight numbers of that type at `name`, all of them zeros.
std::string bytes_with(const std::string& dtype, int64_t bits, const std::string& name) {
  std::string header = "{";
  int64_t at = 0;
  const auto add = [&](const std::string& tensor, const std::string& type, int64_t bytes,
                       const std::string& shape) {
    header += (at == 0 ? "\"" : ",\"") + tensor + R"(":{"dtype":")" + type + R"(","shape":)" +
              shape + R"(,"data_offsets":[)" + std::to_string(at) + "," +
              std::to_string(at + bytes) + "]}";
    at += bytes;
  };
  for (const std::string weight : {"W_q", "W_k", "W_v", "W_o"}) {
    const std::string tensor = "m." + weight + ".weight";
    if (tensor != name) add(tensor, "F32", 64, "[4,4]");
  }
  add(name, dtype, bits, "[8]");
  return test::safetensors_bytes(header + "}", std::string(static_cast<size_t>(at), '\0'));
}

// Those that safetensors 0.8 has, beside the ones that LibTorch has.
TEST(FindLayersTest, ATypeThatCannotBeReadHindersOnlyTheLayerThatHasIt) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x");
  const auto where = WeightFileOptions().prefix("m");
  const std::pair<std::string, int64_t> dtypes[] = {
      {"F4", 4},      {"F6_E2M3", 6},     {"F6_E3M2", 6},     {"F8_E5M2", 8},
      {"F8_E4M3", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F8_E8M0", 8},
      {"U16", 16},    {"U32", 32},        {"C64", 64},        {"U64", 64},
  };
  for (const auto& [dtype, bits] : dtypes) {
    SCOPED_TRACE(dtype);
    write_bytes(path, bytes_with(dtype, bits, "other.W_q.weight"));
    EXPECT_EQ(load(path, 2, where)->options.d_model(), 4);
    write_bytes(path, bytes_with(dtype, bits, "m.W_k.weight"));
    EXPECT_EQ(error_of([&] { load(path, 2, where); }),
              path +
                  ": the native layer at prefix 'm': dtype of 'm.W_k.weight': expected a "
                  "floating one, found " +
                  dtype);
    MultiHeadAttention module(MultiHeadAttentionOptions(4, 2).bias(false));
    const std::string error = error_of([&] { load(module, path, where); });
    EXPECT_NE(error.find("dtype of 'm.W_k.weight': expected F32, found " + dtype),
              std::string::npos)
        << error;
  }
}

TEST(FindLayersTest, NamesToIgnoreAreAsIfTheyWereNotInTheFile) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x");
  const MultiHeadAttention saved(MultiHeadAttentionOptions(8, 2).qk_norm(QKNorm::rms));
  save(saved, path, WeightFileOptions().prefix("m"));
  auto file = detail::read_safetensors(path);
  file.metadata.clear();
  for (const char* name : {"m.rope.cos", "m.rope.sin", "m.ropes", "m.mask"}) {
    file.tensors[name] = torch::ones({3});
  }
  write_safetensors(path, file);
  const auto where = WeightFileOptions().prefix("m");
  const auto with = [&](std::vector<std::string> ignored) {
    return WeightFileOptions(where).ignored(std::move(ignored));
  };
  const auto loaded = load(path, 2, with({"rope.*", "ropes", "mask"}));
  EXPECT_TRUE(are_bit_equal(parameters_of(*loaded), parameters_of(*saved)));
  EXPECT_EQ(error_of([&] { load(path, 2, with({"rope.*", "rope", "mask"})); }),
            path + ": the native layer at prefix 'm' does not fit:\n  unexpected: 'm.ropes'");
  // Gains that the module is to do without; and one that the layer needs.
  const auto without = load(path, 2, with({"rope*", "mask", "q_norm", "k_norm"}));
  EXPECT_EQ(without->options.qk_norm(), QKNorm::none);
  EXPECT_EQ(error_of([&] { load(path, 2, with({"rope*", "mask", "W_k.bias"})); }),
            path +
                ": the native layer at prefix 'm' does not fit:\n"
                "  missing: 'm.W_k.bias', F32 [8]");
  EXPECT_EQ(error_of([&] { load(path, 2, with({"mask", ""})); }),
            path + ": ignored: expected names, found ''");
}

// As in models that normalise before attention (RoBERTa-PreLayerNorm), and in the names of
// checkpoints that TensorFlow wrote.
TEST(FindLayersTest, ANormBesideBertsAttentionIsNoneOfIt) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x");
  Tensors model = bert_model(2, 4);
  write_safetensors(path, {model, {}});
  const auto where = WeightFileOptions().prefix("encoder.layer.1.attention");
  const Tensors expected = parameters_of(*load(path, 2, where));
  for (const std::string layer : {"0", "1"}) {
    for (const char* name : {"LayerNorm.weight", "LayerNorm.bias", "LayerNorm.gamma",
                             "LayerNorm.beta", "output.LayerNorm.gamma"}) {
      model["encoder.layer." + layer + ".attention." + name] = torch::ones({4});
    }
  }
  write_safetensors(path, {model, {}});
  EXPECT_TRUE(are_bit_equal(parameters_of(*load(path, 2, where)), expected));
  const auto layers = detail::find_layers(*detail::open_tensors(path), std::nullopt);
  ASSERT_EQ(layers.size(), 2U);
  for (const auto& layer : layers) EXPECT_EQ(layer.layout, Layout::bert);
}

// The layers of an encoder and a decoder, with BART's names.
Tensors bart_model(bool key_bias) {
  Tensors model;
  for (const std::string at : {"encoder.layers.0.self_attn", "encoder.layers.1.self_attn",
                               "decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"}) {
    for (const std::string name : {"q_proj", "k_proj", "v_proj", "out_proj"}) {
      model[at + "." + name + ".weight"] = torch::randn({4, 4});
      if (key_bias || name != "k_proj") model[at + "." + name + ".bias"] = torch::randn({4});
    }
  }
  return model;
}

// Whisper's layers are BART's without a bias of keys.
TEST(FindLayersTest, ABiasOfKeysThatItsNeighboursHaveIsMissing) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x");
  const Tensors bart = bart_model(true);
  for (const std::string at : {"encoder.layers.0.self_attn", "decoder.layers.0.self_attn",
                               "decoder.layers.0.encoder_attn"}) {
    Tensors model = bart;
    model.erase(at + ".k_proj.bias");
    write_safetensors(path, {model, {}});
    EXPECT_EQ(error_of([&] { load(path, 2, WeightFileOptions().prefix(at)); }),
              path + ": the bart layer at prefix '" + at + "' does not fit:\n  missing: '" +
                  at + ".k_proj.bias', F32 [4]");
    // Told to be Whisper's, it is.
    const auto named = WeightFileOptions().prefix(at).layout(Layout::named("whisper"));
    EXPECT_FALSE(load(path, 2, named)->W_k->bias.any().item<bool>());
  }
  Tensors whisper = bart_model(false);
  whisper["text.layers.0.self_attn.k_proj.bias"] = torch::randn({4});  // of another model
  for (const std::string name : {"q_proj", "k_proj", "v_proj", "out_proj"}) {
    whisper["text.layers.0.self_attn." + name + ".weight"] = torch::randn({4, 4});
  }
  write_safetensors(path, {whisper, {}});
  size_t found = 0;
  for (const auto& layer : detail::find_layers(*detail::open_tensors(path), std::nullopt)) {
    const bool is_text = layer.prefix == "text.layers.0.self_attn";
    EXPECT_EQ(layer.layout, Layout::named(is_text ? "bart" : "whisper")) << layer.prefix;
    ++found;
  }
  EXPECT_EQ(found, 5U);
}

TEST(FindLayersTest, TensorsApartAreToldByAnyOfTheirNames) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x"), json = directory.file("mine.json");
  write_bytes(json, R"({"name": "mine",
    "tensors": [{"name": "qkv", "holds": ["W_q", "W_k", "W_v"]}, {"name": "out", "holds": "W_o"}],
    "tensors_apart": [{"name": "query", "holds": "W_q"}, {"name": "key", "holds": "W_k"},
                      {"name": "value", "holds": "W_v"}, {"name": "out", "holds": "W_o"}]})");
  const auto mine = WeightFileOptions().layout(Layout::from_file(json));
  for (const bool is_apart : {false, true}) {
    auto options = MultiHeadAttentionOptions(8, 2);
    if (is_apart) options.kdim(3).vdim(5);
    const MultiHeadAttention module(options);
    save(module, path, mine);
    EXPECT_EQ(detail::read_safetensors(path).tensors.count("key.weight"), is_apart ? 1U : 0U);
    EXPECT_TRUE(
        are_bit_equal(parameters_of(*load(path, std::nullopt, mine)), parameters_of(*module)));
  }
  const MultiHeadAttention module(MultiHeadAttentionOptions(8, 2).kdim(3).vdim(5));
  save(module, path, WeightFileOptions().layout(Layout::torch));
  auto file = detail::read_safetensors(path);
  file.tensors.erase("q_proj_weight");
  write_safetensors(path, file);
  EXPECT_EQ(error_of([&] { load(path); }),
            path + ": tensor 'q_proj_weight': missing; its shape tells the sizes of the layer");
}

}  // namespace
}  // namespace mha
