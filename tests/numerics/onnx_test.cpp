// Guards conformance with the public definition of the operator that inference engines share:
// ONNX's Attention, opsets 23 to 25, by the node tests that the `onnx` package makes
// (python/export_onnx.py writes them in the ctest fixture onnx_cases). Each case is a test of
// ctest under its own name. Tolerances: 1e-5 for float32, some eighty roundings of numbers of
// unit size; 2e-3 for float16, two units in the last place; for bfloat16 one unit of numbers
// from 1/2 to 1, since the expected numbers were rounded to it after every step.
#include <gtest/gtest.h>
#include <mha/attention_map.h>
#include <mha/kv_cache.h>
#include <mha/scaled_dot_product_attention.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "files/safetensors.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha {
namespace {

namespace fs = std::filesystem;

const fs::path folder = MHA_PYTHON_OUTPUT_DIR "/onnx";

std::vector<std::string> listed_cases() {
  std::ifstream list(MHA_PYTHON_SOURCE_DIR "/onnx_cases.txt");
  return {std::istream_iterator<std::string>(list), {}};
}

// One node with its data.
class Case {
 public:
  explicit Case(const std::string& name)
      : file_(detail::read_safetensors((folder / (name + ".safetensors")).string())) {}

  at::Tensor input(const std::string& name) const { return tensor("in." + name); }
  at::Tensor output(const std::string& name) const { return tensor("out." + name); }
  double attribute(const std::string& name, double otherwise) const {
    const auto found = file_.metadata.find(name);
    return found == file_.metadata.end() ? otherwise : std::stod(found->second);
  }
  int64_t integer(const std::string& name, int64_t otherwise) const {
    return static_cast<int64_t>(attribute(name, static_cast<double>(otherwise)));
  }

 private:
  at::Tensor tensor(const std::string& name) const {
    const auto found = file_.tensors.find(name);
    return found == file_.tensors.end() ? at::Tensor() : found->second;
  }
  detail::TensorFile file_;
};

// (N, H, T, D), also of the operator's (N, T, H * D).
at::Tensor split_heads(const at::Tensor& tensor, int64_t heads) {
  if (tensor.dim() == 4) return tensor;
  return tensor.unflatten(2, {heads, tensor.size(2) / heads}).transpose(1, 2);
}

// A cache that holds the node's past and its own keys and values.
KVCache cache_of(const Case& node) {
  KVCache cache;
  if (const auto past = node.input("past_key"); past.defined()) {
    cache.append(past, node.input("past_value"));
  }
  const int64_t heads = node.integer("kv_num_heads", 0);
  cache.append(split_heads(node.input("K"), heads), split_heads(node.input("V"), heads));
  return cache;
}

// Positions of the first query among the keys: a query stands after those that were there
// before.
at::Tensor offsets(const Case& node, int64_t batch, int64_t queries) {
  if (const auto past = node.input("past_key"); past.defined()) {
    return at::full({batch}, past.size(2), at::kLong);
  }
  if (const auto valid = node.input("nonpad_kv_seqlen"); valid.defined()) {
    return valid - queries;
  }
  return at::zeros({batch}, at::kLong);
}

// Numpy's broadcasting to (N or 1, H or 1, L, S); keys that the mask does not reach are
// blocked.
Mask given_mask(const at::Tensor& mask, int64_t queries, int64_t keys) {
  if (!mask.defined()) return {};
  const bool is_bool = mask.scalar_type() == at::kBool;
  auto pairs = mask;
  while (pairs.dim() < 4) pairs = pairs.unsqueeze(0);
  pairs = pairs.expand({-1, -1, queries, -1});
  const double blocked = is_bool ? 0 : -std::numeric_limits<double>::infinity();
  pairs = at::constant_pad_nd(pairs, {0, keys - pairs.size(3)}, blocked);
  return is_bool ? Mask::keep(pairs) : Mask::add(pairs);
}

Mask whole_mask(const Case& node, int64_t batch, int64_t queries, int64_t keys) {
  const auto first = offsets(node, batch, queries);
  Mask mask = given_mask(node.input("attn_mask"), queries, keys);
  if (node.integer("is_causal", 0) != 0) mask = mask & Mask::causal(first);
  const int64_t left = node.integer("left_window_size", -1);
  const int64_t right = node.integer("right_window_size", -1);
  if (left >= 0 || right >= 0) mask = mask & Mask::window(left, right, first);
  if (const auto valid = node.input("nonpad_kv_seqlen"); valid.defined()) {
    mask = mask & Mask::lengths(valid);
  }
  return mask;
}

at::Tensor intermediate(const AttentionMap& map, int64_t mode) {
  switch (mode) {
    case 0:
      return map.scores(ScoreStage::scaled);
    case 1:
      return map.scores(ScoreStage::softcapped);
    case 2:
      return map.scores(ScoreStage::masked);
    default:
      return map.dense();
  }
}

class OnnxAttentionTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!fs::exists(folder)) {
      GTEST_SKIP() << "no Python with onnx and safetensors was found at configure time; "
                      "`bash cmake/bootstrap.sh test` installs them";
    }
    ASSERT_TRUE(fs::exists(folder / (GetParam() + ".safetensors")))
        << "listed in onnx_cases.txt, but not among the cases of the installed onnx";
  }
};

