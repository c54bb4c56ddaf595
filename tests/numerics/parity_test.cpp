// Guards that the module computes what torch's own multi-head attention computes: output,
// weights and all gradients, over 3,200 seeded random configurations. Each is compared with the
// float64 loops of oracle.h, and with torch::nn::MultiheadAttention wherever C++'s can express
// the call and is known to be right (see `builtin_can_express`).
//
// Tolerances are absolute, on data, parameters and gradients that are of unit scale by
// construction: 2e-6 in float32, 16 units in the last place of 1, which is what sums of up to
// 40 products in two different orders come to; 1e-12 in float64. Upstream gradients are divided
// by 2 sqrt(N L), so that the gradients of parameters, which sum over all queries, stay of unit
// scale and the same bounds hold for them.
//
// MHA_TEST_SEED=n runs one seed alone: MHA_TEST_SEED=1234 ./parity_test

#include <ATen/Parallel.h>
#include <mha/multi_head_attention.h>
#include <mha/torch_conversion.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "support/oracle.h"
#include "support/random_configuration.h"
#include "support/support.h"
#include "support/thread_count.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

constexpr uint64_t seeds_per_block = 100;
constexpr uint64_t blocks = 32;

/// All that a call gives. Output (N, L, E) and the gradients of query, key and value are batch
/// first; gradients are by name, those of parameters by the library's names.
struct CallResult {
  at::Tensor output, weights;
  std::map<std::string, at::Tensor> gradients;
};

/// The gradients of sum(output * grad_output) + sum(weights * grad_weights) for `inputs`.
std::map<std::string, at::Tensor> gradients_of(
    const at::Tensor& output, const at::Tensor& weights, const CallData& data,
    InputLayout layout, const std::map<std::string, at::Tensor>& inputs) {
  std::vector<std::string> names;
  std::vector<at::Tensor> leaves;
  for (const auto& [name, leaf] : inputs) {
    names.push_back(name);
    leaves.push_back(leaf);
  }
  std::vector<at::Tensor> results{output};
  std::vector<at::Tensor> upstream{to_layout(data.grad_output, layout)};
  if (weights.defined()) {
    results.push_back(weights);
    upstream.push_back(layout == InputLayout::unbatched ? data.grad_weights.squeeze(0)
                                                        : data.grad_weights);
  }
  // Without allow_unused: an input that lost its gradient is an error.
  const auto values = torch::autograd::grad(results, leaves, upstream);
  std::map<std::string, at::Tensor> gradients;
  for (size_t i = 0; i < names.size(); ++i) gradients[names[i]] = values[i];
  return gradients;
}

std::map<std::string, at::Tensor> input_leaves(const CallData& data) {
  std::map<std::string, at::Tensor> leaves{
      {"query", data.query}, {"key", data.key}, {"value", data.value}};
  if (data.added.defined()) leaves["added mask"] = data.added;
  return leaves;
}

CallResult call_library(MultiHeadAttention& module, const Configuration& c,
                        const CallData& data) {
  const auto argument = c.weights_by_option ? std::nullopt : std::make_optional(c.weights);
  const auto [output, weights] =
      module->forward(to_layout(data.query, c.layout), to_layout(data.key, c.layout),
                      to_layout(data.value, c.layout), data.mask, argument);
  auto leaves = input_leaves(data);
  for (const auto& parameter : module->named_parameters())
    leaves[parameter.key()] = parameter.value();
  CallResult result{from_layout(output, c.layout), weights,
                    gradients_of(output, weights, data, c.layout, leaves)};
  if (weights.defined() && c.layout == InputLayout::unbatched)
    result.weights = weights.unsqueeze(0);
  return result;
}

CallResult call_oracle(const MultiHeadAttention& module, const Configuration& c,
                       const CallData& data) {
  auto [output, weights] = oracle_module(module, data.query, data.key, data.value, data.mask);
  auto grad_weights = data.grad_weights;
  if (c.weights == Weights::averaged) {
    // Every head has an equal part in the mean, and gets an equal part of its gradient.
    weights = weights.mean(1);
    grad_weights = (grad_weights.unsqueeze(1).to(at::kDouble) / c.H).expand({-1, c.H, -1, -1});
  }
  auto gradients = oracle_module_backward(module, data.query, data.key, data.value, data.mask,
                                          data.grad_output, grad_weights);
  CallResult result{output, weights, std::move(gradients.parameters)};
  if (c.weights == Weights::none) result.weights = at::Tensor();
  result.gradients["query"] = gradients.query;
  result.gradients["key"] = gradients.key;
  result.gradients["value"] = gradients.value;
  if (data.added.defined())
    result.gradients["added mask"] = sum_to_mask_shape(gradients.added, data.added);
  return result;
}

