// Guards that files of Python's torch.save and of C++'s torch::save are read as what they are:
// every dtype, views of shared storages, parameters, checkpoints, modules. Python's files have
// the same tensors in a safetensors file beside them. Exact throughout.
#include <gtest/gtest.h>
#include <mha/torch_conversion.h>
#include <mha/weight_file.h>
#include <torch/nn/modules/container/sequential.h>

#include <filesystem>
#include <sstream>

#include "files/safetensors.h"
#include "files/torch_file.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"
#include "support/weight_file_support.h"

namespace mha {
namespace {

using detail::read_safetensors;
using detail::TorchFile;
using test::are_bit_equal;
using test::error_of;
using test::parameters_of;
using test::read_bytes;
using test::TemporaryDirectory;
using test::Tensors;
using test::write_bytes;

Tensors read_all(const std::string& path) {
  TorchFile file(path);
  Tensors tensors;
  for (const auto& [name, entry] : file.entries()) tensors[name] = file.read(name);
  return tensors;
}

class PythonTorchFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(MHA_TEST_PYTHON).empty()) {
      GTEST_SKIP() << "no Python with torch, numpy and safetensors was found at configure time";
    }
  }
  static std::string file(const std::string& name) {
    return MHA_PYTHON_OUTPUT_DIR "/weight_files/" + name;
  }
};

TEST_F(PythonTorchFileTest, EveryDtypeViewParameterAndCheckpointIsReadBitByBit) {
  for (const std::string name :
       {"dtypes", "views", "parameters", "packed", "apart", "checkpoint", "training"}) {
    SCOPED_TRACE(name);
    EXPECT_TRUE(are_bit_equal(read_all(file(name + ".pt")),
                              read_safetensors(file(name + ".safetensors")).tensors));
  }
}

TEST_F(PythonTorchFileTest, TensorsOfOneStorageShareNoMemoryOnceRead) {
  TorchFile source(file("views.pt"));
  const at::Tensor matrix = source.read("matrix"), base = source.read("base");
  base.zero_();
  EXPECT_EQ(matrix.sum().item<float>(), 276.0f);
  EXPECT_EQ(source.read("base").sum().item<float>(), 276.0f);
}

TEST_F(PythonTorchFileTest, ATypeThatCannotBeReadIsRefusedOnlyWhenItIsAskedFor) {
  TorchFile source(file("other_dtypes.pt"));
  const std::string start = file("other_dtypes.pt") + ": tensor ";
  EXPECT_EQ(error_of([&] { source.read("complex"); }),
            start + "'complex': expected a dtype that can be read, found C64");
  EXPECT_EQ(error_of([&] { source.read("unsigned"); }),
            start + "'unsigned': expected a dtype that can be read, found U16");
  EXPECT_EQ(error_of([&] { source.read("none"); }), start + "'none': not in the file");
}

TEST_F(PythonTorchFileTest, AFileWithoutChecksumsIsReadWhereThatIsAllowed) {
  EXPECT_NE(error_of([&] {
              TorchFile source(file("no_checksums.pt"));
            }).find("was saved without checksums"),
            std::string::npos);
  const auto where = WeightFileOptions().missing_checksums(true);
  EXPECT_TRUE(are_bit_equal(parameters_of(*load(file("no_checksums.pt"), 2, where)),
                            parameters_of(*load(file("no_checksums.safetensors"), 2))));
}

TEST_F(PythonTorchFileTest, WhatATrainingKeepsBesideItsModelIsNeitherReadNorBuilt) {
  EXPECT_FALSE(std::filesystem::exists(file("built")));
  TorchFile source(file("objects.pt"));
  EXPECT_TRUE(are_bit_equal(
      parameters_of(*load(file("objects.pt"), 2, WeightFileOptions().prefix("model"))),
      parameters_of(*load(file("packed.safetensors"), 2))));
  for (const char* name : {"sparse", "quantized"}) {
    EXPECT_NE(error_of([&] { source.read(name); }).find("found a tensor of another kind"),
              std::string::npos);
  }
  EXPECT_FALSE(std::filesystem::exists(file("built")));
}

TEST_F(PythonTorchFileTest, AStateDictLoadsLikeItsSafetensorsFile) {
  const auto both = [&](const std::string& name, const MultiHeadAttentionOptions& options,
                        const std::string& prefix = "") {
    const auto where = WeightFileOptions().prefix(prefix);
    MultiHeadAttention torch_save(options_from_file(file(name + ".pt"), 2, where));
    EXPECT_EQ((std::ostringstream() << torch_save).str(),
              (std::ostringstream() << MultiHeadAttention(options)).str());
    MultiHeadAttention safetensors(options);
    load(torch_save, file(name + ".pt"), where);
    load(safetensors, file(name + ".safetensors"), where);
    EXPECT_TRUE(are_bit_equal(parameters_of(*torch_save), parameters_of(*safetensors)));
  };
  const MultiHeadAttentionOptions plain(8, 2);
  both("packed", MultiHeadAttentionOptions(plain).add_bias_kv(true));
  both("apart",
       MultiHeadAttentionOptions(plain).kdim(3).vdim(5).bias(false).dtype(at::kDouble));
  both("checkpoint", plain, "model.state_dict");
}

