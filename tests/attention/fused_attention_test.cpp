// The kernels against the plain composition, on every instruction set that this CPU has: random
// settings, sizes around every block boundary, few queries over many keys, and the memory they
// take.
//
// Tolerance: both paths are compared with the plain composition in float64, which is itself
// compared with loops in double elsewhere. The contract allows twice the error of the
// composition in float32, thrice for gradients, plus one rounding of the result: as the root
// mean square of a tensor, and as the largest error over all settings, since the largest of one
// small tensor is a matter of chance.

#include "attention/fused_attention.h"

#include <gtest/gtest.h>
#include <mha/cpu_isa.h>
#include <mha/scaled_dot_product_attention.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "attention/plain_attention.h"
#include "support/attention_setting.h"
#include "support/every_isa_test.h"
#include "support/peak_memory.h"
#include "support/support.h"
#include "support/thread_count.h"
#include "support/torch_headers.h"

namespace mha::detail {
namespace {

using test::is_bit_equal;
using test::PeakMemory;
using test::ThreadCount;

// What a call gives by name: output, weights if wanted, gradients of q, k, v, the mask's terms
// and the sinks.
using Results = std::map<std::string, at::Tensor>;
using Path = AttentionResult (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const ResolvedMask&, const AttentionCall&);

Results run(Path path, const AttentionSetting& s, const std::vector<at::Tensor>& inputs,
            const at::Tensor& grad_output, at::ScalarType dtype) {
  std::vector<at::Tensor> leaves;
  for (const auto& input : inputs) leaves.push_back(input.to(dtype).detach().requires_grad_());
  auto mask = resolved_mask(s);
  for (auto* list : added_lists(mask)) {
    for (auto& term : *list) {
      term = term.to(dtype).detach().requires_grad_();
      leaves.push_back(term);
    }
  }
  auto call = s.call;
  auto& sinks = call.scoring.sinks;
  if (sinks.defined()) {
    sinks = sinks.to(dtype).detach().requires_grad_();
    leaves.push_back(sinks);
  }
  const auto result = path(leaves[0], leaves[1], leaves[2], mask, call);
  const auto grads = torch::autograd::grad({result.output}, leaves, {grad_output.to(dtype)});
  Results results{{"output", result.output},
                  {"query gradient", grads[0]},
                  {"key gradient", grads[1]},
                  {"value gradient", grads[2]}};
  if (result.weights.defined()) results["weights"] = result.weights;
  if (!mask.add.empty()) results["mask gradient"] = grads[3];
  if (!mask.relative.empty()) results["table gradient"] = grads[3 + mask.add.size()];
  if (sinks.defined()) results["sink gradient"] = grads.back();
  return results;
}

class FusedAttentionTest : public test::EveryIsaTest {
 protected:
  void TearDown() override {
    EveryIsaTest::TearDown();
    for (const auto& [what, largest] : largest_) {
      EXPECT_LE(largest.kernels, factor(what) * largest.composition + 1)
          << "largest error of " << what
          << " over all settings, in roundings of the result; the "
          << "composition's is " << largest.composition;
    }
  }

  void expect_kernels_agree(const AttentionSetting& s, int64_t seed) {
    torch::manual_seed(seed);
    const int64_t keys = s.keys + s.extra;
    const std::vector<at::Tensor> inputs{
        torch::randn({s.batch, s.queries, s.heads, s.head_dim}).transpose(1, 2),
        torch::randn({s.batch, s.kv_heads, keys, s.head_dim}),
        torch::randn({s.batch, s.kv_heads, keys, s.value_dim})};
    const auto grad_output = torch::randn({s.batch, s.heads, s.queries, s.value_dim});
    const auto exact = run(plain_attention, s, inputs, grad_output, at::kDouble);
    const auto composed = run(plain_attention, s, inputs, grad_output, at::kFloat);
    for (const CpuIsa isa : available_cpu_isas()) {
      set_cpu_isa(isa);
      const auto actual = run(fused_attention, s, inputs, grad_output, at::kFloat);
      ASSERT_EQ(actual.size(), exact.size()) << s;
      for (const auto& [what, result] : actual) {
        compare(what, result, composed.at(what), exact.at(what), s, seed);
      }
    }
  }

 private:
  struct LargestErrors {
    double kernels = 0, composition = 0;
  };
  static double factor(const std::string& what) {
    return what == "output" || what == "weights" ? 2 : 3;
  }