/// Whether torch::nn::MultiheadAttention can express the call and answers it rightly. It has no
/// head_dim, scale or kdim != vdim, takes masks of shape (L, S) alone, and gives NaN for rows
/// that may attend to nothing. Its bool attn_mask is wrong as well (added as +1), but the same
/// mask as 0 and -inf is not, and is what `call_builtin` gives it.
bool builtin_can_express(const Configuration& c, const CallData& data) {
  using Kind = AttentionMaskKind;
  const bool mask_has_batch =
      c.attention_mask == Kind::add_batch || c.attention_mask == Kind::add_heads ||
      c.attention_mask == Kind::add_full || c.attention_mask == Kind::block_heads;
  const bool grouped = c.options.num_kv_heads().value_or(c.H) != c.H;
  return !grouped && !c.options.head_dim() && !c.options.scale() && c.kdim == c.vdim &&
         c.options.softcap() == 0 && !c.options.sinks() && !mask_has_batch &&
         count_dead_rows(data.dense) == 0;
}

CallResult call_builtin(torch::nn::MultiheadAttention& module, const Configuration& c,
                        const CallData& data) {
  at::Tensor attention_mask = data.added;
  if (!data.added.defined() && !data.attention_terms.allows_everything()) {
    const auto allowed = dense_mask(data.attention_terms, 1, 1, c.L, c.S).allowed[0][0];
    attention_mask = at::zeros({c.L, c.S}, c.dtype)
                         .masked_fill(allowed == 0, -std::numeric_limits<double>::infinity());
  }
  at::Tensor padding;
  if (!data.padding_terms.allows_everything())
    padding =
        dense_mask(data.padding_terms, c.N, 1, 1, c.S).allowed.select(2, 0).select(1, 0) == 0;

  const auto layout = InputLayout::sequence_first;
  const auto [output, weights] = module->forward(
      to_layout(data.query, layout), to_layout(data.key, layout), to_layout(data.value, layout),
      padding, c.weights != Weights::none, attention_mask, c.weights == Weights::averaged);

  auto leaves = input_leaves(data);
  for (const auto& parameter : module->named_parameters())
    leaves[parameter.key()] = parameter.value();
  CallResult result{from_layout(output, layout), weights,
                    gradients_of(output, weights, data, layout, leaves)};

  // To the library's names: torch stacks what belongs to q, k and v, unless widths differ.
  auto& gradients = result.gradients;
  const auto unstack = [&](const std::string& stacked, const std::string& suffix) {
    if (gradients.count(stacked) == 0) return;
    const auto parts = gradients[stacked].chunk(3);
    gradients["W_q" + suffix] = parts[0];
    gradients["W_k" + suffix] = parts[1];
    gradients["W_v" + suffix] = parts[2];
    gradients.erase(stacked);
  };
  const auto rename = [&](const std::string& from, const std::string& to) {
    auto node = gradients.extract(from);
    if (node.empty()) return;
    node.key() = to;
    gradients.insert(std::move(node));
  };
  unstack("in_proj_weight", ".weight");
  unstack("in_proj_bias", ".bias");
  rename("q_proj_weight", "W_q.weight");
  rename("k_proj_weight", "W_k.weight");
  rename("v_proj_weight", "W_v.weight");
  rename("out_proj.weight", "W_o.weight");
  rename("out_proj.bias", "W_o.bias");
  return result;
}

void expect_equal(const CallResult& actual, const CallResult& expected, const Configuration& c,
                  const std::string& against) {
  const double tolerance = c.dtype == at::kFloat ? 2e-6 : 1e-12;
  const auto where = [&](const std::string& what) {
    return what + " against " + against + ", " + describe(c);
  };
  EXPECT_TRUE(is_close(actual.output, expected.output, tolerance)) << where("output");
  EXPECT_EQ(actual.weights.defined(), c.weights != Weights::none) << where("weights");
  EXPECT_EQ(expected.weights.defined(), c.weights != Weights::none) << where("weights");
  if (actual.weights.defined() && expected.weights.defined()) {
    EXPECT_TRUE(is_close(actual.weights, expected.weights, tolerance)) << where("weights");
  }

  ASSERT_EQ(actual.gradients.size(), expected.gradients.size()) << where("gradients");
  for (const auto& [name, gradient] : actual.gradients) {
    const auto found = expected.gradients.find(name);
    ASSERT_NE(found, expected.gradients.end()) << where("gradient of " + name);
    EXPECT_TRUE(is_close(gradient, found->second, tolerance)) << where("gradient of " + name);
  }
}

