// Guards that the module is the attention that Python users know: the class in
// python/reference.py number by number, torch.nn.MultiheadAttention with and without weights,
// and torch.nn.functional.scaled_dot_product_attention; and that weights travel both ways as
// files. python/export_goldens.py writes what Python computes, with the torch that is
// installed, in the ctest fixture python_goldens. Data, parameters and gradients are of unit
// scale: 2e-6 is some twenty roundings of float32, and 1e-12 leaves float64 more.
#include <gtest/gtest.h>
#include <mha/multi_head_attention.h>
#include <mha/weight_file.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "files/safetensors.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha {
namespace {

namespace fs = std::filesystem;
using detail::Metadata;
using detail::read_safetensors;
using detail::TensorFile;
using detail::write_safetensors;
using test::is_bit_equal;
using test::is_close;

const fs::path goldens = MHA_PYTHON_OUTPUT_DIR "/goldens";

class PythonReferenceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(MHA_TEST_PYTHON).empty()) {
      GTEST_SKIP()
          << "no Python with torch, numpy and safetensors was found at configure time; "
             "`bash cmake/bootstrap.sh test` installs them";
    }
    torch::set_num_threads(1);  // the tensors are small: more threads only wait for each other
    ASSERT_TRUE(fs::exists(goldens))
        << goldens << " is missing: ctest's python_goldens writes it";
  }
};

/// The folders below goldens/`kind`, one a case; at least `count`, or cases have gone missing.
std::vector<fs::path> cases_of(const std::string& kind, size_t count) {
  std::vector<fs::path> cases(fs::directory_iterator(goldens / kind), fs::directory_iterator());
  std::sort(cases.begin(), cases.end());
  EXPECT_GE(cases.size(), count) << kind;
  return cases;
}

/// The recorded calls of a case.
std::vector<fs::path> calls_of(const fs::path& folder) {
  std::vector<fs::path> calls;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.find(".call.safetensors") != std::string::npos) calls.push_back(entry.path());
  }
  std::sort(calls.begin(), calls.end());
  return calls;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

double tolerance_of(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-12 : 2e-6;
}

bool flag(const Metadata& metadata, const std::string& name, bool otherwise) {
  const auto found = metadata.find(name);
  return found == metadata.end() ? otherwise : std::stoi(found->second) != 0;
}

at::ScalarType dtype_of(const Metadata& metadata) {
  return metadata.at("dtype") == "float64" ? at::kDouble : at::kFloat;
}

MultiHeadAttentionOptions options_of(const Metadata& metadata) {
  MultiHeadAttentionOptions options(std::stoll(metadata.at("d_model")),
                                    std::stoll(metadata.at("num_heads")));
  options.dtype(dtype_of(metadata))
      .bias(flag(metadata, "bias", true))
      .add_bias_kv(flag(metadata, "add_bias_kv", false))
      .add_zero_attn(flag(metadata, "add_zero_attn", false))
      .batch_first(flag(metadata, "batch_first", true));
  if (metadata.count("kdim")) options.kdim(std::stoll(metadata.at("kdim")));
  if (metadata.count("vdim")) options.vdim(std::stoll(metadata.at("vdim")));
  return options;
}

/// The module of a case, and the random numbers after it, as the Python program drew them.
MultiHeadAttention module_from_seed(const Metadata& metadata) {
  torch::manual_seed(std::stoull(metadata.at("seed")));
  return MultiHeadAttention(options_of(metadata));
}

Weights weights_of(const Metadata& metadata) {
  const std::string& name = metadata.at("weights");
  if (name == "none") return Weights::none;
  return name == "averaged" ? Weights::averaged : Weights::per_head;
}

using Tensors = std::map<std::string, at::Tensor>;

/// The mask that joins the named constructors, each over its tensor.
Mask mask_of(const std::string& constructors, const Tensors& tensors) {
  Mask mask;
  for (const std::string& name : split(constructors, '&')) {
    const auto tensor = [&] { return tensors.at("mask." + name); };
    if (name == "causal_top_left") {
      mask = mask & Mask::causal(Mask::Alignment::top_left);
    } else if (name == "keep") {
      mask = mask & Mask::keep(tensor());
    } else if (name == "block") {
      mask = mask & Mask::block(tensor());
    } else if (name == "add") {
      mask = mask & Mask::add(tensor());
    } else if (name == "keep_keys") {
      mask = mask & Mask::keep_keys(tensor());
    } else if (name == "block_keys") {
      mask = mask & Mask::block_keys(tensor());
    } else if (name == "lengths") {
      mask = mask & Mask::lengths(tensor());
    } else {
      ADD_FAILURE() << "no mask constructor: " << name;
    }
  }
  return mask;
}

/// The masks of equal meaning for a call.
std::vector<std::string> masks_of(const Metadata& metadata) {
  const std::string& masks = metadata.at("masks");
  return masks.empty() ? std::vector<std::string>{""} : split(masks, '|');
}

using Attend = std::function<AttentionOutput(const at::Tensor& query, const at::Tensor& key,
                                             const at::Tensor& value, const Mask& mask)>;

