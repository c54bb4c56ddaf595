// Guards the kernels on matrix tiles (AMX): their emulation, on which all other tests of them
// run where a CPU has no tiles, against the float32 kernels; and on a CPU that has them, the
// emulation against the CPU itself, bit for bit: the instruction sums even and odd places of
// the depth apart, each product and sum rounded once, and counts denormals as zero (Intel,
// Software Developer's Manual, TDPBF16PS).
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <mha/cpu_isa.h>
#include <mha/scaled_dot_product_attention.h>
#include <sys/wait.h>
#include <torch/csrc/autograd/autograd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "attention/kernel_call.h"
#include "runtime/cpu_kernels.h"
#include "support/attention_setting.h"
#include "support/every_isa_test.h"
#include "support/support.h"
#include "support/thread_count.h"

namespace mha {
namespace {

using test::is_bit_equal;
using test::is_close;
using test::Random;

bool is_available(CpuIsa isa) {
  const auto sets = available_cpu_isas();
  return std::find(sets.begin(), sets.end(), isa) != sets.end();
}

/// On the emulation, and on tiles where the CPU has them.
class MatrixTilesTest : public test::EveryIsaTest {
 protected:
  void SetUp() override {
    EveryIsaTest::SetUp();
    if (IsSkipped()) return;
    if (!is_available(CpuIsa::amx_emulated)) GTEST_SKIP() << "the emulation needs AVX-512";
    for (const CpuIsa isa : {CpuIsa::amx_emulated, CpuIsa::amx}) {
      if (is_available(isa)) sets_.push_back(isa);
    }
  }
  std::vector<CpuIsa> sets_;
};

struct Call {
  at::Tensor query, key, value;
  Mask mask;
  AttentionOptions options;
};

/// Sizes around those of tiles and blocks, all masks and options that the tiles serve.
Call draw_call(uint64_t seed) {
  Random random(seed);
  const int64_t n = random.between(1, 2), kv_heads = random.between(1, 2),
                heads = kv_heads * random.between(1, 3), l = random.between(5, 100),
                s = random.between(1, seed % 4 == 0 ? 700 : 150), d = random.between(1, 130),
                value_dim = random.between(1, 130);
  Call call{random.normal({n, heads, l, d}, at::kBFloat16),
            random.normal({n, kv_heads, s, d}, at::kBFloat16),
            random.normal({n, kv_heads, s, value_dim}, at::kBFloat16),
            {},
            AttentionOptions().weights(Weights::none)};
  if (random.chance(0.3)) call.mask = call.mask & Mask::causal();
  if (random.chance(0.3)) call.mask = call.mask & Mask::window(random.between(0, 40), 3);
  if (random.chance(0.3)) call.mask = call.mask & Mask::keep(random.coins({l, s}, 0.7));
  if (random.chance(0.3)) call.mask = call.mask & Mask::add(random.normal({l, s}));
  if (random.chance(0.3)) call.options.softcap(3);
  if (random.chance(0.3)) call.options.sinks(random.normal({heads}));
  if (random.chance(0.3)) call.options.dropout(0.3);
  if (random.chance(0.2)) call.options.scale(-0.2);
  return call;
}

/// Output and gradients of query, key and value on `isa`.
std::vector<at::Tensor> results_on(CpuIsa isa, const Call& call, uint64_t seed) {
  set_cpu_isa(isa);
  torch::manual_seed(seed);
  std::vector<at::Tensor> leaves;
  for (const auto& given : {call.query, call.key, call.value}) {
    leaves.push_back(given.detach().requires_grad_());
  }
  const auto output =
      scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], call.mask, call.options)
          .output;
  auto results = torch::autograd::grad(
      {output}, leaves, {Random(seed + 1).normal(output.sizes(), at::kBFloat16)});
  results.push_back(output.detach());
  return results;
}

// At most the rounding of inputs' products, of weights and of results apart: all numbers are of
// order 1, sums of weights 1.
TEST_F(MatrixTilesTest, GiveWhatFloat32KernelsGiveButForRoundings) {
  for (uint64_t seed = 0; seed < 120; ++seed) {
    const auto call = draw_call(seed);
    const auto expected = results_on(CpuIsa::avx512, call, seed);
    for (const CpuIsa isa : sets_) {
      const auto actual = results_on(isa, call, seed);
      for (size_t i = 0; i < actual.size(); ++i) {
        EXPECT_EQ(actual[i].scalar_type(), at::kBFloat16);
        const double largest =
            expected[i].numel() == 0 ? 0 : expected[i].abs().max().item<double>();
        EXPECT_TRUE(is_close(actual[i], expected[i], 0x1p-6 * (1 + largest)))
            << isa << "; result " << i << "; seed " << seed;
      }
    }
  }
}