  void compare(const std::string& what, const at::Tensor& actual, const at::Tensor& composed,
               const at::Tensor& exact, const AttentionSetting& s, int64_t seed) {
    constexpr int64_t enough_elements = 256;
    if (exact.numel() == 0) return;
    const auto error = (actual.to(at::kDouble) - exact).abs();
    const auto composed_error = (composed.to(at::kDouble) - exact).abs();
    const double largest_value = exact.abs().max().item<double>();
    const double rounding = largest_value * 0x1p-24;
    const auto rms = [](const at::Tensor& t) {
      return t.square().mean().sqrt().item<double>();
    };
    if (exact.numel() >= enough_elements) {
      EXPECT_LE(rms(error), factor(what) * rms(composed_error) + rounding)
          << what << "; seed " << seed << "; " << s;
    }
    // A gradient that a single open key leaves at 0, but for float64's own rounding.
    constexpr double nothing = 1e-12;
    if (largest_value < nothing) {
      EXPECT_LE(error.max().item<double>(), 1e-5) << what << "; seed " << seed << "; " << s;
      return;
    }
    auto& largest = largest_[what];
    largest.kernels = std::max(largest.kernels, error.max().item<double>() / rounding);
    largest.composition =
        std::max(largest.composition, composed_error.max().item<double>() / rounding);
  }

  std::map<std::string, LargestErrors> largest_;
};

TEST_F(FusedAttentionTest, AgreesWithThePlainPathInFiveHundredRandomSettings) {
  for (int64_t seed = 0; seed < 500; ++seed) {
    expect_kernels_agree(draw_setting(seed), seed);
  }
}

// Tiles are 12, 24 or 48 queries, key blocks 96 keys, edges of a band 16, vectors 4, 8 or 16
// lanes.
TEST_F(FusedAttentionTest, AgreesAroundEveryBlockBoundary) {
  const int64_t around[] = {15, 16, 17, 23, 24, 25, 47, 48, 49, 95, 96, 97, 191, 193, 256, 257};
  int64_t seed = 0;
  for (const int64_t length : around) {
    const auto ids = (at::arange(length) * 3).div(length, "floor");
    for (const auto& mask : {Mask(), Mask::causal(), Mask::window(20, 5)}) {
      expect_kernels_agree({1, 2, 2, length, length, 0, 16, 16, mask, call_for(16)}, ++seed);
      expect_kernels_agree({1, 1, 1, 3, length + 256, 0, 64, 64, mask, call_for(64)}, ++seed);
    }
    for (const auto& mask :
         {Mask::documents(ids), Mask::documents(ids) & Mask::causal(),
          Mask::documents(at::arange(length) % 3), Mask::alibi(torch::tensor({0.5f, 0.01f}))}) {
      expect_kernels_agree({1, 2, 2, length, length, 0, 16, 16, mask, call_for(16)}, ++seed);
    }
  }
}

// Few heads over many keys: the backward splits the keys into chunks of whole key blocks.
TEST_F(FusedAttentionTest, AgreesWhereTheBackwardSplitsTheKeys) {
  int64_t seed = 2000;
  for (const int64_t keys : {1023, 1024, 1152, 1153, 2100}) {
    for (const int64_t kv_heads : {1, 8}) {
      for (const auto& mask :
           {Mask(), Mask::causal(), Mask::window(200, 10),
            Mask::lengths(torch::tensor({700, 0})), Mask::add(torch::randn({50, keys})),
            Mask::relative(torch::randn({1, keys + 49})),
            Mask::documents(at::arange(50).div(20, "floor"),
                            at::arange(keys).div(300, "floor"))}) {
        expect_kernels_agree(
            {2, kv_heads, kv_heads, 50, keys, seed % 3, 16, 16, mask, call_for(16)}, ++seed);
      }
    }
  }
}

// A chunk has 2112 keys, to whose gradients eight heads add. They are summed aside up to 2^20
// numbers, which is more than 2112 times 256 and 240 but less than 2112 times 512. Columns of
// zeros change no bit.
TEST_F(FusedAttentionTest, GradientsAreTheSameWhereTheSumsAreTooManyToKeepAside) {
  const auto q = torch::randn({1, 16, 5, 256}), k = torch::randn({1, 2, 8400, 256});
  const auto v = torch::randn({1, 2, 8400, 240}), upstream = torch::randn({1, 16, 5, 240});
  const auto gradients = [&](const at::Tensor& value, const at::Tensor& gradient) {
    const std::vector<at::Tensor> leaves{q.detach().requires_grad_(),
                                         k.detach().requires_grad_(),
                                         value.detach().requires_grad_()};
    const auto output = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], {},
                                                     AttentionOptions().weights(Weights::none))
                            .output;
    return torch::autograd::grad({output}, leaves, {gradient});
  };
  for (const CpuIsa isa : available_cpu_isas()) {
    set_cpu_isa(isa);
    const auto aside = gradients(v, upstream);
    auto in_place =
        gradients(at::constant_pad_nd(v, {0, 16}), at::constant_pad_nd(upstream, {0, 16}));
    in_place[2] = in_place[2].narrow(3, 0, 240);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(is_bit_equal(in_place[i], aside[i])) << isa << ", " << i;
    }
  }
}

