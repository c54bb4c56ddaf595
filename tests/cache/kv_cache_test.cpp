// The cache by itself: what it holds after any sequence of changes is what plain lists of
// tokens, changed in the same way, hold. Numbers are compared bit for bit.

#include <gtest/gtest.h>
#include <mha/attention_map.h>
#include <mha/kv_cache.h>

#include <cmath>
#include <vector>

#include "support/expect.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"
#include "support/values.h"

namespace mha::test {
namespace {

// Each sample as a list of its tokens, (Hk, length, D).
using Samples = std::vector<at::Tensor>;

::testing::AssertionResult holds(const at::Tensor& held, const at::Tensor& lengths,
                                 const Samples& expected) {
  if (held.size(0) != static_cast<int64_t>(expected.size())) {
    return ::testing::AssertionFailure() << held.sizes() << " for " << expected.size();
  }
  for (int64_t n = 0; n < held.size(0); ++n) {
    const auto& sample = expected[n];
    if (lengths[n].item<int64_t>() != sample.size(1)) {
      return ::testing::AssertionFailure() << "sample " << n << " has " << lengths[n]
                                           << " tokens, expected " << sample.size(1);
    }
    const auto equal = is_bit_equal(held[n].narrow(1, 0, sample.size(1)), sample);
    if (!equal)
      return ::testing::AssertionFailure() << "sample " << n << ": " << equal.message();
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult same_cache(const KVCache& a, const KVCache& b) {
  if (!at::equal(a.next_positions(), b.next_positions())) {
    return ::testing::AssertionFailure() << a.next_positions() << " and " << b.next_positions();
  }
  for (const bool keys : {true, false}) {
    const auto &x = keys ? a.key() : a.value(), &y = keys ? b.key() : b.value();
    Samples samples;
    for (int64_t n = 0; n < y.size(0); ++n) {
      samples.push_back(y[n].narrow(1, 0, b.lengths()[n].item<int64_t>()));
    }
    const auto equal = holds(x, a.lengths(), samples);
    if (!equal) return equal;
  }
  return ::testing::AssertionSuccess();
}

TEST(KVCacheTest, HoldsWhatPlainListsWouldHold) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Random random(seed);
    const auto n = random.between(1, 3), h = random.between(1, 2);
    const bool ragged = random.chance(0.5);
    KVCache cache(random.chance(0.5) ? KVCacheOptions() : KVCacheOptions().capacity(400));
    Samples keys(n, at::zeros({h, 0, 3})), values(n, at::zeros({h, 0, 5}));
    for (int step = 0; step < 12; ++step) {
      const int64_t tokens = random.between(0, 30);
      const auto samples = static_cast<int64_t>(keys.size());
      const auto key = random.normal({samples, h, tokens, 3});
      const auto value = random.normal({samples, tokens, h, 5}).transpose(1, 2);
      std::vector<int64_t> added(samples, tokens);
      if (ragged) {
        for (auto& count : added) count = random.between(0, tokens);
      }
      const auto all =
          ragged ? cache.append(key, value, numbers(added)) : cache.append(key, value);
      for (int64_t i = 0; i < samples; ++i) {
        keys[i] = at::cat({keys[i], key[i].narrow(1, 0, added[i])}, 1);
        values[i] = at::cat({values[i], value[i].narrow(1, 0, added[i])}, 1);
      }
      ASSERT_TRUE(holds(all.key, cache.lengths(), keys)) << "seed " << seed;
      if (random.chance(0.2)) {
        std::vector<int64_t> each(samples, random.between(0, 40));
        if (random.chance(0.5)) {
          cache.crop(each[0]);
        } else {
          for (auto& length : each) length = random.between(0, 40);
          cache.crop(numbers(each));
        }
        for (auto* list : {&keys, &values}) {
          for (int64_t i = 0; i < samples; ++i) {
            auto& sample = (*list)[i];
            sample = sample.narrow(1, 0, std::min(sample.size(1), each[i]));
          }
        }
      }
      if (random.chance(0.2)) {
        std::vector<int64_t> from(random.between(1, 4));
        for (auto& index : from) index = random.between(0, samples - 1);
        cache.reorder(numbers(from));
        Samples new_keys, new_values;
        for (const auto index : from) {
          new_keys.push_back(keys[index]);
          new_values.push_back(values[index]);
        }
        keys = new_keys;
        values = new_values;
      }
      ASSERT_TRUE(holds(cache.key(), cache.lengths(), keys)) << "seed " << seed;
      ASSERT_TRUE(holds(cache.value(), cache.lengths(), values)) << "seed " << seed;
      ASSERT_TRUE(at::equal(cache.next_positions(), cache.lengths()));
    }
  }
}

TEST(KVCacheTest, RepeatGivesEachSampleTheGivenNumberOfTimes) {
  Random random(1);
  KVCache cache;
  const auto key = random.normal({2, 1, 3, 4});
  cache.append(key, key);
  cache.repeat(2);
  EXPECT_TRUE(is_bit_equal(cache.key(), key.repeat_interleave(2, 0)));
}

TEST(KVCacheTest, ResetMakesRoomForABatchOfOtherSizes) {
  Random random(2);
  KVCache cache;
  cache.append(random.normal({2, 1, 3, 4}), random.normal({2, 1, 3, 4}));
  const auto taken = cache.nbytes();
  cache.reset();
  EXPECT_EQ(cache.nbytes(), taken);
  const auto key = random.normal({3, 2, 5, 8});
  cache.append(key, key);
  EXPECT_TRUE(is_bit_equal(cache.key(), key));
}

TEST(KVCacheTest, AppendingTokenByTokenMovesTheCacheAFewTimesOnly) {
  KVCache cache;
  const auto token = at::ones({1, 1, 1, 8});
  int moves = 0;
  const void* place = nullptr;
  for (int step = 0; step < 3000; ++step) {
    const void* now = cache.append(token, token).key.data_ptr();
    moves += now != place;
    place = now;
  }
  EXPECT_LE(moves, static_cast<int>(std::log2(3000.0 / 64)) + 2);
}

TEST(KVCacheTest, AFixedCacheTakesItsMemoryAtOnceAndRefusesMore) {
  KVCache cache(KVCacheOptions().capacity(5));
  const auto tokens = at::ones({2, 1, 3, 8});
  const void* place = cache.append(tokens, tokens).key.data_ptr();
  EXPECT_EQ(cache.nbytes(), 2 * (2 * 5 * 8 * 4));
  EXPECT_TRUE(refuses([&] { cache.append(tokens, tokens); }, {"capacity", "6", "5"}));
  EXPECT_TRUE(at::equal(cache.lengths(), numbers({3, 3})));
  EXPECT_EQ(cache.append(tokens.narrow(2, 0, 2), tokens.narrow(2, 0, 2)).key.data_ptr(), place);
}

TEST(KVCacheTest, StoresInTheDtypeAskedForOrThatOfTheFirstKeys) {
  const auto key = at::full({1, 1, 1, 2}, 1.0 / 3);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    KVCache cache(KVCacheOptions().dtype(dtype)), follows;
    EXPECT_TRUE(is_bit_equal(cache.append(key, key).value, key.to(dtype)));
    EXPECT_EQ(follows.append(key.to(dtype), key.to(dtype)).key.scalar_type(), dtype);
    EXPECT_EQ(follows.append(key, key).key.scalar_type(), dtype);
  }
}

TEST(KVCacheTest, ACopyIsTheSameCacheAndACloneIsNot) {
  Random random(3);
  const auto key = random.normal({1, 2, 3, 4}), more = random.normal({1, 2, 1, 4});
  KVCache cache;
  cache.append(key, key);
  const KVCache copy = cache, clone = cache.clone();
  cache.append(more, more);
  EXPECT_TRUE(is_bit_equal(copy.key(), cache.key()));
  EXPECT_TRUE(is_bit_equal(clone.key(), key));
}

TEST(KVCacheTest, AWindowHoldsItsKeysInMemoryOfTwiceItsSize) {
  for (const int64_t window : {1, 2, 5, 16}) {
    for (const bool ragged : {false, true}) {
      Random random(window);
      KVCache cache(KVCacheOptions().window(window));
      Samples all(2, at::zeros({1, 0, 4}));
      for (int step = 0; step < 60; ++step) {
        const int64_t tokens = step % 20 == 0 ? 3 * window : random.between(1, 3);
        const auto key = random.normal({2, 1, tokens, 4});
        const std::vector<int64_t> added{tokens, ragged ? random.between(0, tokens) : tokens};
        const auto given = cache.append(key, key, numbers(added));
        int64_t longest = 0;
        for (int64_t i = 0; i < 2; ++i) {
          const int64_t kept = std::min(all[i].size(1), window - 1);
          all[i] = at::cat({all[i], key[i].narrow(1, 0, added[i])}, 1);
          const int64_t length = all[i].size(1);
          ASSERT_EQ(cache.next_positions()[i].item<int64_t>(), length);
          const int64_t held = cache.lengths()[i].item<int64_t>();
          ASSERT_GE(held, std::min(length, window - 1));
          ASSERT_TRUE(is_bit_equal(cache.key()[i].narrow(1, 0, held),
                                   all[i].narrow(1, length - held, held)));
          longest = std::max(longest, kept + added[i]);
        }
        if (!ragged) {
          ASSERT_EQ(given.key.size(2), longest);
          ASSERT_TRUE(
              is_bit_equal(given.key[0], all[0].narrow(1, all[0].size(1) - longest, longest)));
        }
        ASSERT_LE(cache.nbytes(), 2 * 2 * 4 * 4 * 2 * window) << "step " << step;
      }
    }
  }
}

TEST(KVCacheTest, AWindowIsCroppedAsFarAsItStillHoldsWhatIsNeeded) {
  KVCache cache(KVCacheOptions().window(8));
  const auto tokens = at::arange(100, at::kFloat).view({1, 1, 100, 1});
  cache.append(tokens, tokens);
  EXPECT_TRUE(refuses([&] { cache.crop(20); }, {"crop", "length", "20", "window", "8"}));
  EXPECT_EQ(cache.next_positions().item<int64_t>(), 100);
  cache.crop(96);
  EXPECT_EQ(cache.next_positions().item<int64_t>(), 96);
  const auto next = cache.append(tokens.narrow(2, 0, 1), tokens.narrow(2, 0, 1)).key;
  EXPECT_TRUE(is_bit_equal(next.narrow(2, 0, 7), tokens.narrow(2, 89, 7)));
}

TEST(KVCacheTest, AWindowsSamplesAreCroppedEachByItsOwnLengthOrNoneIs) {
  KVCache cache(KVCacheOptions().window(8));
  const auto tokens = at::arange(100, at::kFloat).view({1, 1, 100, 1}).expand({3, 1, 100, 1});
  cache.append(tokens, tokens, numbers({100, 60, 5}));
  const KVCache before = cache.clone();
  EXPECT_TRUE(refuses([&] { cache.crop(numbers({97, 20, 5})); },
                      {"crop", "length", "20", "sample 1", "window 8"}));
  EXPECT_TRUE(same_cache(cache, before));
  cache.crop(numbers({97, 100, 3}));  // what a sample does not have is not forgotten
  EXPECT_TRUE(at::equal(cache.next_positions(), numbers({97, 60, 3})));
  const auto next = cache.append(tokens.narrow(2, 0, 1), tokens.narrow(2, 0, 1)).key;
  const auto lengths = cache.lengths();
  for (const auto& [sample, position] : {std::pair{0, 97}, std::pair{1, 60}, std::pair{2, 3}}) {
    const int64_t kept = std::min(position, 7);
    const int64_t last = next.size(2) - (lengths.max() - lengths[sample]).item<int64_t>();
    EXPECT_TRUE(is_bit_equal(next[sample].narrow(1, last - 1 - kept, kept),
                             tokens[sample].narrow(1, position - kept, kept)))
        << sample;
  }
  const TemporaryDirectory directory;
  cache.save(directory.file("x"));
  KVCache loaded = KVCache::load(directory.file("x"), KVCacheOptions().window(8));
  for (auto* each : {&cache, &loaded}) {
    each->reorder(numbers({2, 0}));
    each->crop(numbers({1, 96}));
    EXPECT_TRUE(at::equal(each->next_positions(), numbers({1, 96})));
  }
  EXPECT_TRUE(same_cache(cache, loaded));
}

TEST(KVCacheTest, WhatWasGivenOutStaysAsItIsUntilItsPlaceIsTakenAgain) {
  Random random(4);
  const auto query = random.normal({1, 1, 2, 4}), key = random.normal({1, 1, 9, 4}),
             token = random.normal({1, 1, 1, 4});
  KVCache cache;
  const AttentionMap map(query, cache.append(key, key).key);
  const auto weights = map.dense().clone();
  for (int step = 0; step < 100; ++step) cache.append(token, token);
  EXPECT_TRUE(is_same_result(map.dense(), weights));
  cache.repeat(2);
  cache.append(token.repeat({2, 1, 1, 1}), token.repeat({2, 1, 1, 1}));
  EXPECT_TRUE(is_same_result(map.dense(), weights));

  KVCache reset;
  const AttentionMap lost(query, reset.append(key, key).key);
  reset.reset();
  reset.append(token, token);
  EXPECT_TRUE(refuses([&] { lost.dense(); }, {"key", "modified"}));
}

TEST(KVCacheTest, MayBeWrittenInAndOutOfInferenceMode) {
  const auto token = at::ones({1, 1, 1, 4});
  KVCache cache;
  {
    const c10::InferenceMode inference;
    cache.append(token, token);
  }
  cache.append(token, token);
  const c10::InferenceMode inference;
  cache.append(at::ones({1, 1, 1, 4}), at::ones({1, 1, 1, 4}));
  EXPECT_TRUE(is_bit_equal(cache.key(), at::ones({1, 1, 3, 4})));
}

TEST(KVCacheTest, WrongCallsAreRefusedAndLeaveTheCacheAsItWas) {
  Random random(5);
  KVCache cache;
  const auto key = random.normal({2, 3, 4, 8}), value = random.normal({2, 3, 4, 6});
  cache.append(key, value, numbers({4, 2}));
  const KVCache before = cache.clone();
  const auto append = [&](const at::Tensor& k, const at::Tensor& v) {
    return [&cache, k, v] { cache.append(k, v); };
  };
  EXPECT_TRUE(refuses(append({}, value), {"key", "undefined"}));
  EXPECT_TRUE(refuses(append(key, value[0]), {"value", "Hk", "Dv"}));
  EXPECT_TRUE(refuses(append(key.to(at::kLong), value), {"key", "floating", "Long"}));
  EXPECT_TRUE(refuses(append(key, value.narrow(2, 0, 3)), {"value", "4", "3"}));
  EXPECT_TRUE(refuses(append(key[0].unsqueeze(0), value[0].unsqueeze(0)), {"batch", "2", "1"}));
  EXPECT_TRUE(refuses(append(key.narrow(1, 0, 2), value.narrow(1, 0, 2)), {"heads", "3", "2"}));
  EXPECT_TRUE(refuses(append(key.narrow(3, 0, 7), value), {"8", "7", "6"}));
  EXPECT_TRUE(refuses(append(leaf(key), value), {"key", "gradient", "NoGradGuard"}));
  EXPECT_TRUE(refuses(append(key, leaf(value)), {"value", "gradient"}));
  for (const auto& lengths :
       {at::ones({2}), at::ones({3}, at::kLong), numbers({1, 5}), numbers({-1, 2})}) {
    EXPECT_TRUE(refuses([&] { cache.append(key, value, lengths); }, {"new_lengths"}));
  }
  EXPECT_TRUE(refuses([&] { cache.crop(-1); }, {"crop", "length", "-1"}));
  for (const auto& lengths : {at::Tensor(), at::ones({2}), numbers({1}), numbers({1, -1}),
                              numbers({1, 2, 3}), numbers({1, 2}).view({1, 2})}) {
    EXPECT_TRUE(refuses([&] { cache.crop(lengths); }, {"KVCache::crop", "lengths"}));
  }
  EXPECT_TRUE(refuses([] { KVCache().crop(numbers({0})); }, {"crop", "lengths", "(N) = (0)"}));
  KVCache().crop(numbers({}));
  EXPECT_TRUE(refuses([&] { cache.repeat(0); }, {"repeat", "n", "0"}));
  for (const int64_t n : {int64_t{1} << 40, INT64_MAX}) {
    EXPECT_TRUE(refuses([&] { cache.repeat(n); }, {"repeat", "n", std::to_string(n)}));
  }
  EXPECT_TRUE(refuses([&] { cache.reorder({}); }, {"reorder", "indices"}));
  EXPECT_TRUE(refuses([&] { cache.reorder(numbers({0, 2})); }, {"reorder", "indices", "2"}));
  EXPECT_TRUE(refuses([&] { cache.reorder(at::zeros({2})); }, {"indices", "integer"}));
  EXPECT_TRUE(same_cache(cache, before));

  EXPECT_TRUE(
      refuses([] { KVCache().reorder(numbers({0})); }, {"reorder", "indices", "none", "1"}));
  KVCache().reorder(numbers({}));
  EXPECT_TRUE(refuses([] { KVCache(KVCacheOptions().capacity(0)); }, {"capacity", "0"}));
  EXPECT_TRUE(refuses([] { KVCache(KVCacheOptions().capacity(INT64_MAX)); },
                      {"capacity", "2^40", std::to_string(INT64_MAX)}));
  KVCache huge(KVCacheOptions().capacity(int64_t{1} << 40));
  EXPECT_TRUE(refuses([&] { huge.append(key, value); },
                      {"capacity", "2^47", std::to_string(int64_t{1} << 40), "3", "8"}));
  EXPECT_EQ(huge.batch_size(), 0);
  EXPECT_TRUE(refuses([] { KVCache(KVCacheOptions().window(0)); }, {"window", "0"}));
  EXPECT_TRUE(refuses([] { KVCache(KVCacheOptions().window(4).capacity(8)); },
                      {"capacity", "window", "8"}));
  EXPECT_TRUE(refuses([] { KVCache(KVCacheOptions().dtype(at::kInt)); }, {"dtype", "Int"}));
}

TEST(KVCacheTest, AFileGivesTheSameCacheBack) {
  const TemporaryDirectory directory;
  const auto path = directory.file("cache.safetensors");
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    Random random(6);
    KVCache cache(KVCacheOptions().dtype(dtype));
    cache.append(random.normal({2, 3, 5, 4}), random.normal({2, 3, 5, 6}), numbers({5, 2}));
    cache.save(path);
    KVCache loaded = KVCache::load(path, KVCacheOptions().capacity(6));
    EXPECT_TRUE(same_cache(loaded, cache));
    const auto key = random.normal({2, 3, 1, 4}), value = random.normal({2, 3, 1, 6});
    cache.append(key, value);
    loaded.append(key, value);
    EXPECT_TRUE(same_cache(loaded, cache));
    EXPECT_TRUE(refuses([&] { loaded.append(key, value); }, {"capacity", "7", "6"}));
  }
}