torch::nn::MultiheadAttentionOptions builtin_options(const Configuration& c) {
  return torch::nn::MultiheadAttentionOptions(c.options.d_model(), c.H)
      .bias(c.options.bias())
      .add_bias_kv(c.options.add_bias_kv())
      .add_zero_attn(c.options.add_zero_attn())
      .kdim(c.kdim)
      .vdim(c.vdim);
}

/// Whether the weights are carried by `from_torch`, whose result is sequence first and leaves
/// the weights to the argument, rather than by `to_torch`.
bool starts_from_builtin(const Configuration& c) {
  return c.layout == InputLayout::sequence_first && !c.weights_by_option;
}

/// Compares one configuration; whether the built-in was among what it was compared with.
bool compare(const Configuration& c) {
  const auto data = draw_call(c);
  const bool against_builtin = builtin_can_express(c, data);

  MultiHeadAttention module{nullptr};
  torch::nn::MultiheadAttention builtin{nullptr};
  if (against_builtin && starts_from_builtin(c)) {
    builtin = torch::nn::MultiheadAttention(builtin_options(c));
    builtin->to(c.dtype);
    randomise_parameters(*builtin, c.seed);
    module = from_torch(builtin);
  } else {
    module = MultiHeadAttention(c.options);
    randomise_parameters(*module, c.seed);
    if (against_builtin) builtin = to_torch(module);
  }

  const auto result = call_library(module, c, data);
  EXPECT_EQ(result.output.scalar_type(), c.dtype) << describe(c);
  expect_equal(result, call_oracle(module, c, data), c, "the float64 oracle");
  if (against_builtin)
    expect_equal(result, call_builtin(builtin, c, data), c, "torch::nn::MultiheadAttention");
  return against_builtin;
}

class ParityTest : public ::testing::TestWithParam<uint64_t> {
 protected:
  // The calls are so small that a second thread would only wait for the first.
  const ThreadCount one_thread_{1};
};

