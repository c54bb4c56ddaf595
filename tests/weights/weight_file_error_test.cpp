// Guards that a file which does not fit a module is refused with all reasons at once, that the
// module is then bit by bit as it was, and that no file appears for a module that a layout
// cannot express. Whole messages are compared.
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
using test::parameters_of;
using test::read_bytes;
using test::TemporaryDirectory;
using test::Tensors;
using test::write_bytes;

// The message with the path cut off, and the module checked to be as it was.
std::string load_error(MultiHeadAttention& module, const std::string& path,
                       const WeightFileOptions& options = {}) {
  const auto before = parameters_of(*module);
  const std::string error = error_of([&] { load(module, path, options); });
  EXPECT_TRUE(are_bit_equal(parameters_of(*module), before)) << "after: " << error;
  EXPECT_EQ(error.substr(0, path.size() + 2), path + ": ");
  return error.substr(std::min(error.size(), path.size() + 2));
}

TEST(WeightFileErrorTest, AllProblemsAreInOneErrorAndTheModuleIsUntouched) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  MultiHeadAttention module(4, 2);
  save(module, path, WeightFileOptions().prefix("p"));
  TensorFile file = read_safetensors(path);
  file.tensors["p.W_k.weight"] = torch::zeros({4, 5});
  file.tensors["p.W_v.bias"] = torch::zeros({4}, at::kDouble);
  file.tensors["p.W_o.weight"] = torch::zeros({5, 4}, at::kHalf);
  file.tensors.erase("p.W_q.bias");
  file.tensors.erase("p.W_o.bias");
  file.tensors["p.bias_k"] = torch::zeros({1, 1, 4});
  file.tensors["p.W_q.extra"] = torch::zeros({1});
  file.metadata["mha.num_heads"] = "4";
  write_safetensors(path, file);
  EXPECT_EQ(load_error(module, path, WeightFileOptions().prefix("p")),
            "the native layer at prefix 'p' does not fit:\n"
            "  shape of 'p.W_k.weight': expected [4, 4], found [4, 5]\n"
            "  missing: 'p.W_o.bias', F32 [4]\n"
            "  shape of 'p.W_o.weight': expected [4, 4], found [5, 4]\n"
            "  dtype of 'p.W_o.weight': expected F32, found F16, which convert_dtype(true) "
            "would convert\n"
            "  missing: 'p.W_q.bias', F32 [4]\n"
            "  dtype of 'p.W_v.bias': expected F32, found F64, which convert_dtype(true) "
            "would convert\n"
            "  unexpected: 'p.W_q.extra'\n"
            "  unexpected: 'p.bias_k'\n"
            "  num_heads: expected 2, found 4 in the metadata");
}

TEST(WeightFileErrorTest, AFileOfAnotherOptionIsRefusedInEveryLayout) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  for (const Layout& layout : {Layout::native, Layout::torch, Layout::bert}) {
    SCOPED_TRACE((std::ostringstream() << layout).str());
    const auto error = [&](const MultiHeadAttentionOptions& saved,
                           const MultiHeadAttentionOptions& loaded) {
      save(MultiHeadAttention(saved), path, WeightFileOptions().layout(layout));
      MultiHeadAttention module(loaded);
      return load_error(module, path);
    };
    const MultiHeadAttentionOptions plain(4, 2);
    const auto has = [](const std::string& text, const std::string& part) {
      return text.find(part) != std::string::npos ? ::testing::AssertionSuccess()
                                                  : ::testing::AssertionFailure() << text;
    };
    EXPECT_TRUE(has(error(MultiHeadAttentionOptions(plain).bias(false), plain), "missing: "));
    EXPECT_TRUE(
        has(error(plain, MultiHeadAttentionOptions(plain).bias(false)), "unexpected: "));
    EXPECT_TRUE(has(error(plain, MultiHeadAttentionOptions(6, 2)), "expected [6"));
    EXPECT_TRUE(has(error(plain, MultiHeadAttentionOptions(plain).dtype(at::kDouble)),
                    "expected F64, found F32"));
    EXPECT_TRUE(has(error(plain, MultiHeadAttentionOptions(4, 4)),
                    "num_heads: expected 4, found 2 in the metadata"));
    EXPECT_TRUE(has(error(plain, MultiHeadAttentionOptions(plain).kdim(3)), "[4, 3]"));
  }
}

