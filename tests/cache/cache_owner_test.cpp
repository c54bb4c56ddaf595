// Guards that a cache belongs to one layer: the one whose tokens it holds. Another layer that
// is given it, most often by copies of one handle, is refused and nothing is changed; a cache
// without tokens, a clone and what a file held are free.
#include <mha/multi_head_attention.h>

#include <memory>
#include <utility>
#include <vector>

#include "support/expect.h"
#include "support/file_support.h"
#include "support/support.h"

namespace mha::test {
namespace {

CallOptions over(const KVCache& cache) {
  return CallOptions(Mask::causal()).cache(cache);
}

TEST(CacheOwnerTest, TheSecondLayerThatIsGivenOneCacheIsRefusedAtItsFirstUse) {
  at::NoGradGuard no_grad;
  const auto x = at::randn({2, 3, 16});
  MultiHeadAttention first(16, 2), second(16, 2);
  const auto clone =
      MultiHeadAttention(std::dynamic_pointer_cast<MultiHeadAttentionImpl>(first->clone()));
  const std::vector<KVCache> caches(2, KVCache(KVCacheOptions()));
  first->attend(x, over(caches[0]));
  const auto held = caches[0].key().clone();
  for (auto layer : {second, clone}) {
    EXPECT_TRUE(refuses([&] { layer->attend(x, over(caches[1])); },
                        {"cache", "layer", "another", "3", "copies"}));
    EXPECT_TRUE(refuses([&] { layer->trace(x, {}, {}, over(caches[1])); }, {"cache", "layer"}));
  }
  EXPECT_TRUE(is_bit_equal(caches[1].key(), held));
  EXPECT_EQ(first->attend(x, over(caches[1])).weights.size(3), 6);
}

TEST(CacheOwnerTest, CachesOfAResizedVectorAreOneForEachLayer) {
  at::NoGradGuard no_grad;
  const auto x = at::randn({1, 3, 16});
  MultiHeadAttention first(16, 2), second(16, 2);
  std::vector<KVCache> apart(2), shared;
  shared.resize(2, KVCache());
  first->attend(x, over(apart[0]));
  EXPECT_NO_THROW(second->attend(x, over(apart[1])));
  first->attend(x, over(shared[0]));
  EXPECT_TRUE(refuses([&] { second->attend(x, over(shared[1])); }, {"cache", "layer"}));
}

TEST(CacheOwnerTest, ALayerStaysItselfWhereItIsCopiedByHandleMovedOrChanged) {
  at::NoGradGuard no_grad;
  const auto x = at::randn({1, 3, 16});
  MultiHeadAttention layer(16, 2);
  const KVCache cache;
  layer->attend(x, over(cache));
  MultiHeadAttention handle = layer;
  EXPECT_NO_THROW(handle->attend(x, over(cache)));
  MultiHeadAttentionImpl moved(std::move(*layer));
  EXPECT_NO_THROW(moved.attend(x, over(cache)));
  moved.to(at::kDouble);
  moved.train();
  EXPECT_NO_THROW(moved.attend(x.to(at::kDouble), over(cache)));
}

TEST(CacheOwnerTest, ACacheWithoutTokensACloneAndALoadedOneAreFree) {
  at::NoGradGuard no_grad;
  const TemporaryDirectory directory;
  const auto x = at::randn({1, 3, 16});
  MultiHeadAttention first(16, 2), second(16, 2);
  KVCache cache;
  first->attend(x, over(cache));
  cache.save(directory.file("cache"));
  auto copy = cache.clone(), loaded = KVCache::load(directory.file("cache"));
  EXPECT_NO_THROW(second->attend(x, over(copy)));
  EXPECT_NO_THROW(second->attend(x, over(loaded)));
  EXPECT_TRUE(refuses([&] { first->attend(x, over(copy)); }, {"cache", "layer"}));
  EXPECT_TRUE(refuses([&] { first->attend(x, over(loaded)); }, {"cache", "layer"}));
  cache.crop(0);
  EXPECT_NO_THROW(second->attend(x, over(cache)));
  cache.reset();
  EXPECT_NO_THROW(first->attend(x, over(cache)));
  const KVCache given;
  KVCache(given).append(at::randn({1, 2, 3, 8}), at::randn({1, 2, 3, 8}));
  EXPECT_NO_THROW(second->attend(x, over(given)));
  EXPECT_TRUE(refuses([&] { first->attend(x, over(given)); }, {"cache", "layer"}));
}

TEST(CacheOwnerTest, AMemoryIsReadByAnyLayer) {
  at::NoGradGuard no_grad;
  const auto x = at::randn({1, 3, 16});
  MultiHeadAttention first(16, 2), second(16, 2);
  const auto memory = first->project_keys(x);
  EXPECT_NO_THROW(second->attend(x, CallOptions().memory(memory)));
  const KVCache cache;
  first->attend(x, over(cache));
  EXPECT_NO_THROW(second->attend(x, CallOptions().memory(cache)));
  EXPECT_NO_THROW(first->attend(x, over(cache)));
}

TEST(CacheOwnerTest, ALayerMadeWhereAnotherWasIsAnother) {
  at::NoGradGuard no_grad;
  const auto x = at::randn({1, 3, 16});
  const KVCache cache;
  for (int i = 0; i < 20; ++i) {
    auto layer = std::make_unique<MultiHeadAttentionImpl>(16, 2);
    if (i == 0) {
      layer->attend(x, over(cache));
      continue;
    }
    EXPECT_TRUE(refuses([&] { layer->attend(x, over(cache)); }, {"cache", "layer"}));
  }
}

}  // namespace
}  // namespace mha::test
