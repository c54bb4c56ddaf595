// Guards the layers of other models, from their folder to their numbers: names and packing of
// weights, and options and masks from config.json, for each architecture in
// python/models.txt under its own name. The reference is transformers' own module, caught
// while the whole model runs (python/model_layers.py, in the ctest fixture model_layers): no
// number of a configuration is written down here. Tolerance: 2e-6 of the largest number, some
// sixteen roundings of float32, since both sides sum products of unit size over at most 64.
#include <gtest/gtest.h>
#include <mha/model_config.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "files/safetensors.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"
#include "support/weight_file_support.h"

namespace mha {
namespace {

namespace fs = std::filesystem;

using test::are_bit_equal;
using test::error_of;
using test::parameters_of;
using test::TemporaryDirectory;

const fs::path folder = MHA_PYTHON_OUTPUT_DIR "/models";

// Name, and the words in which it is refused, if it is.
std::map<std::string, std::string> listed_models() {
  std::map<std::string, std::string> models;
  std::ifstream list(MHA_PYTHON_SOURCE_DIR "/models.txt");
  for (std::string line; std::getline(list, line);) {
    const size_t colon = line.find(':');
    if (line.empty()) continue;
    models[line.substr(0, colon)] = colon == std::string::npos ? "" : line.substr(colon + 2);
  }
  return models;
}

std::vector<std::string> models_that(bool are_refused) {
  std::vector<std::string> names;
  for (const auto& [name, reason] : listed_models()) {
    if (reason.empty() != are_refused) names.push_back(name);
  }
  return names;
}

// What a layer was given and gave.
class Call {
 public:
  explicit Call(const fs::path& path) : file_(detail::read_safetensors(path.string())) {}

  at::Tensor operator[](const std::string& name) const {
    const auto found = file_.tensors.find(name);
    return found == file_.tensors.end() ? at::Tensor() : found->second;
  }
  int64_t layer() const { return std::stoll(file_.metadata.at("layer")); }
  const std::string& part() const { return file_.metadata.at("part"); }