TEST(WeightFileErrorTest, ABiasOfTheOutputIsNeitherMadeUpNorDropped) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  const MultiHeadAttentionOptions biased(4, 2);
  const auto qwen2 = MultiHeadAttentionOptions(biased).output_bias(false);
  const auto where = WeightFileOptions().layout(Layout::llama);
  save(MultiHeadAttention(qwen2), path, where);
  MultiHeadAttention module(biased), without(qwen2);
  EXPECT_EQ(load_error(module, path),
            "the llama layer at prefix '' does not fit:\n  missing: 'o_proj.bias', F32 [4]");
  save(module, path, where);
  EXPECT_EQ(load_error(without, path),
            "the llama layer at prefix '' does not fit:\n  unexpected: 'o_proj.bias'");
  // A file of ours says whether it had one.
  TensorFile file = read_safetensors(path);
  file.tensors.erase("o_proj.bias");
  write_safetensors(path, file);
  EXPECT_EQ(error_of([&] { load(path); }), path +
                                               ": the llama layer at prefix '' does not fit:\n"
                                               "  missing: 'o_proj.bias', F32 [4]");
  file.metadata["mha.output_bias"] = "perhaps";
  write_safetensors(path, file);
  EXPECT_EQ(error_of([&] { load(path); }),
            path + ": metadata 'mha.output_bias': expected true or false, found 'perhaps'");
  // Of three biases, one is missing.
  file.metadata.clear();
  file.tensors.erase("k_proj.bias");
  write_safetensors(path, file);
  EXPECT_EQ(load_error(without, path),
            "the llama layer at prefix '' does not fit:\n  missing: 'k_proj.bias', F32 [4]");
}

// Gains, gates and sinks of another number of heads, or of another head size.
TEST(WeightFileErrorTest, GainsAndGatesThatDoNotFitTheHeadsAreNamed) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  const auto options =
      MultiHeadAttentionOptions(12, 3).bias(false).qk_norm(QKNorm::rms).sinks(true);
  const auto changed = [&](MultiHeadAttention& module, Layout layout, const Tensors& change) {
    save(module, path, WeightFileOptions().prefix("p").layout(layout));
    TensorFile file = read_safetensors(path);
    for (const auto& [name, tensor] : change) file.tensors[name] = tensor;
    write_safetensors(path, file);
    return load_error(module, path, WeightFileOptions().prefix("p"));
  };
  MultiHeadAttention module(options);
  EXPECT_EQ(changed(module, Layout::llama,
                    {{"p.q_norm.weight", torch::ones({6})},
                     {"p.k_norm.weight", torch::ones({12})},  // over all heads, as in OLMo 2
                     {"p.sinks", torch::zeros({4})}}),
            "the llama layer at prefix 'p' does not fit:\n"
            "  shape of 'p.k_norm.weight': expected [4], found [12]\n"
            "  shape of 'p.q_norm.weight': expected [4], found [6]\n"
            "  shape of 'p.sinks': expected [3], found [4]");
  EXPECT_EQ(changed(module, Layout::native, {{"p.k_norm", torch::ones({1, 4})}}),
            "the native layer at prefix 'p' does not fit:\n"
            "  shape of 'p.k_norm': expected [4], found [1, 4]");
  for (const auto gate : {OutputGate::per_head, OutputGate::elementwise}) {
    MultiHeadAttention gated(MultiHeadAttentionOptions(12, 3).output_gate(gate));
    const int64_t rows = gate == OutputGate::per_head ? 3 : 12, other = 15 - rows;
    const auto number = [](int64_t n) { return std::to_string(n); };
    EXPECT_EQ(changed(gated, Layout::native,
                      {{"p.W_g.weight", torch::zeros({other, 12})},
                       {"p.W_g.bias", torch::zeros({other})}}),
              "the native layer at prefix 'p' does not fit:\n"
              "  shape of 'p.W_g.bias': expected [" +
                  number(rows) + "], found [" + number(other) +
                  "]\n  shape of 'p.W_g.weight': expected [" + number(rows) + ", 12], found [" +
                  number(other) + ", 12]");
    // Neither one row a head nor one an element.
    EXPECT_NE(changed(gated, Layout::native, {{"p.W_g.weight", torch::zeros({5, 12})}})
                  .find("shape of 'p.W_g.weight': expected [" + number(rows) +
                        ", 12], found [5, 12]"),
              std::string::npos);
  }
  // A module without them, and a file without them.
  MultiHeadAttention plain(MultiHeadAttentionOptions(12, 3).bias(false));
  save(module, path);
  EXPECT_EQ(load_error(plain, path),
            "the native layer at prefix '' does not fit:\n  unexpected: 'k_norm'\n"
            "  unexpected: 'q_norm'\n  unexpected: 'sinks'");
  save(plain, path);
  EXPECT_EQ(load_error(module, path),
            "the native layer at prefix '' does not fit:\n  missing: 'k_norm', F32 [4]\n"
            "  missing: 'q_norm', F32 [4]\n  missing: 'sinks', F32 [3]");
}