/// Makes the recorded call once for each of its masks and compares output, weights and the
/// gradients of inputs, added mask and parameters with what Python returned.
void expect_agrees(const TensorFile& call, const Attend& attend,
                   const Tensors& parameters = {}) {
  const double tolerance = tolerance_of(call.tensors.at("output").scalar_type());
  for (const std::string& constructors : masks_of(call.metadata)) {
    SCOPED_TRACE("mask: " + constructors);
    Tensors leaves = parameters;
    for (const auto& [name, parameter] : parameters) parameter.mutable_grad().reset();
    Tensors tensors = call.tensors;
    for (const char* name : {"query", "key", "value", "mask.add"}) {
      if (tensors.count(name) == 0) continue;
      leaves[name] = tensors[name] = tensors[name].clone().requires_grad_();
    }

    const AttentionOutput result = attend(tensors.at("query"), tensors.at("key"),
                                          tensors.at("value"), mask_of(constructors, tensors));

    EXPECT_TRUE(is_close(result.output, tensors.at("output"), tolerance)) << "output";
    at::Tensor loss = (result.output * tensors.at("cotangent.output")).sum();
    ASSERT_EQ(result.weights.defined(), tensors.count("weights") == 1);
    if (result.weights.defined()) {
      EXPECT_TRUE(is_close(result.weights, tensors.at("weights"), tolerance)) << "weights";
      loss = loss + (result.weights * tensors.at("cotangent.weights")).sum();
    }
    loss.backward();
    for (const auto& [name, leaf] : leaves) {
      EXPECT_TRUE(is_close(leaf.grad(), tensors.at("grad." + name), tolerance))
          << "gradient of " << name;
    }
  }
}

/// The calls of every case of `kind`, with the weights of its state dict.
void expect_modules_agree(const std::string& kind, size_t case_count, size_t call_count) {
  size_t calls = 0;
  for (const fs::path& folder : cases_of(kind, case_count)) {
    for (const fs::path& path : calls_of(folder)) {
      SCOPED_TRACE(path.string());
      const TensorFile call = read_safetensors(path.string());
      MultiHeadAttention module(options_of(call.metadata));
      load(module, (folder / "state_dict.safetensors").string());
      Tensors parameters;
      for (const auto& item : module->named_parameters()) parameters[item.key()] = item.value();
      // The reference class knows no choice of weights: it returns what ours does by default.
      std::optional<Weights> weights;
      if (call.metadata.count("weights")) weights = weights_of(call.metadata);

      expect_agrees(
          call,
          [&](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
              const Mask& mask) { return module->forward(query, key, value, mask, weights); },
          parameters);
      ++calls;
    }
  }
  EXPECT_GE(calls, call_count);
}

TEST_F(PythonReferenceTest, OneSeedGivesTheParametersOfTheReferenceClassBitForBit) {
  for (const fs::path& folder : cases_of("reference", 20)) {
    SCOPED_TRACE(folder.string());
    const auto program = read_safetensors((folder / "program.safetensors").string());
    const auto state_dict = read_safetensors((folder / "state_dict.safetensors").string());

    const MultiHeadAttention module = module_from_seed(program.metadata);

    const auto parameters = module->named_parameters();
    EXPECT_EQ(parameters.size(), state_dict.tensors.size());
    for (const auto& [name, expected] : state_dict.tensors) {
      ASSERT_TRUE(parameters.contains(name)) << name;
      EXPECT_TRUE(is_bit_equal(parameters[name], expected)) << name;
    }
  }
}

TEST_F(PythonReferenceTest, AWholeProgramUnderOneSeedGivesTheNumbersOfPython) {
  for (const fs::path& folder : cases_of("reference", 20)) {
    SCOPED_TRACE(folder.string());
    const auto program = read_safetensors((folder / "program.safetensors").string());
    const at::Tensor& expected_x = program.tensors.at("x");
    const double tolerance = tolerance_of(expected_x.scalar_type());

    MultiHeadAttention attention = module_from_seed(program.metadata);
    const auto x = torch::randn(expected_x.sizes(), expected_x.scalar_type());
    const auto [output, weights] = attention->forward(x, x, x);

    EXPECT_TRUE(is_bit_equal(x, expected_x));
    EXPECT_TRUE(is_close(output, program.tensors.at("output"), tolerance));
    EXPECT_TRUE(is_close(weights, program.tensors.at("weights"), tolerance));
  }
}

TEST_F(PythonReferenceTest, AnyMaskGivesTheResultsAndGradientsOfTheReferenceClass) {
  expect_modules_agree("reference", 20, 128);
}

TEST_F(PythonReferenceTest, AnyOptionAndMaskGivesTheResultsAndGradientsOfTorchsModule) {
  expect_modules_agree("torch", 20, 360);
}