TEST_F(MatrixTilesTest, GiveTheSameBitsOnTheCpuAsInTheEmulation) {
  if (!is_available(CpuIsa::amx)) GTEST_SKIP() << "this CPU has no tiles, or may not use them";
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const auto call = draw_call(seed);
    const auto expected = results_on(CpuIsa::amx_emulated, call, seed);
    const auto actual = results_on(CpuIsa::amx, call, seed);
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_TRUE(is_bit_equal(actual[i], expected[i])) << "result " << i << "; seed " << seed;
    }
  }
}

TEST_F(MatrixTilesTest, GiveTheSameBitsForAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  for (uint64_t seed = 400; seed < 440; ++seed) {
    const auto call = draw_call(seed);
    for (const CpuIsa isa : sets_) {
      at::set_num_threads(1);
      const auto expected = results_on(isa, call, seed);
      for (const int threads : {2, 3, 8}) {
        at::set_num_threads(threads);
        const auto actual = results_on(isa, call, seed);
        for (size_t i = 0; i < actual.size(); ++i) {
          EXPECT_TRUE(is_bit_equal(actual[i], expected[i])) << isa << "; seed " << seed;
        }
      }
    }
  }
  at::set_num_threads(before);
}

// Long enough that few heads are split into chunks of keys, whose shares are then summed.
TEST_F(MatrixTilesTest, SplitALongBackwardIntoChunks) {
  Random random(1);
  Call call{random.normal({1, 2, 40, 32}, at::kBFloat16),
            random.normal({1, 1, 2100, 32}, at::kBFloat16),
            random.normal({1, 1, 2100, 48}, at::kBFloat16), Mask::causal(),
            AttentionOptions().weights(Weights::none)};
  const auto expected = results_on(CpuIsa::avx512, call, 0);
  for (const CpuIsa isa : sets_) {
    const auto actual = results_on(isa, call, 0);
    for (size_t i = 0; i < actual.size(); ++i) {
      const double largest = expected[i].abs().max().item<double>();
      EXPECT_TRUE(is_close(actual[i], expected[i], 0x1p-6 * largest)) << isa << ", " << i;
    }
  }
}

// Linux keeps the permission for tiles over `fork`, and each thread has tiles of its own.
TEST_F(MatrixTilesTest, WorkInManyThreadsAndAfterFork) {
  const test::ThreadCount one_thread(1);  // OpenMP's threads do not survive a fork
  const auto call = draw_call(7);
  for (const CpuIsa isa : sets_) {
    set_cpu_isa(isa);
    const auto forward = [&] {
      const at::NoGradGuard no_grad;
      const auto options = AttentionOptions(call.options).dropout(0);
      return scaled_dot_product_attention(call.query, call.key, call.value, call.mask, options)
          .output;
    };
    const auto expected = forward();
    const auto same = [&] { return forward().equal(expected); };
    std::vector<std::thread> threads;
    std::atomic<int> right{0};
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int round = 0; round < 5; ++round) right += same() ? 1 : 0;
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(right, 20) << isa;
    const pid_t child = fork();
    if (child == 0) _exit(same() ? 0 : 1);
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << isa;
  }
}

// A row that sees one key gets its value, and nothing flows through its score: few keys and
// many.
TEST_F(MatrixTilesTest, AKeyThatIsOpenAloneHasWeightOne) {
  for (const int64_t length : {40, 512}) {
    Random random(length);
    Call call{random.normal({1, 1, length, 64}, at::kBFloat16),
              random.normal({1, 1, length, 64}, at::kBFloat16),
              random.normal({1, 1, length, 64}, at::kBFloat16), Mask::keep(at::eye(length)),
              AttentionOptions().weights(Weights::none)};
    for (const CpuIsa isa : sets_) {
      const auto results = results_on(isa, call, 0);
      EXPECT_TRUE(is_bit_equal(results[3], call.value)) << isa << ", " << length;
      // Of many keys delta is another sum of the same products.
      EXPECT_TRUE(is_close(results[0], at::zeros_like(results[0]), 1e-4)) << isa << length;
      EXPECT_TRUE(is_close(results[1], at::zeros_like(results[1]), 1e-4)) << isa << length;
    }
  }
}

TEST_F(MatrixTilesTest, AScaleOfZeroGivesTheMeanOfTheValues) {
  Random random(3);
  const auto x = random.normal({1, 2, 40, 16}, at::kBFloat16);
  const auto mean = x.to(at::kDouble).mean(2, /*keepdim=*/true).expand(x.sizes());
  for (const CpuIsa isa : sets_) {
    set_cpu_isa(isa);
    for (const double scale : {0.0, 1e-50}) {
      const auto options = AttentionOptions().weights(Weights::none).scale(scale);
      EXPECT_TRUE(
          is_close(scaled_dot_product_attention(x, x, x, {}, options).output, mean, 0x1p-8))
          << isa << ", " << scale;
    }
  }
}