TEST_F(PythonTorchFileTest, ACheckpointWithoutAPrefixIsAnsweredWithWhereItsLayerIs) {
  MultiHeadAttention module(8, 2);
  EXPECT_EQ(error_of([&] { load(module, file("checkpoint.pt")); }),
            file("checkpoint.pt") +
                ": expected an attention layer at prefix '', found the names "
                "'model.state_dict.in_proj_bias', 'model.state_dict.in_proj_weight', "
                "'model.state_dict.out_proj.bias', 'model.state_dict.out_proj.weight'; the "
                "file has one at 'model.state_dict'");
}

TEST_F(PythonTorchFileTest, WhatIsNoStateDictIsRefusedWithWhatToDoInstead) {
  const std::pair<const char*, const char*> files[] = {
      {"legacy",
       "found a torch.save file of the old form, before PyTorch 1.6: in Python, "
       "torch.save(torch.load(path, map_location='cpu', weights_only=True), "
       "other_path) writes one that can be read"},
      {"protocol_4", "expected protocol 2, which torch.save writes, found 4"},
      {"module",
       "expected a dictionary of tensors, found an object of "
       "'torch.nn.modules.activation.MultiheadAttention'"},
      {"torch_script",
       "a TorchScript archive holds code, which is not read: in Python, "
       "torch.save(torch.jit.load(path).state_dict(), other_path)"},
      {"tensor", "expected a dictionary of tensors, found another value"},
      {"list", "expected a dictionary of tensors, found another value"},
      {"expanded", "(an expanded tensor: save a clone() of it)"},
      {"negative", "expected a plain tensor, found one with flags (conjugate, negative)"},
      {"twice", "tensor 'b.c': expected one of that name, found several"},
  };
  MultiHeadAttention module(8, 2);
  const Tensors before = parameters_of(*module);
  for (const auto& [name, problem] : files) {
    const std::string path = file("refused/" + std::string(name) + ".pt");
    const std::string error = error_of([&] { load(module, path); });
    EXPECT_NE(error.find(problem), std::string::npos) << error;
    EXPECT_EQ(error.substr(0, path.size()), path);
  }
  EXPECT_TRUE(are_bit_equal(parameters_of(*module), before));
}

TEST(CppTorchFileTest, AModuleSavedByCppIsLoadedBitByBit) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("module.pt");
  for (const auto& [options, layout] : test::layout_cases()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      if (layout != Layout::native && layout != Layout::torch) continue;
      auto typed = options;
      typed.dtype(dtype);
      const MultiHeadAttention saved(typed);
      SCOPED_TRACE((std::ostringstream() << layout << " " << saved).str());
      if (layout == Layout::native) {
        torch::save(saved, path);
      } else {
        torch::save(to_torch(saved), path);
      }
      // C++ archives have no metadata, which alone say whose gains per head without biases are.
      const bool is_told =
          options.qk_norm_gain() != QKNormGain::per_head || options.qk_norm_bias();
      MultiHeadAttention loaded(is_told ? options_from_file(path, options.num_heads()) : typed);
      load(loaded, path);
      EXPECT_TRUE(are_bit_equal(parameters_of(*loaded), parameters_of(*saved)));
    }
  }
}

TEST(CppTorchFileTest, AModuleInsideAModelSavedByCppIsLoadedByItsPrefix) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("model.pt");
  torch::nn::Sequential model(torch::nn::Linear(4, 8));
  const MultiHeadAttention first(8, 2), second(8, 4);
  model->push_back(first);
  model->push_back(second);
  torch::save(model, path);
  for (const auto& [prefix, saved] : {std::pair{"1", first}, std::pair{"2", second}}) {
    MultiHeadAttention loaded(saved->options);
    load(loaded, path, WeightFileOptions().prefix(prefix));
    EXPECT_TRUE(are_bit_equal(parameters_of(*loaded), parameters_of(*saved)));
  }
}

TEST(CppTorchFileTest, ATorchFileCutAnywhereLeavesTheModuleAlone) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("module.pt");
  torch::save(MultiHeadAttention(4, 2), path);
  const std::string whole = read_bytes(path);
  MultiHeadAttention module(4, 2);
  const Tensors before = parameters_of(*module);
  for (size_t size = 0; size < whole.size(); size += 97) {
    write_bytes(path, whole.substr(0, size));
    EXPECT_NE(error_of([&] { load(module, path); }), "no error") << size;
  }
  EXPECT_TRUE(are_bit_equal(parameters_of(*module), before));
}

}  // namespace
}  // namespace mha
