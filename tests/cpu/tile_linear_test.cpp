// Guards the products of whole matrices on tiles: forward and gradients of linear layers, all
// sizes of edges, any layout of rows and heads, and that no split of the work changes a bit.
//
// Against sums in double over the same bfloat16 numbers. A float32 sum of `depth` products,
// each rounding within 2^-24 of its result, is within depth * 2^-24 * sum |a b| of the exact
// one, the bias is one term more, and the one rounding to bfloat16 adds half a unit in its last
// place.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "runtime/cpu_kernels.h"
#include "support/every_isa_test.h"

namespace mha::test {
namespace {

using cpu::BFloat16;
using cpu::TileMatrix;

constexpr BFloat16 gap{0x7fc1};  // a NaN, between what a matrix holds

float number(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// By truncation: any numbers of the type do.
BFloat16 bfloat16(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return {static_cast<uint16_t>(bits >> 16)};
}

double half_unit(double x) {
  constexpr int last_place = 8, least_normal = -126;
  return std::ldexp(
      1.0, (x == 0 ? least_normal : std::max(std::ilogb(x), least_normal)) - last_place);
}

class Draws {
 public:
  explicit Draws(unsigned seed) : generator_(seed) {}
  int64_t from(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(generator_);
  }
  bool coin() { return from(0, 1) == 1; }
  BFloat16 normal() { return bfloat16(std::normal_distribution<float>()(generator_)); }

 private:
  std::mt19937 generator_;
};

template <typename T>
T& at(const TileMatrix<T>& m, int64_t row, int64_t column) {
  return m.data[row / m.rows_per_sample * m.n + row % m.rows_per_sample * m.t +
                column / m.group * m.group_stride + column % m.group];
}

// A matrix in memory of its own: rows of samples, columns of heads, and gaps.
struct Held {
  std::vector<BFloat16> memory;
  TileMatrix<BFloat16> matrix;

  Held(int64_t rows, int64_t columns, Draws& draws) {
    auto& m = matrix;
    m.rows = rows;
    m.columns = columns;
    m.rows_per_sample = draws.from(1, rows);
    const int64_t samples = (rows - 1) / m.rows_per_sample + 1;
    m.group = columns > 16 && draws.coin() ? 16 * draws.from(1, columns / 16) : columns;
    const int64_t groups = (columns - 1) / m.group + 1, gap_size = draws.from(0, 4);
    if (draws.coin()) {  // heads outside
      m.t = m.group + gap_size;
      m.group_stride = m.t * m.rows_per_sample;
      m.n = m.group_stride * groups;
    } else {
      m.group_stride = m.group + gap_size;
      m.t = m.group_stride * groups + draws.from(0, 2);
      m.n = m.t * m.rows_per_sample;
    }
    memory.assign(static_cast<size_t>(samples * m.n), gap);
    m.data = memory.data();
  }
  void fill(Draws& draws) {
    for (int64_t r = 0; r < matrix.rows; ++r) {
      for (int64_t c = 0; c < matrix.columns; ++c) at(matrix, r, c) = draws.normal();
    }
  }
  TileMatrix<const BFloat16> read() const {
    const auto& m = matrix;
    return {m.data, m.rows, m.columns, m.rows_per_sample, m.n, m.t, m.group, m.group_stride};
  }
};

// 64-byte aligned, as tiles are read.
template <typename T>
struct Aligned {
  std::vector<T> memory;
  T* data;

  explicit Aligned(int64_t count) : memory(static_cast<size_t>(count) + 64 / sizeof(T)) {
    void* at = memory.data();
    size_t space = memory.size() * sizeof(T);
    data = static_cast<T*>(std::align(64, static_cast<size_t>(count) * sizeof(T), at, space));
  }
};

int64_t blocks(int64_t count) {
  return (count + 31) / 32;
}

Aligned<BFloat16> packed(const cpu::TileKernels& kernels, const cpu::TileSide& side) {
  const auto& m = side.matrix;
  const int64_t count = side.depth_is_rows ? m.columns : m.rows;
  Aligned<BFloat16> to(kernels.side_size(count, side.depth_is_rows ? m.rows : m.columns));
  for (int64_t i = 0; i < blocks(count); ++i) kernels.pack_side(side, i, to.data);
  return to;
}

struct Case {
  int64_t rows, columns, depth;
  bool left_down, right_down, has_bias;
};

// left (rows x depth) * right (depth x columns) + bias, each side held either way round.
struct Product {
  Held left, right, output;
  Case sizes;
  std::vector<float> bias;

  Product(const Case& given, Draws& draws)
      : left(given.left_down ? given.depth : given.rows,
             given.left_down ? given.rows : given.depth, draws),
        right(given.right_down ? given.depth : given.columns,
              given.right_down ? given.columns : given.depth, draws),
        output(given.rows, given.columns, draws),
        sizes(given) {
    left.fill(draws);
    right.fill(draws);
    if (!sizes.has_bias) return;
    for (int64_t c = 0; c < sizes.columns; ++c) bias.push_back(number(draws.normal()) / 3);
  }
  double left_at(int64_t row, int64_t k) const {
    return number(sizes.left_down ? at(left.matrix, k, row) : at(left.matrix, row, k));
  }
  double right_at(int64_t k, int64_t column) const {
    return number(sizes.right_down ? at(right.matrix, k, column) : at(right.matrix, column, k));
  }

  // In tasks of random sizes, or as one.
  void compute(const cpu::TileKernels& kernels, Draws* split) {
    const auto a = packed(kernels, {left.read(), true, sizes.left_down});
    const auto b = packed(kernels, {right.read(), false, sizes.right_down});
    cpu::TileProduct product;
    product.depth = sizes.depth;
    product.left = a.data;
    product.right = b.data;
    product.bias = sizes.has_bias ? bias.data() : nullptr;
    product.output = output.matrix;
    const auto length = [&](int64_t left_over) {
      return split ? split->from(1, left_over) : left_over;
    };
    const int64_t rows = blocks(sizes.rows), columns = blocks(sizes.columns);
    for (int64_t r = 0, high = 0; r < rows; r += high) {
      high = length(rows - r);
      for (int64_t c = 0, wide = 0; c < columns; c += wide) {
        wide = length(columns - c);
        const cpu::TileBlocks task{r, r + high, c, c + wide};
        Aligned<float> scratch(kernels.product_scratch(sizes.depth, task));
        std::fill(scratch.memory.begin(), scratch.memory.end(),
                  std::numeric_limits<float>::quiet_NaN());
        kernels.multiply_sides(product, task, scratch.data);
      }
    }
  }
  void check_element(int64_t row, int64_t column) const {
    double sum = sizes.has_bias ? bias[static_cast<size_t>(column)] : 0;
    double magnitude = std::abs(sum);
    for (int64_t k = 0; k < sizes.depth; ++k) {
      const double term = left_at(row, k) * right_at(k, column);
      sum += term;
      magnitude += std::abs(term);
    }
    const auto roundings = static_cast<double>(sizes.depth + 1);
    const double error = std::ldexp(roundings * magnitude, -24);
    EXPECT_NEAR(number(at(output.matrix, row, column)), sum, error + half_unit(sum) + 1e-38)
        << row << ", " << column << " of " << sizes.rows << " x " << sizes.columns << " over "
        << sizes.depth << (sizes.left_down ? " down" : "") << (sizes.right_down ? " down" : "");
  }
  void check_gaps() const {
    auto rest = output.memory;
    for (int64_t r = 0; r < sizes.rows; ++r) {
      for (int64_t c = 0; c < sizes.columns; ++c) {
        rest[static_cast<size_t>(&at(output.matrix, r, c) - output.memory.data())] = gap;
      }
    }
    for (const BFloat16 each : rest) ASSERT_EQ(each.bits, gap.bits);
  }
  bool same_bits(const std::vector<BFloat16>& other) const {
    return std::memcmp(other.data(), output.memory.data(), other.size() * 2) == 0;
  }
};

class TileLinearTest : public EveryIsaTest {
 protected:
  // Runs check(kernels) on each set that has tiles.
  template <typename Check>
  static void on_each_set(const Check& check) {
    bool ran = false;
    for (const CpuIsa isa : available_cpu_isas()) {
      set_cpu_isa(isa);
      const cpu::TileKernels* kernels = detail::tile_kernels();
      if (!kernels) continue;
      SCOPED_TRACE(isa);
      check(*kernels);
      ran = true;
    }
    if (!ran) GTEST_SKIP() << "no instruction set here has tiles";
  }
};

void check_everywhere(const cpu::TileKernels& kernels, const Case& sizes, Draws& draws) {
  Product product(sizes, draws);
  product.compute(kernels, nullptr);
  for (int64_t r = 0; r < sizes.rows; ++r) {
    for (int64_t c = 0; c < sizes.columns; ++c) product.check_element(r, c);
  }
  product.check_gaps();
}

TEST_F(TileLinearTest, ProductsOfAnySizeAndLayoutAreWithinTheirRounding) {
  on_each_set([](const cpu::TileKernels& kernels) {
    Draws draws(31);
    for (int i = 0; i < 400; ++i) {
      check_everywhere(kernels,
                       {draws.from(1, 70), draws.from(1, 100), draws.from(1, 100), draws.coin(),
                        draws.coin(), draws.coin()},
                       draws);
    }
  });
}

TEST_F(TileLinearTest, LargeProductsAreWithinTheirRounding) {
  on_each_set([](const cpu::TileKernels& kernels) {
    Draws draws(32);
    const Case large[] = {{300, 200, 1000, false, false, true},  // a forward
                          {200, 65, 1056, false, true, false},   // the gradient of an input
                          {65, 33, 2500, true, true, false},     // of a weight, in three parts
                          {1, 300, 1024, false, false, true}};
    for (const Case& sizes : large) {
      Product product(sizes, draws);
      product.compute(kernels, nullptr);
      for (int i = 0; i < 2000; ++i) {
        product.check_element(draws.from(0, sizes.rows - 1), draws.from(0, sizes.columns - 1));
      }
      product.check_gaps();
    }
  });
}

TEST_F(TileLinearTest, NoSplitOfTheWorkChangesABit) {
  on_each_set([](const cpu::TileKernels& kernels) {
    Draws draws(33);
    for (int i = 0; i < 30; ++i) {
      const int64_t depth = i % 3 == 0 ? draws.from(1000, 1300) : draws.from(1, 300);
      Product product({draws.from(1, 200), draws.from(1, 200), depth, draws.coin(),
                       draws.coin(), draws.coin()},
                      draws);
      const auto before = product.output.memory;
      product.compute(kernels, nullptr);
      const auto whole = product.output.memory;
      std::copy(before.begin(), before.end(), product.output.memory.begin());
      product.compute(kernels, &draws);
      EXPECT_TRUE(product.same_bits(whole));
    }
  });
}

// Of each row alone, first in a block, and among all the others.
TEST_F(TileLinearTest, ARowDoesNotDependOnThoseBesideIt) {
  on_each_set([](const cpu::TileKernels& kernels) {
    Draws draws(34);
    Product all({70, 50, 200, false, false, true}, draws);
    all.compute(kernels, nullptr);
    Product one({1, 50, 200, false, false, true}, draws);
    one.bias = all.bias;
    for (int64_t c = 0; c < 50; ++c) {
      for (int64_t k = 0; k < 200; ++k) {
        at(one.right.matrix, c, k) = at(all.right.matrix, c, k);
      }
    }
    for (int64_t r = 0; r < 70; ++r) {
      for (int64_t k = 0; k < 200; ++k) at(one.left.matrix, 0, k) = at(all.left.matrix, r, k);
      one.compute(kernels, nullptr);
      for (int64_t c = 0; c < 50; ++c) {
        EXPECT_EQ(at(one.output.matrix, 0, c).bits, at(all.output.matrix, r, c).bits) << r;
      }
    }
  });
}

TEST_F(TileLinearTest, NaNAndInfinityReachTheRowsAndColumnsTheyAreOf) {
  on_each_set([](const cpu::TileKernels& kernels) {
    Draws draws(35);
    Product product({40, 40, 70, false, false, false}, draws);
    constexpr BFloat16 infinity{0x7f80};
    at(product.left.matrix, 3, 69) = gap;
    at(product.right.matrix, 37, 1) = infinity;
    product.compute(kernels, nullptr);
    for (int64_t r = 0; r < 40; ++r) {
      for (int64_t c = 0; c < 40; ++c) {
        const float found = number(at(product.output.matrix, r, c));
        if (r == 3) {
          EXPECT_TRUE(std::isnan(found)) << c;
        } else if (c == 37) {
          EXPECT_FALSE(std::isfinite(found)) << r;
        } else {
          EXPECT_TRUE(std::isfinite(found)) << r << ", " << c;
        }
      }
    }
  });
}

// As a product's: the sum of `rows` numbers, rounded once.
TEST_F(TileLinearTest, ColumnsAreSummedWithinTheirRounding) {
  on_each_set([](const cpu::TileKernels& kernels) {
    Draws draws(36);
    for (int i = 0; i < 60; ++i) {
      const int64_t rows = i == 0 ? 3000 : draws.from(1, 400), columns = draws.from(1, 100);
      Held held(rows, columns, draws);
      held.fill(draws);
      std::vector<BFloat16> sums(static_cast<size_t>(columns) + 1, gap);
      for (int64_t b = 0; b < blocks(columns); ++b) {
        kernels.sum_columns(held.read(), b, sums.data());
      }
      EXPECT_EQ(sums.back().bits, gap.bits);
      for (int64_t c = 0; c < columns; ++c) {
        double sum = 0, magnitude = 0;
        for (int64_t r = 0; r < rows; ++r) {
          sum += number(at(held.matrix, r, c));
          magnitude += std::abs(number(at(held.matrix, r, c)));
        }
        const double error = std::ldexp(static_cast<double>(rows) * magnitude, -24);
        EXPECT_NEAR(number(sums[static_cast<size_t>(c)]), sum, error + half_unit(sum) + 1e-38)
            << c << " of " << rows << " x " << columns;
      }
    }
  });
}

}  // namespace
}  // namespace mha::test