TEST(WeightFileErrorTest, UnexpectedNamesAreCountedWhenTheyAreMany) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  MultiHeadAttention module(4, 2);
  TensorFile file;
  file.tensors = parameters_of(*module);
  for (int i = 0; i < 100; ++i) file.tensors["other." + std::to_string(i)] = torch::zeros({1});
  write_safetensors(path, file);
  const std::string error = load_error(module, path);
  EXPECT_NE(error.find("unexpected: 'other.0'"), std::string::npos) << error;
  EXPECT_NE(error.find("unexpected: 80 more"), std::string::npos) << error;
  EXPECT_LT(error.size(), 1500u);
}

TEST(WeightFileErrorTest, InTheBertLayoutOnlyTheLayerNormIsPassedOver) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  Tensors model = bert_model(1, 4);
  model["encoder.layer.0.attention.self.distance_embedding.weight"] = torch::zeros({7, 2});
  write_safetensors(path, {model, {}});
  MultiHeadAttention module(4, 2);
  EXPECT_EQ(load_error(module, path, WeightFileOptions().prefix("encoder.layer.0.attention")),
            "the bert layer at prefix 'encoder.layer.0.attention' does not fit:\n"
            "  unexpected: 'encoder.layer.0.attention.self.distance_embedding.weight'");
}

TEST(WeightFileErrorTest, AWrongPrefixIsAnsweredWithThoseThatExist) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  write_safetensors(path, {bert_model(2, 4), {}});
  MultiHeadAttention module(4, 2);
  const std::string there =
      "; the file has one at 'encoder.layer.0.attention', 'encoder.layer.1.attention'";
  EXPECT_EQ(
      load_error(module, path, WeightFileOptions().prefix("encoder.layer.2.attention")),
      "expected an attention layer at prefix 'encoder.layer.2.attention', found no name that "
      "begins with it" +
          there);
  EXPECT_EQ(
      load_error(module, path, WeightFileOptions().prefix("pooler")),
      "expected an attention layer at prefix 'pooler', found the names 'dense.weight'" + there);
  EXPECT_EQ(load_error(module, path),
            "expected an attention layer at prefix '', found the names "
            "'embeddings.LayerNorm.weight', 'embeddings.word_embeddings.weight', "
            "'encoder.layer.0.attention.output.LayerNorm.bias', "
            "'encoder.layer.0.attention.output.LayerNorm.weight', "
            "'encoder.layer.0.attention.output.dense.bias', "
            "'encoder.layer.0.attention.output.dense.weight', "
            "'encoder.layer.0.attention.self.key.bias', "
            "'encoder.layer.0.attention.self.key.weight' and 19 more" +
                there);
  EXPECT_EQ(load_error(module, path, WeightFileOptions().prefix("encoder.layer.0.attention.")),
            "expected an attention layer at prefix 'encoder.layer.0.attention.', found no name "
            "that begins with it" +
                there);
}

TEST(WeightFileErrorTest, PairsThatTheFileSaysAreRotatedHaveToBeTheModules) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  const auto made = [](const RotaryOptions& rotary) {
    return MultiHeadAttention(MultiHeadAttentionOptions(16, 2).rotary(rotary));
  };
  save(made(RotaryOptions()), path);
  MultiHeadAttention without(16, 2);
  EXPECT_EQ(load_error(without, path),
            "the native layer at prefix '' does not fit:\n"
            "  rotary: expected none, found (base=10000, pairing=half_split, scaling=none) in "
            "the metadata");
  auto interleaved = made(RotaryOptions().pairing(RotaryPairing::interleaved));
  EXPECT_EQ(load_error(interleaved, path),
            "the native layer at prefix '' does not fit:\n"
            "  rotary: expected pairs interleaved in 8 elements, found half_split in 8 in the "
            "metadata");
  auto fewer = made(RotaryOptions().rotary_dim(4));
  EXPECT_EQ(load_error(fewer, path),
            "the native layer at prefix '' does not fit:\n"
            "  rotary: expected pairs half_split in 4 elements, found half_split in 8 in the "
            "metadata");
  // A longer context is no other model, and the file of another writer says nothing.
  auto longer = made(RotaryOptions().base(5e5).rotary_dim(8).scaling(NtkScaling(4)));
  load(longer, path);
  save(without, path);
  load(longer, path);
  EXPECT_TRUE(are_bit_equal(parameters_of(*longer), parameters_of(*without)));
}

