// In steady state a forward without gradients takes no large memory but for its results, and
// what it hands out is never written again.

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <mha/multi_head_attention.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/attention_path.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

/// Sizes in bytes of the large allocations of this thread, as LibTorch's allocator reports
/// them.
class LargeAllocations : public c10::MemoryReportingInfoBase {
 public:
  bool memoryProfilingEnabled() const override { return true; }
  void reportMemoryUsage(void* /*data*/, int64_t size, size_t /*total_allocated*/,
                         size_t /*total_reserved*/, c10::Device /*device*/) override {
    if (size >= int64_t{64} << 10) sizes.push_back(size);
  }
  std::vector<int64_t> sizes;
};

// Of `call`, after two that pack weights and fill the pool.
template <typename Call>
std::vector<int64_t> large_allocations(const Call& call) {
  at::NoGradGuard no_grad;
  for (int i = 0; i < 2; ++i) call();
  const auto allocations = std::make_shared<LargeAllocations>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, allocations);
  call();
  return allocations->sizes;
}

TEST(AllocationTest, SteadyStateTakesLargeMemoryForTheResultsOnly) {
  if (detail::kernels_are_off()) GTEST_SKIP() << "MHA_PATH=plain: it holds maps";
  MultiHeadAttention module(MultiHeadAttentionOptions(256, 4));
  module->eval();
  Random random(1);
  const auto x = random.normal({2, 150, 256});
  const int64_t output = 2 * 150 * 256 * 4, map = 2 * 4 * 150 * 150 * 4;
  for (const auto& mask : {Mask(), Mask::causal()}) {
    const auto allocations = [&](Weights weights) {
      return large_allocations([&] { module->forward(x, x, x, mask, weights); });
    };
    EXPECT_EQ(allocations(Weights::none), std::vector<int64_t>{output});
    EXPECT_EQ(allocations(Weights::per_head), (std::vector<int64_t>{map, output}));
  }
}

TEST(AllocationTest, AStepOverACacheCopiesNoneOfItWhateverItsDtype) {
  if (detail::kernels_are_off()) GTEST_SKIP() << "MHA_PATH=plain: it copies keys";
  at::NoGradGuard no_grad;
  MultiHeadAttention module(MultiHeadAttentionOptions(64, 4).num_kv_heads(2));
  module->eval();
  Random random(3);
  const auto x = random.normal({2, 2000, 64}), token = random.normal({2, 1, 64});
  for (const auto stored : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const KVCache cache(KVCacheOptions().dtype(stored).capacity(2010));
    const auto call = CallOptions(Mask::causal()).weights(Weights::none).cache(cache);
    module->attend(x, call);
    EXPECT_TRUE(large_allocations([&] { module->attend(token, call); }).empty()) << stored;
  }
}

TEST(AllocationTest, RotatingNormalisingAndGatingTakeNoLargeMemory) {
  if (detail::kernels_are_off()) GTEST_SKIP() << "MHA_PATH=plain: it holds maps";
  MultiHeadAttention module(MultiHeadAttentionOptions(256, 4)
                                .rotary(RotaryOptions())
                                .qk_norm(QKNorm::rms)
                                .output_gate(OutputGate::elementwise));
  Random random(3);
  const auto x = random.normal({2, 150, 256});
  const auto call = CallOptions(Mask::causal()).weights(Weights::none);
  EXPECT_EQ(large_allocations([&] { module->attend(x, call); }),
            std::vector<int64_t>{2 * 150 * 256 * 4});
}

TEST(AllocationTest, ResultsAreTheCallersOwn) {
  at::NoGradGuard no_grad;
  MultiHeadAttention module(MultiHeadAttentionOptions(64, 4));
  module->eval();
  Random random(2);
  const auto x = random.normal({4, 100, 64});
  const auto first = module->forward(x, x, x, {}, Weights::per_head);
  const auto output = first.output.clone(), weights = first.weights.clone();
  module->forward(-x, x, x, {}, Weights::per_head);
  EXPECT_TRUE(is_bit_equal(first.output, output));
  EXPECT_TRUE(is_bit_equal(first.weights, weights));
}

}  // namespace
}  // namespace mha::test
