// Guards that a call which fails leaves the cache as it was, whenever it fails: each allocation
// of a call is refused in turn, and the call is made again. The cache before the second call
// and its output are bit-equal to those of a call that never failed.
#include <c10/core/CPUAllocator.h>
#include <mha/multi_head_attention.h>

#include <atomic>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "runtime/attention_path.h"
#include "support/expect.h"
#include "support/support.h"
#include "support/values.h"

namespace mha::test {
namespace {

// While it lives, allocation number `good` of tensors' memory and all later ones fail.
class FailingAllocations : public c10::Allocator {
 public:
  explicit FailingAllocations(int64_t good) : good_(good), real_(c10::GetCPUAllocator()) {
    c10::SetCPUAllocator(this, /*priority=*/100);
  }
  ~FailingAllocations() override { c10::SetCPUAllocator(real_, /*priority=*/100); }
  FailingAllocations(const FailingAllocations&) = delete;
  FailingAllocations& operator=(const FailingAllocations&) = delete;

  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(good_-- > 0, "no memory, says the test");
    return real_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return real_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

 private:
  std::atomic<int64_t> good_;
  c10::Allocator* real_;
};

// The tokens of each sample, (Hk, length, D): what lies behind them means nothing.
std::vector<at::Tensor> tokens_of(const at::Tensor& held, const at::Tensor& lengths) {
  std::vector<at::Tensor> samples;
  for (int64_t n = 0; held.defined() && n < held.size(0); ++n) {
    samples.push_back(held[n].narrow(1, 0, lengths[n].item<int64_t>()).clone());
  }
  return samples;
}

struct CacheContents {
  explicit CacheContents(const KVCache& cache)
      : lengths(cache.lengths()),
        next(cache.next_positions()),
        key(tokens_of(cache.key(), lengths)),
        value(tokens_of(cache.value(), lengths)),
        nbytes(cache.nbytes()) {}
  at::Tensor lengths, next;
  std::vector<at::Tensor> key, value;
  int64_t nbytes;
};

// With numbers equal as `equal` says.
template <typename Equal>
::testing::AssertionResult holds(const KVCache& cache, const CacheContents& before,
                                 Equal equal) {
  const CacheContents now(cache);
  if (!at::equal(now.lengths, before.lengths) || !at::equal(now.next, before.next)) {
    return ::testing::AssertionFailure() << "tokens " << now.next << " for " << before.next;
  }
  if (now.nbytes != before.nbytes) {
    return ::testing::AssertionFailure() << now.nbytes << " bytes for " << before.nbytes;
  }
  for (size_t n = 0; n < now.key.size(); ++n) {
    const auto keys = equal(now.key[n], before.key[n]);
    const auto values = equal(now.value[n], before.value[n]);
    if (!keys || !values) return keys ? values : keys;
  }
  return ::testing::AssertionSuccess();
}

// Where LibTorch's BLAS formed them, a cache of a half type may hold the neighbouring number,
// and that is what its queries see. A token more or less changes results by far more.
::testing::AssertionResult is_same_of_cached(const at::Tensor& actual,
                                             const at::Tensor& expected) {
  if (const auto same = is_same_result(actual, expected); same || !detail::kernels_are_off()) {
    return same;
  }
  return is_close(actual, expected, 4 * unit_roundoff(at::kBFloat16));
}

// Returns its results, for which it takes no memory after the change.
using Change = std::function<std::vector<at::Tensor>(KVCache&)>;

// Makes `change` to copies of the cache, with its allocations refused from each one on, until
// none is. Returns how many times it failed.
int64_t fail_at_every_allocation(const std::function<KVCache()>& make, const Change& change) {
  KVCache undisturbed = make();
  std::vector<at::Tensor> expected;
  for (const auto& result : change(undisturbed)) expected.push_back(result.clone());
  const CacheContents after(undisturbed);
  constexpr int64_t most = 500;
  for (int64_t good = 0; good < most; ++good) {
    KVCache cache = make();
    const CacheContents before(cache);
    bool failed = false;
    try {
      const FailingAllocations failing(good);
      change(cache);
    } catch (const std::exception&) {
      failed = true;
    }
    if (!failed) return good;
    SCOPED_TRACE("after " + std::to_string(good) + " allocations");
    EXPECT_TRUE(holds(cache, before, is_bit_equal));
    const auto results = change(cache);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(is_same_of_cached(results[i], expected[i]));
    }
    EXPECT_TRUE(holds(cache, after, is_same_of_cached));
  }
  return most;
}

TEST(FailedCallTest, ACachedCallThatFailsAtAnyAllocationIsAsIfItHadNotBeen) {
  at::NoGradGuard no_grad;
  const std::vector<std::pair<MultiHeadAttentionOptions, KVCacheOptions>> settings{
      {MultiHeadAttentionOptions(32, 2), KVCacheOptions()},
      {MultiHeadAttentionOptions(32, 2).rotary(RotaryOptions()).add_zero_attn(true),
       KVCacheOptions().window(8)},
      {MultiHeadAttentionOptions(32, 2).output_gate(OutputGate::elementwise).dtype(at::kHalf),
       KVCacheOptions().capacity(100)},
      {MultiHeadAttentionOptions(32, 2).num_kv_heads(1),
       KVCacheOptions().dtype(at::kBFloat16)}};
  for (const auto& [options, cache_options] : settings) {
    torch::manual_seed(91);
    MultiHeadAttention module(options);
    const auto dtype = module->W_q->weight.scalar_type();
    Random random(92);
    const auto prompt = random.normal({2, 20, 32}, dtype),
               x = random.normal({2, 70, 32}, dtype);
    const auto empty = [&, options = cache_options] { return KVCache(options); };
    const auto filled = [&, options = cache_options] {
      KVCache cache(options);
      module->attend(prompt.narrow(1, 0, 15), CallOptions(Mask::causal()).cache(cache));
      module->attend(prompt.narrow(1, 15, 3),
                     CallOptions(Mask::causal()).cache(cache).new_lengths(numbers({3, 1})));
      return cache;
    };
    const auto call_with = [&](const at::Tensor& tokens, Weights weights) {
      return [&module, tokens, weights](KVCache& cache) -> std::vector<at::Tensor> {
        const auto result =
            module->attend(tokens, CallOptions(Mask::causal()).weights(weights).cache(cache));
        return {result.output, result.weights};
      };
    };
    const auto traced = [&](KVCache& cache) -> std::vector<at::Tensor> {
      const auto call = CallOptions(Mask::causal()).cache(cache);
      return {module->trace(x.narrow(1, 0, 2), {}, {}, call).output};
    };
    EXPECT_GT(fail_at_every_allocation(empty, call_with(x, Weights::per_head)), 3);
    EXPECT_GT(fail_at_every_allocation(filled, call_with(x, Weights::averaged)), 3);
    const auto step = call_with(x.narrow(1, 0, 1), Weights::per_head);
    EXPECT_GT(fail_at_every_allocation(filled, step), 1);
    EXPECT_GT(fail_at_every_allocation(filled, traced), 1);
  }
}

TEST(FailedCallTest, ACacheByItselfThatFailsAtAnyAllocationIsAsIfItHadNotBeenCalled) {
  Random random(93);
  const auto key = random.normal({2, 1, 30, 4}), value = random.normal({2, 1, 30, 6});
  for (const auto& options : {KVCacheOptions(), KVCacheOptions().window(4),
                              KVCacheOptions().dtype(at::kHalf), KVCacheOptions().window(16)}) {
    const auto filled = [&] {
      KVCache cache(options);
      cache.append(key, value, numbers({30, 21}));
      cache.append(key.narrow(2, 0, 3), value.narrow(2, 0, 3));
      return cache;
    };
    const auto append = [&](int64_t tokens) {
      return [&, tokens](KVCache& cache) -> std::vector<at::Tensor> {
        cache.append(key.narrow(2, 0, tokens), value.narrow(2, 0, tokens));
        return {};
      };
    };
    for (const int64_t tokens : {30, 1}) fail_at_every_allocation(filled, append(tokens));
    fail_at_every_allocation([&] { return KVCache(options); }, append(30));
    EXPECT_GT(fail_at_every_allocation(filled,
                                       [](KVCache& cache) -> std::vector<at::Tensor> {
                                         cache.reorder(numbers({1, 1, 0}));
                                         return {};
                                       }),
              1);
    EXPECT_GT(fail_at_every_allocation(filled,
                                       [](KVCache& cache) -> std::vector<at::Tensor> {
                                         cache.repeat(2);
                                         return {};
                                       }),
              1);
  }
}

TEST(FailedCallTest, ACallThatIsRefusedLateKeepsNoTokens) {
  at::NoGradGuard no_grad;
  torch::manual_seed(94);
  MultiHeadAttention module(MultiHeadAttentionOptions(16, 2).rotary(RotaryOptions()));
  const auto x = at::randn({2, 3, 16});
  KVCache cache;
  const auto call = CallOptions(Mask::causal()).cache(cache);
  module->attend(x, call);
  const CacheContents before(cache);
  const auto meta = at::TensorOptions(at::kMeta);
  const std::vector<CallOptions> wrong{
      CallOptions(call).head_mask(at::ones({2}, meta)),
      CallOptions(call).head_mask(at::ones({3})),
      CallOptions(call).positions(at::zeros({3}, meta.dtype(at::kLong))),
      CallOptions(call).positions(at::zeros({4}, at::kLong))};
  for (const auto& bad : wrong) {
    EXPECT_ANY_THROW(module->attend(x, bad));
    EXPECT_TRUE(holds(cache, before, is_bit_equal));
  }
}

TEST(FailedCallTest, AMapOfAnEarlierStepOutlivesACallThatFails) {
  at::NoGradGuard no_grad;
  MultiHeadAttention module(16, 2);
  const auto x = at::randn({2, 3, 16});
  KVCache cache;
  const auto call = CallOptions(Mask::causal()).cache(cache);
  const auto map = module->trace(x, {}, {}, call).map;
  const auto weights = map.dense().clone();
  EXPECT_ANY_THROW(module->attend(
      x, CallOptions(call).head_mask(at::ones({2}, at::TensorOptions(at::kMeta)))));
  module->attend(x, call);
  EXPECT_TRUE(is_same_result(map.dense(), weights));
}

TEST(MovedFromCacheTest, EveryUseOfOneIsRefused) {
  at::NoGradGuard no_grad;
  KVCache gone;
  const KVCache taken = std::move(gone);
  MultiHeadAttention module(16, 2);
  const auto x = at::randn({2, 3, 16}), heads = at::randn({2, 2, 3, 8});
  const std::vector<std::function<void()>> uses{
      [&] { gone.options(); },
      [&] { gone.append(heads, heads); },
      [&] { gone.key(); },
      [&] { gone.value(); },
      [&] { gone.batch_size(); },
      [&] { gone.lengths(); },
      [&] { gone.next_positions(); },
      [&] { gone.crop(1); },
      [&] { gone.reset(); },
      [&] { gone.reorder(numbers({0})); },
      [&] { gone.repeat(2); },
      [&] { gone.clone(); },
      [&] { gone.nbytes(); },
      [&] { gone.save("unwritten"); },
      [&] { module->attend(x, CallOptions().cache(gone)); },
      [&] { module->attend(x, CallOptions().memory(gone)); }};
  for (size_t i = 0; i < uses.size(); ++i) {
    EXPECT_TRUE(refuses(uses[i], {"KVCache", "moved"})) << i;
  }
  gone = KVCache();
  EXPECT_EQ(gone.batch_size(), 0);
}

}  // namespace
}  // namespace mha::test
