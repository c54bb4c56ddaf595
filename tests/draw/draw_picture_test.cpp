// Guards what all formats show alike: which weights are pooled into a cell, which cells are
// blank, and what is refused. Cells are compared with loops in double; 1e-6 is a few roundings
// of a float32 weight.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "draw/picture.h"
#include "support/expect.h"
#include "support/file_support.h"
#include "support/peak_memory.h"
#include "support/support.h"
#include "support/thread_count.h"
#include "support/torch_headers.h"

namespace mha::draw {
namespace {

using detail::Picture;
using detail::picture_of;

Maps random_maps(at::IntArrayRef shape) {
  test::Random random(3);
  Maps maps;
  maps.weights = random.normal(shape).softmax(-1);
  return maps;
}

// Pooled by the map itself, which rounds the sums of weights in another order.
TEST(PictureTest, ATracedCallIsDrawnAsItsDenseWeightsAre) {
  test::Random random(4);
  const auto x = random.normal({2, 3, 40, 8});
  const AttentionMap map(x, x, Mask::causal());
  Maps traced, dense;
  traced.map = map;
  traced.sample = 1;
  dense.weights = map.dense()[1];
  for (const int64_t most : {40, 9}) {
    const Picture expected = picture_of(dense, {}, most, most);
    const Picture actual = picture_of(traced, {}, most, most);
    ASSERT_EQ(actual.panels.size(), expected.panels.size());
    EXPECT_TRUE(actual.has_blank);
    for (size_t head = 0; head < expected.panels.size(); ++head) {
      const auto &found = actual.panels[head].values, &wanted = expected.panels[head].values;
      ASSERT_EQ(found.size(), wanted.size());
      for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], wanted[i], 2e-6) << i;
    }
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// 16 maps of 3000 x 3000 would be 550 MiB.
TEST(PictureTest, ATracedCallIsDrawnAsTextWithoutItsWeights) {
  test::Random random(5);
  const auto x = random.normal({1, 16, 3000, 8});
  const test::ThreadCount threads(2);  // each has scratch of its own
  Maps maps;
  maps.map = AttentionMap(x, x);
  test::PeakMemory::reset();
  const double before = test::PeakMemory::mib();
  if (before == 0) GTEST_SKIP() << "no VmHWM in /proc/self/status";
  EXPECT_NE(text(maps, Terminal{}).find("Pooled from 3000 x 3000"), std::string::npos);
  EXPECT_LT(test::PeakMemory::mib() - before, 32);
}
#endif

TEST(PictureTest, WhatDoesNotFitATracedCallIsRefused) {
  const auto x = at::randn({1, 2, 4, 8});
  Maps maps;
  maps.map = AttentionMap(x, x);
  EXPECT_TRUE(test::refuses([&] { picture_of(maps, Options().causal(true), 4, 4); },
                            {"causal", "own mask"}));
  maps.sample = 1;
  EXPECT_TRUE(test::refuses([&] { picture_of(maps, {}, 4, 4); }, {"sample", "0", "1"}));
  maps.sample = 0;
  maps.weights = at::ones({2, 4, 4});
  EXPECT_TRUE(test::refuses([&] { picture_of(maps, {}, 4, 4); }, {"weights", "map", "both"}));
}

TEST(PictureTest, AMapWithinItsRoomIsTheWeightsThemselves) {
  const Maps maps = random_maps({2, 5, 7});
  const Picture picture = picture_of(maps, {}, 5, 7);
  EXPECT_FALSE(picture.is_pooled());
  for (int64_t head = 0; head < 2; ++head) {
    for (int64_t i = 0; i < 5; ++i) {
      for (int64_t j = 0; j < 7; ++j) {
        EXPECT_EQ(picture.value(picture.panels[static_cast<size_t>(head)], i, j),
                  maps.weights[head][i][j].item<float>());
      }
    }
  }
  EXPECT_EQ(picture.largest, maps.weights.max().item<double>());
}

TEST(PictureTest, APooledCellIsTheMeanOverItsQueriesOfTheSumOverItsKeys) {
  const int64_t L = 50, S = 71;  // neither is a multiple of what a cell holds
  for (const bool causal : {false, true}) {
    const Maps maps = random_maps({1, L, S});
    const Picture picture = picture_of(maps, Options().causal(causal), 16, 12);
    const int64_t R = 13, C = 12;  // cells of at most 4 queries and 6 keys
    ASSERT_EQ(picture.queries.cells, R);
    ASSERT_EQ(picture.keys.cells, C);
    const auto weights = maps.weights.accessor<float, 3>();
    for (int64_t row = 0; row < R; ++row) {
      for (int64_t column = 0; column < C; ++column) {
        double sum = 0;
        int64_t queries = 0;
        for (int64_t i = row * L / R; i < (row + 1) * L / R; ++i, ++queries) {
          for (int64_t j = column * S / C; j < (column + 1) * S / C; ++j) {
            if (!causal || j <= i + S - L) sum += weights[0][i][j];
          }
        }
        const float value = picture.value(picture.panels[0], row, column);
        if (sum == 0) {
          EXPECT_EQ(value, Picture::kBlank);
        } else {
          EXPECT_NEAR(value, sum / static_cast<double>(queries), 1e-6);
        }
      }
    }
    EXPECT_EQ(picture.has_blank, causal);
  }
}

TEST(PictureTest, PooledRowsStillSumToOne) {
  const Picture picture = picture_of(random_maps({3, 100, 90}), {}, 7, 8);
  for (const detail::Panel& panel : picture.panels) {
    for (int64_t row = 0; row < picture.queries.cells; ++row) {
      double sum = 0;
      for (int64_t column = 0; column < picture.keys.cells; ++column) {
        sum += picture.value(panel, row, column);
      }
      EXPECT_NEAR(sum, 1, 1e-6);
    }
  }
}

TEST(PictureTest, OnlyAWeightOfExactlyZeroIsBlank) {
  Maps maps;
  maps.weights = at::tensor({0.0f, 1e-30f, 1.0f, 0.5f}).view({2, 2});
  const Picture picture = picture_of(maps, {}, 9, 9);
  EXPECT_EQ(picture.value(picture.panels[0], 0, 0), Picture::kBlank);
  EXPECT_LT(picture.position(picture.value(picture.panels[0], 0, 0)), 0);
  EXPECT_GE(picture.position(picture.value(picture.panels[0], 0, 1)), 0);
  EXPECT_EQ(picture.position(1), 1);
}

TEST(PictureTest, CausalLeavesTheKeysAfterAQueryBlankWhateverTheyHold) {
  Maps maps = random_maps({3, 5});  // the last query stands at the last key
  maps.weights[0][4] = NAN;         // not looked at
  const Picture picture = picture_of(maps, Options().causal(true), 9, 9);
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t j = 0; j < 5; ++j) {
      EXPECT_EQ(picture.value(picture.panels[0], i, j) == Picture::kBlank, j > i + 2);
    }
  }
}