TEST(WeightFileErrorTest, ALayoutThatIsNotThereIsSaid) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  MultiHeadAttention module(4, 2);
  save(module, path);
  EXPECT_EQ(load_error(module, path, WeightFileOptions().layout(Layout::torch)),
            "expected an attention layer in the torch layout at prefix '', found the names "
            "'W_k.bias', 'W_k.weight', 'W_o.bias', 'W_o.weight', 'W_q.bias', 'W_q.weight', "
            "'W_v.bias', 'W_v.weight'; the file has none at any prefix");
  EXPECT_EQ(load_error(module, path, WeightFileOptions().prefix("x")),
            "expected an attention layer at prefix 'x', found no name that begins with it; the "
            "file has one at ''");
  write_safetensors(path, {});
  EXPECT_EQ(load_error(module, path),
            "expected an attention layer at prefix '', found no name that begins with it; the "
            "file has none at any prefix");
}

TEST(WeightFileErrorTest, TwoLayoutsAtOnePrefixHaveToBeTold) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  MultiHeadAttention module(4, 2);
  save(module, path, WeightFileOptions().prefix("p"));
  TensorFile file = read_safetensors(path);
  file.tensors["p.in_proj_bias"] = torch::zeros({12});
  write_safetensors(path, file);
  EXPECT_EQ(load_error(module, path, WeightFileOptions().prefix("p")),
            "expected the names of one layout at prefix 'p', found those of native and torch: "
            "'W_k.bias', 'W_k.weight', 'W_o.bias', 'W_o.weight', 'W_q.bias', 'W_q.weight', "
            "'W_v.bias', 'W_v.weight' and 1 more; name the layout");
  EXPECT_EQ(load_error(module, path, WeightFileOptions().prefix("p").layout(Layout::native)),
            "the native layer at prefix 'p' does not fit:\n"
            "  unexpected: 'p.in_proj_bias'");
}

TEST(WeightFileErrorTest, ABrokenFileLeavesTheModuleAlone) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  MultiHeadAttention module(4, 2);
  save(module, path);
  const std::string whole = read_bytes(path);
  MultiHeadAttention other(4, 2);
  for (size_t size = 0; size < whole.size(); size += 7) {
    write_bytes(path, whole.substr(0, size));
    EXPECT_NE(load_error(other, path), "") << size;
  }
  std::filesystem::remove(path);
  EXPECT_EQ(load_error(other, path), "cannot be opened: No such file or directory");
}

TEST(WeightFileErrorTest, AModuleThatALayoutCannotExpressIsNotSaved) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("weights");
  const auto error = [&](const MultiHeadAttention& module, Layout layout) {
    return error_of([&] { save(module, path, WeightFileOptions().layout(layout)); });
  };
  const MultiHeadAttention free_heads(MultiHeadAttentionOptions(12, 3).head_dim(5));
  EXPECT_EQ(error(free_heads, Layout::torch),
            path + ": the torch layout needs num_heads * head_dim = d_model, found 15 and 12");
  const MultiHeadAttention bias_kv(MultiHeadAttentionOptions(12, 3).add_bias_kv(true));
  EXPECT_EQ(error(bias_kv, Layout::bert),
            path +
                ": the bert layout has no place for bias_k and bias_v, found a module with "
                "add_bias_kv");
  MultiHeadAttention mixed(12, 3);
  mixed->W_v->to(at::kDouble);
  EXPECT_EQ(error(mixed, Layout::native),
            path +
                ": module: expected parameters of one dtype, found Float and Double "
                "(W_v.weight)");
  EXPECT_EQ(error(MultiHeadAttention(nullptr), Layout::native),
            path + ": module: expected a module, found an empty holder");
  EXPECT_EQ(directory.count(), 0);
}

}  // namespace
}  // namespace mha
