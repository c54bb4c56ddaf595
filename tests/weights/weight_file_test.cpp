// Guards load and save: that each layout carries every parameter both ways, under the names
// that other libraries use, and changes nothing else. Weights are copied, so everything is
// exact.
#include <gtest/gtest.h>
#include <mha/torch_conversion.h>
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
using test::is_bit_equal;
using test::layout_cases;
using test::parameters_of;
using test::read_bytes;
using test::TemporaryDirectory;
using test::Tensors;
using test::write_bytes;

TEST(WeightFileTest, EveryLayoutCarriesEveryParameterThereAndBack) {
  const TemporaryDirectory directory;
  const std::string first = directory.file("first"), second = directory.file("second");
  for (const auto& [base, layout] : layout_cases()) {
    for (const std::string prefix : {"", "encoder.layer.0.attention"}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
        auto options = base;
        options.dtype(dtype);
        MultiHeadAttention saved(options), loaded(options);
        SCOPED_TRACE((std::ostringstream() << layout << " '" << prefix << "' " << saved).str());
        const auto where = WeightFileOptions().prefix(prefix).layout(layout);
        save(saved, first, where);
        load(loaded, first, WeightFileOptions().prefix(prefix));  // the layout is found
        EXPECT_TRUE(are_bit_equal(parameters_of(*loaded), parameters_of(*saved)));
        save(loaded, second, where);
        EXPECT_EQ(read_bytes(second), read_bytes(first));
      }
    }
  }
}

TEST(WeightFileTest, TheNativeLayoutIsTheParametersUnderTheirNames) {
  const TemporaryDirectory directory;
  const MultiHeadAttention module(
      MultiHeadAttentionOptions(12, 3).head_dim(5).kdim(7).vdim(8).add_bias_kv(true));
  save(module, directory.file("native"));
  EXPECT_TRUE(are_bit_equal(read_safetensors(directory.file("native")).tensors,
                            parameters_of(*module)));
}

TEST(WeightFileTest, TheTorchLayoutIsTheStateOfTorchsModule) {
  const TemporaryDirectory directory;
  for (const auto& [options, layout] : layout_cases()) {
    if (layout != Layout::torch) continue;
    MultiHeadAttention module(options);
    const auto state = parameters_of(*to_torch(module));
    const auto where = WeightFileOptions().prefix("p").layout(Layout::torch);
    save(module, directory.file("torch"), where);
    Tensors prefixed;
    for (const auto& [name, tensor] : state) prefixed["p." + name] = tensor;
    EXPECT_TRUE(are_bit_equal(read_safetensors(directory.file("torch")).tensors, prefixed));
  }
}

TEST(WeightFileTest, ALayerOfABertModelIsLoadedByItsPrefix) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("model.safetensors");
  const Tensors model = bert_model(12, 6, "bert.");
  write_safetensors(path, {model, {{"format", "pt"}}});
  for (const int64_t layer : {0, 1, 10, 11}) {
    const std::string prefix = "bert.encoder.layer." + std::to_string(layer) + ".attention";
    MultiHeadAttention module(6, 2);
    load(module, path, WeightFileOptions().prefix(prefix));
    const auto parameters = parameters_of(*module);
    const std::map<std::string, std::string> names = {{"W_q", "self.query"},
                                                      {"W_k", "self.key"},
                                                      {"W_v", "self.value"},
                                                      {"W_o", "output.dense"}};
    for (const auto& [ours, theirs] : names) {
      for (const std::string kind : {".weight", ".bias"}) {
        EXPECT_TRUE(
            is_bit_equal(parameters.at(ours + kind), model.at(prefix + "." + theirs + kind)));
      }
    }
  }
}

TEST(WeightFileTest, OtherTensorsOfTheFileNeitherHinderNorCount) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("model");
  MultiHeadAttention saved(4, 2), loaded(4, 2);
  save(saved, path, WeightFileOptions().prefix("a"));
  // A neighbour whose prefix only begins like ours, one in another dtype, one without a
  // counterpart in LibTorch.
  TensorFile file = read_safetensors(path);
  file.tensors["ab.W_q.weight"] = torch::ones({3});
  file.tensors["a_W_q.weight"] = torch::ones({3}, at::kLong);
  write_safetensors(path, file);
  std::string bytes = read_bytes(path);
  const std::string fp8 = R"(,"fp8":{"dtype":"F8_E5M2","shape":[1],"data_offsets":[)";
  int64_t data = 0;
  for (const auto& [name, tensor] : file.tensors) data += static_cast<int64_t>(tensor.nbytes());
  std::string header = bytes.substr(8, bytes.size() - 8 - static_cast<size_t>(data));
  header.erase(header.find_last_of('}'));
  header += fp8 + std::to_string(data) + "," + std::to_string(data + 1) + "]}}";
  write_bytes(path, test::safetensors_bytes(
                        header, bytes.substr(bytes.size() - static_cast<size_t>(data)) + "x"));

  load(loaded, path, WeightFileOptions().prefix("a"));
  EXPECT_TRUE(are_bit_equal(parameters_of(*loaded), parameters_of(*saved)));
}

TEST(WeightFileTest, LoadingKeepsFrozenFlagsModeAndTheParametersThemselves) {
  const TemporaryDirectory directory;
  MultiHeadAttention saved(4, 2), loaded(4, 2);
  save(saved, directory.file("weights"));
  loaded->W_k->weight.requires_grad_(false);
  loaded->eval();
  const at::Tensor alias = loaded->W_q->weight;
  load(loaded, directory.file("weights"));
  EXPECT_FALSE(loaded->W_k->weight.requires_grad());
  EXPECT_TRUE(loaded->W_q->weight.requires_grad());
  EXPECT_TRUE(loaded->W_q->weight.is_leaf());
  EXPECT_FALSE(loaded->is_training());
  EXPECT_TRUE(is_bit_equal(alias.detach(), saved->W_q->weight.detach()));
}

TEST(WeightFileTest, SavingLeavesGradientsAndModuleAlone) {
  const TemporaryDirectory directory;
  MultiHeadAttention module(4, 2);
  const auto before = parameters_of(*module);
  const auto output = module->forward(torch::randn({1, 3, 4})).output;
  save(module, directory.file("weights"), WeightFileOptions().layout(Layout::torch));
  output.sum().backward();  // no parameter was written to in between
  EXPECT_TRUE(are_bit_equal(parameters_of(*module), before));
  EXPECT_TRUE(module->W_q->weight.requires_grad());
}

TEST(WeightFileTest, ALayoutPrintsItsName) {
  EXPECT_EQ((std::ostringstream() << Layout::native << Layout::torch << Layout::bert).str(),
            "nativetorchbert");
}

}  // namespace
}  // namespace mha