TEST(PictureTest, TheScaleDecidesThePosition) {
  const Maps maps = random_maps({4, 4});
  const Picture root = picture_of(maps, Options().largest(0.4), 9, 9);
  EXPECT_DOUBLE_EQ(root.position(0.1), 0.5);
  EXPECT_DOUBLE_EQ(root.position(0.8), 1);
  EXPECT_TRUE(root.is_clipped);
  const Picture linear = picture_of(maps, Options().largest(0.4).scale(Scale::linear), 9, 9);
  EXPECT_DOUBLE_EQ(linear.position(0.1), 0.25);
}

TEST(PictureTest, TheBarsTicksRiseFromZeroToTheLargestWithRoomBetween) {
  for (const Scale scale : {Scale::square_root, Scale::linear}) {
    for (const double largest : {1.0, 0.65, 0.0123, 3e-7, 1e4}) {
      const Picture picture =
          picture_of(random_maps({4, 4}), Options().largest(largest).scale(scale), 9, 9);
      const std::vector<double> ticks = detail::bar_ticks(picture, 0.08);
      EXPECT_EQ(ticks.front(), 0);
      EXPECT_EQ(ticks.back(), largest);
      EXPECT_GE(ticks.size(), 4u) << largest;
      for (size_t i = 1; i < ticks.size(); ++i) {
        EXPECT_GE(picture.position(ticks[i]) - picture.position(ticks[i - 1]), 0.08 - 1e-12);
      }
    }
  }
}