// What the mask adds wants no gradient here, and stands before the sinks among the inputs.
TEST_F(MatrixTilesTest, SinksBesideAddedTermsGetTheirGradient) {
  Random random(5);
  const auto x = random.normal({1, 2, 40, 16}, at::kBFloat16).requires_grad_();
  const auto sinks = random.normal({2}).requires_grad_();
  const auto mask = Mask::add(random.normal({40, 40}));
  const auto options = AttentionOptions().weights(Weights::none).sinks(sinks);
  const auto gradient = [&](CpuIsa isa) {
    set_cpu_isa(isa);
    const auto output = scaled_dot_product_attention(x, x, x, mask, options).output;
    return torch::autograd::grad({output.sum()}, {sinks})[0];
  };
  const auto expected = gradient(CpuIsa::avx512);
  for (const CpuIsa isa : sets_) {
    EXPECT_TRUE(
        is_close(gradient(isa), expected, 0x1p-5 * expected.abs().max().item<double>()));
  }
}

TEST_F(MatrixTilesTest, TheSetMayChangeBeforeTheBackward) {
  Random random(6);
  const auto x = random.normal({1, 2, 40, 16}, at::kBFloat16).requires_grad_();
  const auto gradient = [&](CpuIsa forward, CpuIsa backward) {
    set_cpu_isa(forward);
    const auto options = AttentionOptions().weights(Weights::none);
    const auto output = scaled_dot_product_attention(x, x, x, Mask::causal(), options).output;
    set_cpu_isa(backward);
    return torch::autograd::grad({output.pow(2).sum()}, {x})[0];
  };
  const auto expected = gradient(CpuIsa::avx512, CpuIsa::avx512);
  const double tolerance = 0x1p-5 * expected.abs().max().item<double>();
  for (const CpuIsa isa : sets_) {
    EXPECT_TRUE(is_close(gradient(isa, CpuIsa::avx512), expected, tolerance)) << isa;
    EXPECT_TRUE(is_close(gradient(CpuIsa::avx512, isa), expected, tolerance)) << isa;
  }
}

// Beyond the range of scores another way is taken, also for what all may see.
TEST_F(MatrixTilesTest, ABlockedKeyOfAnyMagnitudeChangesNoBit) {
  Random random(8);
  auto key = random.normal({1, 4, 128, 64}, at::kBFloat16);
  const auto query = random.normal({1, 4, 512, 64}, at::kBFloat16),
             value = random.normal({1, 4, 128, 64}, at::kBFloat16);
  const auto mask = Mask::lengths(at::full({1}, 64, at::kLong));
  for (const CpuIsa isa : sets_) {
    set_cpu_isa(isa);
    const auto attend = [&](double number) {
      key.select(2, 100).fill_(number);
      return scaled_dot_product_attention(query, key, value, mask,
                                          AttentionOptions().weights(Weights::none))
          .output;
    };
    const auto expected = attend(0);
    for (const double number : {3e38, std::numeric_limits<double>::quiet_NaN()}) {
      EXPECT_TRUE(is_bit_equal(attend(number), expected)) << isa << ", " << number;
    }
  }
}

TEST_F(MatrixTilesTest, AreChosenForBfloat16WithoutWeightsAndManyQueries) {
  set_cpu_isa(CpuIsa::amx_emulated);
  const auto chosen = [](at::ScalarType dtype, int64_t queries, Weights weights) {
    const auto q = at::empty({1, 1, queries, 16}, dtype), k = at::empty({1, 1, 600, 16}, dtype);
    detail::AttentionCall call{{0.25}, weights};
    const auto mask = detail::resolve(Mask(), {{}, 1, 1, queries, 600}, at::kCPU);
    return detail::choose_forward_kernel(q, k, k, mask, call);
  };
  using Kernel = detail::ForwardKernel;
  EXPECT_EQ(chosen(at::kBFloat16, 40, Weights::none), Kernel::matrix_tiles);
  EXPECT_NE(chosen(at::kBFloat16, 40, Weights::per_head), Kernel::matrix_tiles);
  EXPECT_EQ(chosen(at::kBFloat16, 1, Weights::none), Kernel::chunks);
  EXPECT_EQ(chosen(at::kFloat, 40, Weights::none), Kernel::tiles);
  EXPECT_EQ(chosen(at::kHalf, 40, Weights::none), Kernel::widened_tiles);
}

}  // namespace
}  // namespace mha