TEST(KVCacheTest, AWindowsFileFitsNoWiderWindow) {
  const TemporaryDirectory directory;
  const auto path = directory.file("cache.safetensors");
  Random random(7);
  KVCache cache(KVCacheOptions().window(4));
  for (int step = 0; step < 50; ++step) {
    cache.append(random.normal({1, 1, 1, 2}), random.normal({1, 1, 1, 2}));
  }
  cache.save(path);
  EXPECT_TRUE(same_cache(KVCache::load(path, KVCacheOptions().window(4)), cache));
  EXPECT_TRUE(refuses([&] { KVCache::load(path); }, {"window", "none"}));
  EXPECT_TRUE(
      refuses([&] { KVCache::load(path, KVCacheOptions().window(20)); }, {"window", "20"}));
}

TEST(KVCacheTest, FilesThatAreNoCacheAreRefused) {
  const TemporaryDirectory directory;
  const auto path = directory.file("cache.safetensors");
  EXPECT_TRUE(refuses([&] { KVCache().save(path); }, {"save", "empty"}));
  // (N, Hk, S, D) = (1, 1, 2, 1) with a length of 3, then of 2 at position 1.
  const std::string kv = R"("key":{"dtype":"F32","shape":[1,1,2,1],"data_offsets":[0,8]},)"
                         R"("value":{"dtype":"F32","shape":[1,1,2,1],"data_offsets":[8,16]})";
  const std::string counts_of =
      R"(,"lengths":{"dtype":"I64","shape":[1],"data_offsets":[16,24]},)"
      R"("next_positions":{"dtype":"I64","shape":[1],"data_offsets":[24,32]})";
  const auto number = [](int64_t n) {
    return std::string(reinterpret_cast<const char*>(&n), sizeof n);
  };
  const std::string numbers(16, '\0');
  const auto refused = [&](const std::string& header, const std::string& data,
                           std::initializer_list<std::string> words) {
    write_bytes(path, safetensors_bytes("{" + header + "}", data));
    return refuses([&] { KVCache::load(path); }, words);
  };
  EXPECT_TRUE(refused(kv, numbers, {"lengths"}));
  EXPECT_TRUE(refused(kv + counts_of, numbers + number(3) + number(3), {"lengths", "2", "3"}));
  EXPECT_TRUE(refused(kv + counts_of, numbers + number(-1) + number(3), {"lengths", "-1"}));
  EXPECT_TRUE(
      refused(kv + counts_of, numbers + number(2) + number(1), {"next_positions", "1"}));
  EXPECT_TRUE(
      refused(kv + counts_of, numbers + number(2) + number(INT64_MAX), {"next_positions"}));
  EXPECT_TRUE(refused(R"("key":{"dtype":"I32","shape":[1,1,2,1],"data_offsets":[0,8]})",
                      std::string(8, '\0'), {"key", "I32"}));
  EXPECT_TRUE(refused(R"("key":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})",
                      std::string(8, '\0'), {"key", "4", "dimensions"}));
  write_bytes(path,
              safetensors_bytes("{" + kv + counts_of + "}", numbers + number(2) + number(2)));
  EXPECT_EQ(KVCache::load(path).lengths().item<int64_t>(), 2);
}

}  // namespace
}  // namespace mha::test
