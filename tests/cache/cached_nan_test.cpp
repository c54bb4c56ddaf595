// Guards that NaN in tokens without effect stays there in calls over a cache or a memory:
// queries that see nothing, and padding. Bit-equal to the same call with zeros in their place.

#include <gtest/gtest.h>
#include <mha/multi_head_attention.h>

#include <limits>
#include <vector>

#include "support/expect.h"
#include "support/support.h"
#include "support/torch_headers.h"
#include "support/values.h"

namespace mha::test {
namespace {

// A module of which the queries' part alone trains, since no gradient flows into a cache.
MultiHeadAttention with_trained_queries(const MultiHeadAttentionOptions& options) {
  torch::manual_seed(1);
  MultiHeadAttention module(options);
  for (auto& parameter : module->parameters()) parameter.set_requires_grad(false);
  module->W_q->weight.set_requires_grad(true);
  if (!module->W_g.is_empty()) module->W_g->weight.set_requires_grad(true);
  return module;
}

std::vector<at::Tensor> query_gradients(const MultiHeadAttention& module,
                                        const at::Tensor& loss) {
  std::vector<at::Tensor> trained;
  for (const auto& parameter : module->parameters()) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  return torch::autograd::grad({loss}, trained);
}

TEST(CachedNaNTest, InAQueryThatSeesNothingReachesNoOutputAndNoGradient) {
  for (const auto gate : {OutputGate::none, OutputGate::elementwise}) {
    auto module = with_trained_queries(MultiHeadAttentionOptions(16, 2).output_gate(gate));
    Random random(12);
    const auto zeros = random.normal({2, 4, 16});
    zeros[1].fill_(0);
    auto dirty = zeros.clone();
    dirty[1].fill_(std::numeric_limits<double>::quiet_NaN());
    const auto attend = [&](const at::Tensor& x, const KVCache& cache) {
      return module->attend(x, CallOptions(Mask::lengths(numbers({4, 0}))).cache(cache)).output;
    };
    const KVCache of_zeros, of_dirty;
    const auto expected = attend(zeros, of_zeros), output = attend(dirty, of_dirty);
    EXPECT_TRUE(is_same_result(output, expected));
    const auto wanted = query_gradients(module, expected.sum());
    const auto gradients = query_gradients(module, output.sum());
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_TRUE(is_same_but_for_blas(gradients[i], wanted[i])) << i;
    }
    // Later calls may see these keys.
    EXPECT_TRUE(of_dirty.key()[1].isnan().all().item<bool>());
    at::NoGradGuard no_grad;
    EXPECT_TRUE(is_close(attend(dirty, KVCache()), expected, 1e-6));
  }
}

TEST(CachedNaNTest, InPaddingTokensReachesNoOtherOutputAndNoGradient) {
  for (const bool extra : {false, true}) {
    auto module = with_trained_queries(MultiHeadAttentionOptions(16, 2).add_zero_attn(extra));
    Random random(13);
    const auto prompt = random.normal({2, 3, 16}), zeros = random.normal({2, 4, 16});
    zeros[1].slice(0, 1).fill_(0);
    auto dirty = zeros.clone();
    dirty[1].slice(0, 1).fill_(std::numeric_limits<double>::quiet_NaN());
    // The real tokens' outputs.
    const auto attend = [&](const at::Tensor& x) {
      const auto call = CallOptions(Mask::causal()).cache(KVCache());
      module->attend(prompt, CallOptions(call).new_lengths(numbers({2, 3})));
      const auto output =
          module->attend(x, CallOptions(call).new_lengths(numbers({4, 1}))).output;
      return at::cat({output[0], output[1].narrow(0, 0, 1)});
    };
    const auto expected = attend(zeros), output = attend(dirty);
    EXPECT_TRUE(is_same_result(output, expected));
    EXPECT_TRUE(is_same_but_for_blas(query_gradients(module, output.square().sum())[0],
                                     query_gradients(module, expected.square().sum())[0]));
  }
}

TEST(CachedNaNTest, InAQueryThatSeesNothingOfAMemoryReachesNoGradient) {
  torch::manual_seed(1);
  MultiHeadAttention module(MultiHeadAttentionOptions(16, 2));
  Random random(11);
  const auto key = random.normal({2, 4, 16});
  const auto query = random.normal({2, 1, 16});
  query[1].fill_(std::numeric_limits<double>::quiet_NaN());
  const auto memory = [&] {
    at::NoGradGuard no_grad;
    return module->project_keys(key);
  }();
  const auto result =
      module->attend(query, CallOptions(Mask::lengths(numbers({4, 0}))).memory(memory));
  EXPECT_TRUE(is_close(result.output[1][0], module->W_o->bias, 0));
  result.output.sum().backward();
  EXPECT_TRUE(is_finite(module->W_q->weight.grad()));
}

}  // namespace
}  // namespace mha::test