TEST(PictureTest, EveryFloatingDtypeAndAnyStridesAreDrawn) {
  Maps maps = random_maps({6, 5});
  const Picture expected = picture_of(maps, {}, 9, 9);
  const at::Tensor strided = maps.weights.t().contiguous().t();
  for (const at::Tensor& weights : {maps.weights.to(at::kDouble), strided}) {
    maps.weights = weights;
    EXPECT_EQ(picture_of(maps, {}, 9, 9).panels[0].values, expected.panels[0].values);
  }
  maps.weights = strided.to(at::kBFloat16).requires_grad_();
  EXPECT_NO_THROW(picture_of(maps, {}, 9, 9));
}

TEST(PictureTest, NotesSayWhatIsPooledBlankAndClipped) {
  const auto notes = [](const Options& options, int64_t most) {
    std::string all;
    for (const auto& note : picture_of(random_maps({8, 8}), options, most, most).notes()) {
      all += note + ' ';
    }
    return all;
  };
  EXPECT_EQ(notes({}, 8), "Rows are queries, columns are keys. ");
  EXPECT_NE(notes({}, 4).find("Pooled from 8 x 8: a cell is what 2 queries give 2 keys"),
            std::string::npos);
  EXPECT_NE(notes(Options().causal(true), 8).find("Blank: later than the query"),
            std::string::npos);
  EXPECT_NE(notes(Options().largest(0.01), 8).find("Weights above 0.01"), std::string::npos);
}

TEST(PictureTest, LabelsOfAnyLengthAreCut) {
  Maps maps = random_maps({1, 2});
  maps.keys = {std::string(10 << 20, 'x'), "b"};
  maps.title = std::string(10 << 20, ' ');
  const Picture picture = picture_of(maps, {}, 9, 9);
  EXPECT_EQ(picture.keys.labels[0], std::string(199, 'x') + "\u2026");
  EXPECT_EQ(picture.keys.labels[1], "b");
  EXPECT_LT(picture.title.size(), 2000u);
}

TEST(PictureTest, WhatIsNoMapIsRefusedByName) {
  const auto error = [](Maps maps, const Options& options = {}) {
    return test::error_of([&] { picture_of(maps, options, 9, 9); });
  };
  const auto expect = [](const std::string& found, const std::string& part) {
    EXPECT_NE(found.find(part), std::string::npos) << found;
  };
  expect(error({}), "weights: expected a tensor, found none");
  expect(error(random_maps({2, 3, 4, 5})),
         "weights: expected (heads, queries, keys) or (queries, keys), found [2, 3, 4, 5]");
  expect(error(random_maps({0, 3, 4})),
         "weights: expected at least one head, query and key, found [0, 3, 4]");
  expect(error(random_maps({257, 1, 1})), "weights: expected at most 256 heads");
  Maps maps = random_maps({2, 3, 4});
  maps.weights = maps.weights.to(at::kLong);
  expect(
      error(maps),
      "weights: expected a floating dtype (float32, float64, bfloat16 or float16), found Long");
  maps = random_maps({2, 3, 4});
  maps.weights[1][2][3] = NAN;
  expect(error(maps), "found nan at head 1, query 2, key 3");
  maps.weights[1][2][3] = -0.5;
  expect(error(maps), "found -0.5 at head 1, query 2, key 3");
  maps.weights[1][2][3] = INFINITY;
  expect(error(maps), "found inf at head 1, query 2, key 3");
  maps = random_maps({2, 3, 4});
  maps.queries = {"a", "b"};
  expect(error(maps), "queries: expected 3 labels as in weights, or none, found 2");
  maps.queries = {};
  maps.keys = {"a", "b", "c"};
  expect(error(maps), "keys: expected 4 labels");
  maps.keys = {};
  maps.names = {"only"};
  expect(error(maps), "names: expected 2, one for each head, or none, found 1");
  for (const double largest : {0.0, -1.0, double{NAN}, double{INFINITY}}) {
    expect(error(random_maps({3, 4}), Options().largest(largest)),
           "largest: expected a number > 0");
  }
}

}  // namespace
}  // namespace mha::draw