TEST_P(ParityTest, OutputWeightsAndGradientsAreThoseOfTorchAndOfTheOracle) {
  const auto first = GetParam() * seeds_per_block;
  const auto wanted = seed_from_environment();
  if (wanted && (*wanted < first || *wanted >= first + seeds_per_block))
    GTEST_SKIP() << "MHA_TEST_SEED names a seed of another block";

  int with_builtin = 0;
  for (auto seed = first; seed < first + seeds_per_block; ++seed) {
    if (wanted && seed != *wanted) continue;
    const auto configuration = draw_configuration(seed);
    try {
      with_builtin += compare(configuration);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what() << "\n" << describe(configuration);
    }
    if (HasFailure()) return;  // the first failing seed says enough
  }
  if (!wanted) {
    EXPECT_GE(with_builtin, 30) << "of " << seeds_per_block << " configurations";
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, ParityTest, ::testing::Range<uint64_t>(0, blocks),
                         [](const ::testing::TestParamInfo<uint64_t>& block) {
                           const auto first = block.param * seeds_per_block;
                           return std::to_string(first) + "_to_" +
                                  std::to_string(first + seeds_per_block - 1);
                         });

// The blocks run in processes of their own, so what they cover together is counted here, from
// the same draws: a change to the draws must not quietly take away what the suite compares.
TEST(ParityCoverageTest, EveryOptionIsSeenAndHalfOfTheCallsAreComparedWithTheBuiltin) {
  constexpr auto configurations = seeds_per_block * blocks;
  static_assert(configurations >= 3200);
  std::map<std::string, int> seen, seen_with_builtin;
  for (uint64_t seed = 0; seed < configurations; ++seed) {
    const auto c = draw_configuration(seed);
    const auto data = draw_call(c);
    const bool with_builtin = builtin_can_express(c, data);
    const auto count = [&](const std::string& what, bool present, bool builtin_has_it = true) {
      seen[what] += present;
      if (builtin_has_it) seen_with_builtin[what] += present && with_builtin;
    };
    const auto& o = c.options;
    count("any", true);
    count("float32", c.dtype == at::kFloat);
    count("float64", c.dtype == at::kDouble);
    count("batch first", c.layout == InputLayout::batch_first);
    count("sequence first", c.layout == InputLayout::sequence_first);
    count("unbatched", c.layout == InputLayout::unbatched);
    count("bias", o.bias());
    count("no bias", !o.bias());
    count("kdim = vdim != d_model", c.kdim == c.vdim && c.kdim != o.d_model());
    count("kdim != vdim", c.kdim != c.vdim, false);
    count("head_dim", o.head_dim().has_value(), false);
    count("scale", o.scale().has_value(), false);
    count("softcap", o.softcap() > 0, false);
    count("sinks", o.sinks(), false);
    count("grouped heads", o.num_kv_heads().value_or(c.H) != c.H, false);
    count("add_bias_kv", o.add_bias_kv());
    count("add_zero_attn", o.add_zero_attn());
    count("add_bias_kv and add_zero_attn", c.open_keys == 2);
    count("weights none", c.weights == Weights::none);
    count("weights averaged", c.weights == Weights::averaged);
    count("weights per head", c.weights == Weights::per_head);
    count("weights by option", c.weights_by_option);
    count("weights by argument", !c.weights_by_option);
    using Kind = AttentionMaskKind;
    const auto kind = c.attention_mask;
    count("no attention mask", kind == Kind::none);
    count("added (L, S)", kind == Kind::add);
    count("added 3-D or 4-D",
          kind == Kind::add_batch || kind == Kind::add_heads || kind == Kind::add_full, false);
    count("bool (L, S)", kind == Kind::block || kind == Kind::keep);
    count("causal", kind == Kind::causal);
    count("3-D (N * H, L, S)", kind == Kind::add_heads || kind == Kind::block_heads, false);
    count("no padding", c.padding == PaddingKind::none);
    count("block_keys", c.padding == PaddingKind::block_keys);
    count("keep_keys", c.padding == PaddingKind::keep_keys);
    count("lengths", c.padding == PaddingKind::lengths);
    count("attention mask and padding", kind != Kind::none && c.padding != PaddingKind::none);
    count("dead rows", count_dead_rows(data.dense) > 0, false);
    count("L = 33 or S = 33", c.L == 33 || c.S == 33);
    count("from_torch", starts_from_builtin(c));
  }
  for (const auto& [what, times] : seen) EXPECT_GE(times, what == "any" ? 3200 : 200) << what;
  for (const auto& [what, times] : seen_with_builtin)
    EXPECT_GE(times, what == "any" ? 1500 : 75) << what << ", compared with the built-in";
}

// The sizes at which the reference in Python tests itself.
class ReferenceSizesTest : public ::testing::TestWithParam<Weights> {};

TEST_P(ReferenceSizesTest, EightHeadsOver512FeaturesGiveWhatTorchGives) {
  Random random(20);
  torch::manual_seed(512);
  Configuration c;
  c.options = MultiHeadAttentionOptions(512, 8);
  c.N = 4, c.L = c.S = 20, c.H = 8, c.D = 64;
  c.weights = GetParam();

  CallData data;
  for (auto* input : {&data.query, &data.key, &data.value})
    *input = random.normal({4, 20, 512}).requires_grad_();
  const double unit = 2 * std::sqrt(4 * 20.0);
  data.grad_output = random.normal({4, 20, 512}) / unit;
  if (c.weights == Weights::per_head) data.grad_weights = random.normal({4, 8, 20, 20}) / unit;
  if (c.weights == Weights::averaged) data.grad_weights = random.normal({4, 20, 20}) / unit;

  MultiHeadAttention module(c.options);
  auto builtin = to_torch(module);
  const auto result = call_library(module, c, data);
  EXPECT_EQ(result.output.sizes(), (std::vector<int64_t>{4, 20, 512}));
  if (data.grad_weights.defined()) {
    EXPECT_EQ(result.weights.sizes(), data.grad_weights.sizes());
  }
  expect_equal(result, call_builtin(builtin, c, data), c, "torch::nn::MultiheadAttention");
  if (c.weights == Weights::per_head)  // once: the loops take seconds at this size
    expect_equal(result, call_oracle(module, c, data), c, "the float64 oracle");
}

INSTANTIATE_TEST_SUITE_P(Weights, ReferenceSizesTest,
                         ::testing::Values(Weights::none, Weights::averaged, Weights::per_head),
                         [](const ::testing::TestParamInfo<Weights>& mode) {
                           return ::testing::PrintToString(mode.param);
                         });

}  // namespace
}  // namespace mha::test