TEST_F(PythonReferenceTest, TheFunctionGivesTheResultsAndGradientsOfTorchsFunction) {
  size_t calls = 0;
  for (const fs::path& folder : cases_of("sdpa", 14)) {
    for (const fs::path& path : calls_of(folder)) {
      SCOPED_TRACE(path.string());
      const TensorFile call = read_safetensors(path.string());
      AttentionOptions options;
      options.weights(weights_of(call.metadata));
      if (call.metadata.count("scale")) options.scale(std::stod(call.metadata.at("scale")));

      expect_agrees(call, [&](const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const Mask& mask) {
        return scaled_dot_product_attention(query, key, value, mask, options);
      });
      ++calls;
    }
  }
  EXPECT_GE(calls, 98u);
}

TEST_F(PythonReferenceTest, AStateDictOfTheReferenceClassLoadsBitForBit) {
  for (const fs::path& folder : cases_of("reference", 20)) {
    SCOPED_TRACE(folder.string());
    const std::string path = (folder / "state_dict.safetensors").string();
    const auto program = read_safetensors((folder / "program.safetensors").string());
    MultiHeadAttention module(options_of(program.metadata));

    load(module, path);

    for (const auto& [name, expected] : read_safetensors(path).tensors) {
      EXPECT_TRUE(is_bit_equal(module->named_parameters()[name], expected)) << name;
    }
  }
}

TEST_F(PythonReferenceTest, AStateDictOfTorchsModuleLoadsWithItsLayoutFoundOrNamed) {
  for (const fs::path& folder : cases_of("torch", 20)) {
    SCOPED_TRACE(folder.string());
    const std::string path = (folder / "state_dict.safetensors").string();
    const auto call = read_safetensors((folder / "none_per_head.call.safetensors").string());
    const auto options = options_of(call.metadata);
    const Tensors expected = read_safetensors(path).tensors;
    MultiHeadAttention found(options), named(options);

    load(found, path);
    load(named, path, WeightFileOptions().layout(Layout::torch));

    EXPECT_TRUE(is_bit_equal(found->W_o->weight, expected.at("out_proj.weight")));
    if (expected.count("in_proj_weight")) {
      const auto packed = at::cat({found->W_q->weight, found->W_k->weight, found->W_v->weight});
      EXPECT_TRUE(is_bit_equal(packed, expected.at("in_proj_weight")));
    } else {
      EXPECT_TRUE(is_bit_equal(found->W_k->weight, expected.at("k_proj_weight")));
    }
    for (const auto& item : found->named_parameters()) {
      EXPECT_TRUE(is_bit_equal(item.value(), named->named_parameters()[item.key()]))
          << item.key();
    }
  }
}

TEST_F(PythonReferenceTest, WhatSaveWroteLoadsStrictlyInPythonAndComputesTheSame) {
  const fs::path directory = MHA_PYTHON_OUTPUT_DIR "/saved";
  fs::remove_all(directory);
  const auto add_case = [&](const std::string& name, Layout layout,
                            MultiHeadAttentionOptions options) {
    const fs::path folder = directory / name;
    fs::create_directories(folder);
    torch::manual_seed(7);
    const int64_t kdim = options.kdim().value_or(options.d_model());
    const int64_t vdim = options.vdim().value_or(options.d_model());
    const at::ScalarType dtype = options.dtype().value_or(at::kFloat);
    MultiHeadAttention module(options);
    const auto query = torch::randn({3, 5, options.d_model()}, dtype);
    const auto key = torch::randn({3, 4, kdim}, dtype);
    const auto value = torch::randn({3, 4, vdim}, dtype);
    const auto [output, weights] = module->forward(query, key, value);

    save(module, (folder / "state_dict.safetensors").string(),
         WeightFileOptions().layout(layout));
    write_safetensors((folder / "call.safetensors").string(),
                      {{{"query", query},
                        {"key", key},
                        {"value", value},
                        {"output", output.detach()},
                        {"weights", weights.detach()}},
                       {{"layout", layout == Layout::native ? "native" : "torch"},
                        {"d_model", std::to_string(options.d_model())},
                        {"num_heads", std::to_string(options.num_heads())},
                        {"kdim", std::to_string(kdim)},
                        {"vdim", std::to_string(vdim)},
                        {"bias", options.bias() ? "1" : "0"},
                        {"add_bias_kv", options.add_bias_kv() ? "1" : "0"},
                        {"dtype", dtype == at::kDouble ? "float64" : "float32"}}});
  };
  using Options = MultiHeadAttentionOptions;
  add_case("native", Layout::native, Options(12, 3));
  add_case("native_no_bias", Layout::native, Options(12, 3).bias(false));
  add_case("native_float64", Layout::native, Options(12, 3).dtype(at::kDouble));
  add_case("torch", Layout::torch, Options(12, 3));
  add_case("torch_no_bias", Layout::torch, Options(12, 3).bias(false));
  add_case("torch_float64", Layout::torch, Options(12, 3).dtype(at::kDouble));
  add_case("torch_kdim", Layout::torch, Options(12, 3).kdim(7).vdim(9));
  add_case("torch_bias_kv", Layout::torch, Options(12, 3).add_bias_kv(true));

  const std::string command = "\"" MHA_TEST_PYTHON "\" \"" MHA_PYTHON_SOURCE_DIR
                              "/check_saved.py\" \"" +
                              directory.string() + "\"";
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
}

}  // namespace
}  // namespace mha