TEST_P(OnnxAttentionTest, GivesTheOperatorsResults) {
  const Case node(GetParam());
  const auto query = split_heads(node.input("Q"), node.integer("q_num_heads", 0));
  const KVCache cache = cache_of(node);
  const auto key = cache.key(), value = cache.value();
  const int64_t batch = query.size(0), queries = query.size(2), keys = key.size(2);
  const auto mask = whole_mask(node, batch, queries, keys);
  AttentionOptions options;
  options.softcap(node.attribute("softcap", 0));
  if (const double scale = node.attribute("scale", 0); scale != 0) options.scale(scale);

  const double tolerance = query.scalar_type() == at::kFloat  ? 1e-5
                           : query.scalar_type() == at::kHalf ? 2e-3
                                                              : 0x1p-8;
  const auto expected = node.output("Y");
  for (const auto weights : {Weights::none, Weights::per_head}) {
    options.weights(weights);
    const auto result = scaled_dot_product_attention(query, key, value, mask, options);
    const auto output =
        expected.dim() == 4 ? result.output : result.output.transpose(1, 2).flatten(2);
    EXPECT_EQ(output.scalar_type(), expected.scalar_type());
    EXPECT_TRUE(test::is_close(output, expected, tolerance)) << "weights " << weights;
  }
  if (const auto scores = node.output("qk_matmul_output"); scores.defined()) {
    const auto map = trace_scaled_dot_product_attention(query, key, value, mask, options).map;
    const auto given = intermediate(map, node.integer("qk_matmul_output_mode", 0));
    EXPECT_TRUE(test::is_close(given.to(scores.scalar_type()), scores, tolerance));
  }
  if (const auto present = node.output("present_key"); present.defined()) {
    EXPECT_TRUE(test::is_bit_equal(key, present));
    EXPECT_TRUE(test::is_bit_equal(value, node.output("present_value")));
    EXPECT_EQ(key.scalar_type(), present.scalar_type());
  }
}

INSTANTIATE_TEST_SUITE_P(, OnnxAttentionTest, ::testing::ValuesIn(listed_cases()),
                         [](const auto& of) { return of.param; });

// A newer package may bring cases that this list, and so ctest, does not know of.
TEST(OnnxCasesTest, EveryCaseOfTheInstalledPackageIsListed) {
  if (!fs::exists(folder)) GTEST_SKIP() << "no Python with onnx was found at configure time";
  const auto listed = listed_cases();
  size_t found = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().stem().string();
    EXPECT_NE(std::find(listed.begin(), listed.end(), name), listed.end())
        << name << " is missing in onnx_cases.txt";
    ++found;
  }
  EXPECT_EQ(found, listed.size());
}

}  // namespace
}  // namespace mha