// Eight tiles and more, whose gradients of keys are summed aside, over a few heads and keys.
TEST_F(FusedAttentionTest, AgreesWhereManyTilesAddToTheGradientsOfKeys) {
  int64_t seed = 3000;
  for (const int64_t queries : {350, 400}) {
    for (const auto& mask : {Mask(), Mask::causal(), Mask::window(100, 7)}) {
      expect_kernels_agree({2, 2, 2, queries, queries, 0, 16, 16, mask, call_for(16)}, ++seed);
      expect_kernels_agree({1, 4, 2, 200, 97, 0, 33, 20, mask, call_for(33)}, ++seed);
    }
  }
}

TEST_F(FusedAttentionTest, AgreesForEveryHeadSizeAroundTheVectorWidths) {
  int64_t seed = 1000;
  for (const int64_t dim :
       {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 256}) {
    expect_kernels_agree({1, 2, 1, 20, 30, 0, dim, dim, Mask::causal(), call_for(dim)}, ++seed);
    expect_kernels_agree({1, 2, 1, 2, 300, 0, dim, dim, Mask::causal(), call_for(dim)}, ++seed);
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// One map of one head would be 1 GiB at 16,384 and 256 MiB at 8,192.
TEST_F(FusedAttentionTest, LongInputsTakeNoMemoryForAMap) {
  const auto q = torch::randn({1, 2, 16384, 64}), k = torch::randn({1, 2, 16384, 64});
  const auto v = torch::randn({1, 2, 16384, 64});
  const auto options = AttentionOptions().weights(Weights::none);
  const ThreadCount threads(2);  // each has scratch of its own
  PeakMemory::reset();
  const double before = PeakMemory::mib();
  if (before == 0) GTEST_SKIP() << "no VmHWM in /proc/self/status";
  const auto output = scaled_dot_product_attention(q, k, v, Mask::causal(), options).output;
  EXPECT_LT(PeakMemory::mib() - before, 8 + 32) << "forward: the output is 8 MiB";

  std::vector<at::Tensor> leaves;
  for (const auto& t : {q, k, v}) {
    leaves.push_back(t.narrow(2, 0, 8192).contiguous().requires_grad_());
  }
  PeakMemory::reset();
  const double before_training = PeakMemory::mib();
  scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], Mask::causal(), options)
      .output.sum()
      .backward();
  EXPECT_LT(PeakMemory::mib() - before_training, 4 * 8 + 32)
      << "training: output, its gradient and those of q, k and v are 4 MiB each";
}

// One map of one head would be 256 MiB, one of bool 64 MiB.
TEST_F(FusedAttentionTest, MasksOfPositionsTakeNoMemoryForAMap) {
  constexpr int64_t length = 8192;
  const auto q = torch::randn({1, 2, length, 64}), k = torch::randn({1, 2, length, 64});
  const auto options = AttentionOptions().weights(Weights::none);
  const auto ids = at::arange(length).div(512, "floor");
  const auto slopes = torch::tensor({0.5f, 0.01f}), table = torch::randn({2, 2 * length - 1});
  const ThreadCount threads(2);
  PeakMemory::reset();
  const double before = PeakMemory::mib();
  if (before == 0) GTEST_SKIP() << "no VmHWM in /proc/self/status";
  const auto mask = Mask::documents(ids) & Mask::alibi(slopes) & Mask::relative(table) &
                    Mask::window(300, 20) & Mask::causal(torch::tensor({5}));
  scaled_dot_product_attention(q, k, k, mask, options);
  EXPECT_LT(PeakMemory::mib() - before, 4 + 32) << "forward: the output is 4 MiB";

  const auto leaf = table.clone().requires_grad_();
  PeakMemory::reset();
  const double before_training = PeakMemory::mib();
  scaled_dot_product_attention(q, k, k, Mask::documents(ids) & Mask::relative(leaf), options)
      .output.sum()
      .backward();
  EXPECT_LT(PeakMemory::mib() - before_training, 5 * 4 + 32)
      << "training: output, its gradient and those of q, k and v are 4 MiB each";
}
#endif

}  // namespace
}  // namespace mha::detail