 private:
  detail::TensorFile file_;
};

::testing::AssertionResult is_near(const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.sizes() != expected.sizes()) {
    return ::testing::AssertionFailure() << actual.sizes() << " and " << expected.sizes();
  }
  const double error = (actual - expected).abs().max().item<double>(),
               largest = expected.abs().max().item<double>();
  if (error <= 2e-6 * largest) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << error / largest << " of the largest number";
}

// What is compared: rows of real tokens, since models do as they like with those of padding.
at::Tensor real_rows(const at::Tensor& tensor, const at::Tensor& keep, int64_t row_dimension) {
  if (!keep.defined() || keep.size(1) != tensor.size(row_dimension)) return tensor;
  std::vector<int64_t> sizes(static_cast<size_t>(tensor.dim()), 1);
  sizes[0] = keep.size(0);
  sizes[static_cast<size_t>(row_dimension)] = keep.size(1);
  return tensor * keep.reshape(sizes);
}

void check_call(const fs::path& model, const fs::path& path) {
  const Call call(path);
  SCOPED_TRACE(path.filename().string());
  const torch::NoGradGuard no_grad;
  ModelLayer layer =
      load_layer(model.string(), call.layer(), ModelLayerLoadOptions().part(call.part()));
  const at::Tensor input = call["input"], key = call["key"], keep = call["keep_keys"];
  const int64_t queries = input.size(1), keys = (key.defined() ? key : input).size(1);
  Mask mask = layer.mask(queries, keys);
  if (keep.defined()) mask = mask & Mask::keep_keys(keep);
  const auto [output, weights] = layer.attention->forward(input, key, key, mask);
  EXPECT_TRUE(is_near(real_rows(output, keep, 1), real_rows(call["output"], keep, 1)));
  if (const at::Tensor expected = call["weights"]; expected.defined()) {
    EXPECT_TRUE(is_near(real_rows(weights, keep, 2), real_rows(expected, keep, 2)));
  }
  // Token by token, for the sample without padding.
  const auto terms = layer.options.mask.terms();
  const bool is_causal = std::any_of(terms.begin(), terms.end(), [](const Mask::Term& term) {
    return (term.kind == Mask::Term::Kind::causal || term.kind == Mask::Term::Kind::window) &&
           term.right <= 0;
  });
  if (!is_causal || key.defined() || layer.options.position_bias) return;
  // A shorter sequence is rotated otherwise than what it grows to.
  const auto& rotary = layer.options.attention.rotary();
  const auto* longrope = rotary ? std::get_if<LongRopeScaling>(&rotary->scaling()) : nullptr;
  if (longrope && queries > longrope->original_max_position()) return;
  KVCache cache;
  std::vector<at::Tensor> steps;
  for (int64_t i = 0; i < queries; ++i) {
    const at::Tensor token = input.slice(0, 0, 1).slice(1, i, i + 1);
    steps.push_back(
        layer.attention->attend(token, CallOptions(layer.mask(1, i + 1)).cache(cache)).output);
  }
  EXPECT_TRUE(is_near(torch::cat(steps, 1), call["output"].slice(0, 0, 1)));
}

class ModelLayersTest : public ::testing::TestWithParam<std::string> {};

TEST_P(ModelLayersTest, ComputesWhatTheModelDoes) {
  const fs::path model = folder / GetParam();
  if (!fs::exists(model)) GTEST_SKIP() << "no Python with transformers";
  size_t calls = 0;
  for (const auto& entry : fs::directory_iterator(model)) {
    if (entry.path().extension() != ".call") continue;
    ASSERT_NO_FATAL_FAILURE(check_call(model, entry.path()));
    ++calls;
  }
  EXPECT_GE(calls, 2U);
}

// What was read is written with the model's own names and numbers.
TEST_P(ModelLayersTest, IsSavedAsItWasRead) {
  const fs::path model = folder / GetParam();
  if (!fs::exists(model)) GTEST_SKIP() << "no Python with transformers";
  const TemporaryDirectory directory;
  const std::string path = directory.file("x");
  const auto whole = detail::read_safetensors((model / "model.safetensors").string()).tensors;
  for (const auto& entry : fs::directory_iterator(model)) {
    if (entry.path().extension() != ".call") continue;
    const Call call(entry.path());
    const ModelLayer layer =
        load_layer(model.string(), call.layer(), ModelLayerLoadOptions().part(call.part()));
    save(layer.attention, path, WeightFileOptions().layout(layer.options.layout));
    const auto saved = detail::read_safetensors(path).tensors;
    const bool found =
        std::any_of(layer.options.prefixes.begin(), layer.options.prefixes.end(),
                    [&](const std::string& prefix) {
                      return std::all_of(saved.begin(), saved.end(), [&](const auto& tensor) {
                        const auto original = whole.find(prefix + "." + tensor.first);
                        return original != whole.end() &&
                               original->second.sizes() == tensor.second.sizes() &&
                               torch::allclose(original->second, tensor.second, 0, 3e-7);
                      });
                    });
    EXPECT_TRUE(found) << entry.path();
  }
}

std::string test_name(const ::testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Model, ModelLayersTest, ::testing::ValuesIn(models_that(false)),
                         test_name);

class RefusedModelTest : public ::testing::TestWithParam<std::string> {};

TEST_P(RefusedModelTest, IsRefusedByName) {
  const fs::path config = folder / GetParam() / "config.json";
  if (!fs::exists(config)) GTEST_SKIP() << "no Python with transformers";
  const std::string reason = listed_models().at(GetParam());
  const std::string error = error_of([&] { options_from_config(config.string(), 0); });
  EXPECT_NE(error.find(reason), std::string::npos) << error;
}

INSTANTIATE_TEST_SUITE_P(Model, RefusedModelTest, ::testing::ValuesIn(models_that(true)),
                         test_name);

// The table of architectures holds nothing that is not tested.
TEST(KnownArchitecturesTest, AreAllListed) {
  const auto models = listed_models();
  for (const KnownArchitecture& known : known_architectures()) {
    const bool is_listed = std::any_of(models.begin(), models.end(), [&](const auto& model) {
      return model.first == known.model_type && model.second.empty() == known.refused.empty();
    });
    EXPECT_TRUE(is_listed) << known.model_type;
  }
}

}  // namespace
}  // namespace mha
