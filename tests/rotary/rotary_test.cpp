// Guards rotary positions: the frequencies against the published formulas, the rotation against
// a loop in double that turns complex numbers, its gradients, and every kernel's arithmetic. A
// float32 result is two products and a sum of roundings of 6e-8, of numbers up to 4: 1e-6.
#include <gtest/gtest.h>
#include <mha/rotary.h>

#include <cmath>
#include <complex>
#include <sstream>

#include "support/every_isa_test.h"
#include "support/expect.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha {
namespace {

using test::is_bit_equal;
using test::is_close;
using test::leaf;
using test::nan;
using test::Random;
using test::refuses;

constexpr double pi = 3.14159265358979323846;

// Each pair is a complex number, turned by e^(i position frequency).
at::Tensor turned(const at::Tensor& x, const at::Tensor& positions,
                  const std::vector<double>& frequencies, RotaryPairing pairing,
                  double amplitude = 1) {
  const auto result = x.detach().to(at::kDouble).contiguous().clone();
  const auto all = positions.expand({x.size(0), x.size(2)}).to(at::kLong).contiguous();
  auto y = result.accessor<double, 4>();
  const auto p = all.accessor<int64_t, 2>();
  const auto pairs = static_cast<int64_t>(frequencies.size());
  for (int64_t n = 0; n < x.size(0); ++n)
    for (int64_t h = 0; h < x.size(1); ++h)
      for (int64_t t = 0; t < x.size(2); ++t)
        for (int64_t i = 0; i < pairs; ++i) {
          const bool halves = pairing == RotaryPairing::half_split;
          double& a = y[n][h][t][halves ? i : 2 * i];
          double& b = y[n][h][t][halves ? i + pairs : 2 * i + 1];
          const double angle = static_cast<double>(p[n][t]) * frequencies[i];
          const auto turned = std::complex<double>(a, b) * std::polar(amplitude, angle);
          a = turned.real();
          b = turned.imag();
        }
  return result;
}

std::vector<double> unscaled(double base, int64_t dim) {
  std::vector<double> frequencies;
  for (int64_t i = 0; i < dim / 2; ++i) {
    frequencies.push_back(
        1 / std::pow(base, 2.0 * static_cast<double>(i) / static_cast<double>(dim)));
  }
  return frequencies;
}

at::Tensor values(const std::vector<double>& numbers) {
  return at::tensor(numbers, at::kDouble);
}

TEST(RotaryFrequenciesTest, WithoutScalingTheyArePowersOfTheBase) {
  EXPECT_TRUE(
      is_close(rotary_frequencies(RotaryOptions(), 8), values({1, 0.1, 0.01, 0.001}), 1e-15));
  EXPECT_TRUE(is_close(rotary_frequencies(RotaryOptions().base(16).rotary_dim(4), 8),
                       values({1, 0.25}), 1e-15));
}

TEST(RotaryFrequenciesTest, LinearDividesAllAndNtkOnlyTheSlowestWhole) {
  EXPECT_TRUE(is_close(rotary_frequencies(RotaryOptions().scaling(LinearScaling(4)), 8),
                       values({0.25, 0.025, 0.0025, 0.00025}), 1e-15));
  const double base = 10000 * std::pow(4.0, 8.0 / 6.0);
  const auto ntk = rotary_frequencies(RotaryOptions().scaling(NtkScaling(4)), 8);
  EXPECT_TRUE(is_close(ntk, values(unscaled(base, 8)), 1e-15));
  EXPECT_NEAR(ntk[3].item<double>(), 0.001 / 4, 1e-17);
}

TEST(RotaryFrequenciesTest, Llama3KeepsShortWavesStretchesLongOnesAndBlendsBetween) {
  // LLaMA 3.1 8B: head size 128, base 500,000, factor 8, of 8,192 positions.
  const auto options = RotaryOptions().base(500000).scaling(Llama3Scaling(8, 8192));
  const auto found = rotary_frequencies(options, 128);
  const auto before = unscaled(500000, 128);
  int64_t kept = 0, stretched = 0, blended = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    const double wavelength = 2 * pi / before[i];
    double expected;
    if (wavelength < 8192 / 4.0) {
      expected = before[i];
      ++kept;
    } else if (wavelength > 8192 / 1.0) {
      expected = before[i] / 8;
      ++stretched;
    } else {
      const double smooth = (8192 / wavelength - 1) / (4.0 - 1);
      expected = (1 - smooth) * before[i] / 8 + smooth * before[i];
      ++blended;
    }
    EXPECT_NEAR(found[static_cast<int64_t>(i)].item<double>() / expected, 1, 1e-13) << i;
  }
  EXPECT_GT(kept, 20);
  EXPECT_GT(stretched, 20);
  EXPECT_GT(blended, 2);
}

TEST(RotaryFrequenciesTest, YarnRampsOverThePairsAsInItsAuthorsCode) {
  // Head size 128, base 10,000, 16 times 4,096 positions. The ramp by hand: pair
  // 64 ln(4096 / (2 pi turns)) / ln(10000) is 20.94 for 32 turns and 45.03 for one.
  for (const bool truncate : {true, false}) {
    const auto options = RotaryOptions().scaling(YarnScaling(16, 4096).truncate(truncate));
    const double low = truncate ? 20 : 64 * std::log(4096 / (64 * pi)) / std::log(10000.0);
    const double high = truncate ? 46 : 64 * std::log(4096 / (2 * pi)) / std::log(10000.0);
    const auto before = unscaled(10000, 128);
    std::vector<double> expected;
    for (size_t i = 0; i < before.size(); ++i) {
      const double at = (static_cast<double>(i) - low) / (high - low);
      const double ramp = at < 0 ? 0 : at > 1 ? 1 : at;
      expected.push_back(before[i] / 16 * ramp + before[i] * (1 - ramp));
    }
    EXPECT_TRUE(is_close(rotary_frequencies(options, 128), values(expected), 1e-15));
  }
}

TEST(RotaryTest, APairTurnsByItsPositionTimesItsFrequency) {
  const auto x = at::tensor({1.0, 2.0, 0.0, 3.0}, at::kDouble).view({1, 1, 1, 4});
  const auto p = at::tensor({2}, at::kLong);
  const double f = 0.01;  // of the second pair
  EXPECT_TRUE(is_close(apply_rotary(x, p).flatten(),
                       values({std::cos(2), 2 * std::cos(2 * f) - 3 * std::sin(2 * f),
                               std::sin(2), 3 * std::cos(2 * f) + 2 * std::sin(2 * f)}),
                       1e-15));
  EXPECT_TRUE(is_close(
      apply_rotary(x, p, RotaryOptions().pairing(RotaryPairing::interleaved)).flatten(),
      values({std::cos(2) - 2 * std::sin(2), 2 * std::cos(2) + std::sin(2),
              -3 * std::sin(2 * f), 3 * std::cos(2 * f)}),
      1e-15));
}

TEST(RotaryTest, ScoresDependOnTheDistanceOfPositionsOnly) {
  Random random(11);
  const auto q = random.normal({1, 1, 1, 64}, at::kDouble),
             k = random.normal({1, 1, 1, 64}, at::kDouble);
  const auto score = [&](int64_t i, int64_t j) {
    return (apply_rotary(q, at::full({1}, i)) * apply_rotary(k, at::full({1}, j)))
        .sum()
        .item<double>();
  };
  EXPECT_NEAR(score(7, 3), score(1007, 1003), 1e-9);
  EXPECT_NEAR(score(7, 3), score(-20, -24), 1e-9);
  EXPECT_GT(std::abs(score(7, 3) - score(8, 3)), 0.01);
}

struct RotaryCase {
  int64_t head_dim;
  RotaryOptions options;
  std::vector<double> frequencies;
  double amplitude = 1;
};
std::vector<RotaryCase> rotary_cases() {
  const std::vector<double> short_factor{1, 1.1, 1.2, 2}, long_factor{3, 5, 9, 16};
  // The longest positions of calls are 44 to 74.
  const auto divided = [&](int64_t original, const std::vector<double>& factors) {
    const auto scaling = LongRopeScaling(short_factor, long_factor, original).factor(8);
    RotaryCase found{8, RotaryOptions().scaling(scaling), unscaled(10000, 8)};
    for (size_t i = 0; i < 4; ++i) found.frequencies[i] /= factors[i];
    found.amplitude = std::sqrt(1 + std::log(8) / std::log(original));
    return found;
  };
  const auto interleaved = RotaryOptions().pairing(RotaryPairing::interleaved);
  const YarnScaling yarn = YarnScaling(4, 64).attention_factor(1.25);
  auto scaled = RotaryCase{64, RotaryOptions().scaling(yarn), {}, 1.25};
  const auto found = rotary_frequencies(scaled.options, 64);
  for (int64_t i = 0; i < 32; ++i) scaled.frequencies.push_back(found[i].item<double>());
  return {{64, RotaryOptions(), unscaled(10000, 64)},
          {80, interleaved, unscaled(10000, 80)},
          {128, RotaryOptions().base(500000), unscaled(500000, 128)},
          {6, RotaryOptions(), unscaled(10000, 6)},
          {10, interleaved, unscaled(10000, 10)},
          {40, RotaryOptions().rotary_dim(14), unscaled(10000, 14)},
          {40, RotaryOptions(interleaved).rotary_dim(34), unscaled(10000, 34)},
          {8, RotaryOptions().frequencies({1, 0, -0.5, 1e-3}), {1, 0, -0.5, 1e-3}},
          divided(128, short_factor),
          divided(4, long_factor),
          scaled};
}

void expect_rotations_of_double() {
  Random random(12);
  for (const auto& [d, options, frequencies, amplitude] : rotary_cases()) {
    std::ostringstream name;
    name << options << " of " << d;
    SCOPED_TRACE(name.str());
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      const auto x = random.normal({2, 3, 70, d}, dtype);
      const auto shared = at::arange(70) + 5;
      const auto apart = at::stack({shared, at::arange(70).flip(0)});
      const double tolerance = dtype == at::kDouble  ? 1e-12
                               : dtype == at::kFloat ? 1e-6
                                                     : 8 * test::unit_roundoff(dtype);
      for (const auto& positions : {shared, apart}) {
        const auto expected = turned(x, positions, frequencies, options.pairing(), amplitude);
        const auto y = apply_rotary(x, positions, options);
        EXPECT_EQ(y.scalar_type(), dtype);
        EXPECT_TRUE(is_close(y, expected, tolerance)) << dtype;
        // Any strides: heads inside, and a slice of every other element.
        const auto inside = x.transpose(1, 2).contiguous().transpose(1, 2);
        EXPECT_TRUE(is_bit_equal(apply_rotary(inside, positions, options), y)) << dtype;
        const auto steps = at::stack({x, x}, -1).flatten(3).slice(3, 0, 2 * d, 2);
        EXPECT_TRUE(is_bit_equal(apply_rotary(steps, positions, options), y)) << dtype;
      }
    }
  }
}

TEST(RotaryTest, EveryPairingSizeAndDtypeAgreesWithComplexNumbersInDouble) {
  expect_rotations_of_double();
}

class RotaryEveryIsaTest : public test::EveryIsaTest {};

TEST_F(RotaryEveryIsaTest, EveryPairingSizeAndDtypeAgreesWithComplexNumbersInDouble) {
  for (const auto isa : available_cpu_isas()) {
    set_cpu_isa(isa);
    expect_rotations_of_double();
  }
}

TEST_F(RotaryEveryIsaTest, HalfTypesAreRoundedAsTorchRoundsThem) {
  // At position 0 the rotation is the identity, so what comes out is x, subnormal or infinite.
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto bits = at::arange(-32768, 32768, at::kShort).view(dtype).view({1, 1, 1024, 64});
    const auto zeros = at::zeros({1024}, at::kLong);
    for (const auto isa : available_cpu_isas()) {
      set_cpu_isa(isa);
      // cos = 1 and sin = 0: infinities give NaN (inf * 0), and -0 may become 0.
      const auto found = apply_rotary(bits, zeros).to(at::kDouble);
      const auto given = bits.to(at::kDouble);
      const auto partner = at::cat({given.slice(3, 32), given.slice(3, 0, 32)}, 3);
      const auto finite = given.isfinite() & partner.isfinite();
      EXPECT_TRUE(is_close(found.masked_select(finite), given.masked_select(finite), 0.0))
          << dtype;
      EXPECT_TRUE(found.masked_select(given.isnan()).isnan().all().item<bool>()) << dtype;
      // Roundings, by a rotation of numbers in float32 that torch then rounds.
      const auto x =
          at::linspace(-3, 3, 4096, at::kFloat).pow(9).view({1, 1, 64, 64}).to(dtype);
      const auto positions = at::arange(64);
      EXPECT_TRUE(is_bit_equal(apply_rotary(x, positions),
                               apply_rotary(x.to(at::kFloat), positions).to(dtype)))
          << dtype;
    }
  }
}

TEST(RotaryTest, FarAndNegativePositionsAreAsExactAsNearOnes) {
  Random random(13);
  const auto x = random.normal({1, 2, 4, 64});
  for (const auto& positions : {at::tensor({-3, 0, 5, -1000}, at::kLong),
                                at::tensor({1000000000, 3, 7, 1 << 30}, at::kLong),
                                at::tensor({131071, 131072, 65536, 0}, at::kInt)}) {
    const auto expected =
        turned(x, positions.to(at::kLong), unscaled(10000, 64), RotaryPairing::half_split);
    // The angle itself is a double of 1e9: its last bit is 1e-7.
    EXPECT_TRUE(is_close(apply_rotary(x, positions), expected, 2e-6));
  }
}

TEST(RotaryTest, GradientsTurnBackAndHaveGradientsThemselves) {
  Random random(14);
  for (const auto& [d, options, frequencies, amplitude] : rotary_cases()) {
    const auto positions = at::stack({at::arange(5), at::arange(5) + 40});
    const auto x = leaf(random.normal({2, 3, 5, d})), g = leaf(random.normal({2, 3, 5, d}));
    const auto y = apply_rotary(x, positions, options);
    const auto grad = torch::autograd::grad({y}, {x}, {g}, true, true)[0];
    // The transposed rotation: positions turned round.
    EXPECT_TRUE(
        is_close(grad, turned(g, -positions, frequencies, options.pairing(), amplitude), 1e-6));
    const auto u = random.normal({2, 3, 5, d});
    const auto second = torch::autograd::grad({grad}, {g}, {u})[0];
    EXPECT_TRUE(is_close(
        second, turned(u, positions, frequencies, options.pairing(), amplitude), 1e-6));
  }
}

TEST(RotaryTest, PositionsMayBeOverwrittenBeforeTheBackward) {
  Random random(15);
  const auto x = leaf(random.normal({1, 1, 4, 8}));
  auto positions = at::arange(4);
  const auto y = apply_rotary(x, positions);
  positions.fill_(0);
  const auto grad = torch::autograd::grad({y.sum()}, {x})[0];
  EXPECT_TRUE(is_close(
      grad,
      turned(at::ones_like(x), -at::arange(4), unscaled(10000, 8), RotaryPairing::half_split),
      1e-6));
}

TEST(RotaryTest, EmptyTensorsStayEmpty) {
  EXPECT_EQ(apply_rotary(at::ones({0, 2, 3, 4}), at::arange(3)).sizes(),
            at::IntArrayRef({0, 2, 3, 4}));
  EXPECT_EQ(apply_rotary(at::ones({2, 2, 0, 4}), at::arange(0)).sizes(),
            at::IntArrayRef({2, 2, 0, 4}));
}

TEST(RotaryTest, WrongArgumentsAreNamed) {
  const auto x = at::ones({2, 1, 3, 4});
  const auto p = at::arange(3);
  EXPECT_TRUE(refuses([&] { apply_rotary({}, p); }, {"x", "undefined"}));
  EXPECT_TRUE(refuses([&] { apply_rotary(x[0], p); }, {"x", "[1, 3, 4]"}));
  EXPECT_TRUE(refuses([&] { apply_rotary(p, p); }, {"x", "Long"}));
  EXPECT_TRUE(refuses([&] { apply_rotary(x, {}); }, {"positions", "undefined"}));
  EXPECT_TRUE(refuses([&] { apply_rotary(x, at::arange(4)); }, {"positions", "3", "[4]"}));
  EXPECT_TRUE(refuses([&] { apply_rotary(x, at::zeros({1, 3}, at::kLong)); },
                      {"positions", "2", "[1, 3]"}));
  EXPECT_TRUE(refuses([&] { apply_rotary(x, at::ones({3})); }, {"positions", "Float"}));
  const auto with = [&](const RotaryOptions& options) {
    return [&x, &p, options] { apply_rotary(x, p, options); };
  };
  EXPECT_TRUE(refuses(with(RotaryOptions().base(1)), {"base", "1"}));
  EXPECT_TRUE(refuses(with(RotaryOptions().base(nan)), {"base", "nan"}));
  EXPECT_TRUE(refuses(with(RotaryOptions().rotary_dim(3)), {"rotary_dim", "4", "3"}));
  EXPECT_TRUE(refuses(with(RotaryOptions().rotary_dim(6)), {"rotary_dim", "4", "6"}));
  EXPECT_TRUE(refuses(with(RotaryOptions().rotary_dim(0)), {"rotary_dim", "0"}));
  EXPECT_TRUE(refuses([&] { apply_rotary(at::ones({1, 1, 3, 5}), p); }, {"rotary_dim", "5"}));
  EXPECT_TRUE(refuses(with(RotaryOptions().scaling(LinearScaling(0.5))), {"factor", "0.5"}));
  EXPECT_TRUE(refuses(with(RotaryOptions().scaling(NtkScaling(nan))), {"factor", "nan"}));
  EXPECT_TRUE(refuses(with(RotaryOptions().scaling(YarnScaling(2, 0))),
                      {"original_max_position", "0"}));
  EXPECT_TRUE(refuses(with(RotaryOptions().scaling(YarnScaling(2, 64).beta_slow(40))),
                      {"beta_slow", "40", "32"}));
  EXPECT_TRUE(refuses(with(RotaryOptions().scaling(YarnScaling(2, 64).attention_factor(0))),
                      {"attention_factor", "0"}));
  EXPECT_TRUE(refuses(with(RotaryOptions().scaling(Llama3Scaling(2, 64).low_freq_factor(5))),
                      {"low_freq_factor", "5", "4"}));
}

TEST(RotaryTest, FrequenciesOfOnesOwnAreChecked) {
  const auto p = at::arange(3);
  const auto with = [&](const RotaryOptions& options) {
    return [=] { apply_rotary(at::ones({1, 1, 3, 4}), p, options); };
  };
  EXPECT_TRUE(refuses(with(RotaryOptions().frequencies({1, 2, 3})), {"frequencies", "2", "3"}));
  EXPECT_TRUE(refuses(with(RotaryOptions().frequencies({1, nan})), {"frequencies", "nan"}));
  EXPECT_TRUE(refuses(with(RotaryOptions().frequencies({1, 2}).scaling(LinearScaling(2))),
                      {"scaling", "none", "linear(2)"}));
  const auto longrope = [&](std::vector<double> shorter, std::vector<double> longer) {
    return RotaryOptions().scaling(LongRopeScaling(std::move(shorter), std::move(longer), 64));
  };
  EXPECT_TRUE(refuses(with(longrope({1}, {1, 2})), {"short_factor", "2", "1"}));
  EXPECT_TRUE(refuses(with(longrope({1, 1}, {1, 2, 3})), {"long_factor", "2", "3"}));
  EXPECT_TRUE(refuses(with(longrope({1, 1}, {1, 0})), {"long_factor", "0"}));
  const LongRopeScaling good({1, 1}, {1, 1}, 64);
  const auto scaled = [&](const LongRopeScaling& scaling) {
    return with(RotaryOptions().scaling(scaling));
  };
  EXPECT_TRUE(refuses(scaled(LongRopeScaling(good).factor(0.5)), {"factor", "0.5"}));
  EXPECT_TRUE(
      refuses(scaled(LongRopeScaling(good).attention_factor(-1)), {"attention_factor", "-1"}));
  EXPECT_TRUE(refuses(scaled(LongRopeScaling(good).original_max_position(0)),
                      {"original_max_position", "0"}));
  EXPECT_TRUE(
      refuses(with(RotaryOptions().scaling(YarnScaling(2, 64).mscale(-1))), {"mscale", "-1"}));
}

TEST(RotaryTest, YarnsAttentionFactorFollowsFromItsScales) {
  const auto text = [](const YarnScaling& yarn) {
    return (std::ostringstream() << RotaryScaling(yarn)).str();
  };
  // (0.1 * 2 * 1 + 1) / (0.1 * 0.5 * 1 + 1)
  EXPECT_NE(text(YarnScaling(std::exp(1.0), 64).mscale(2).mscale_all_dim(0.5))
                .find("attention_factor=1.14286,"),
            std::string::npos);
  EXPECT_NE(text(YarnScaling(std::exp(1.0), 64)).find("attention_factor=1.1,"),
            std::string::npos);
}

TEST(RotaryTest, OptionsDescribeThemselves) {
  const auto text = [](const RotaryOptions& options) {
    return (std::ostringstream() << options).str();
  };
  EXPECT_EQ(text({}), "(base=10000, pairing=half_split, scaling=none)");
  EXPECT_EQ(text(RotaryOptions()
                     .base(500000)
                     .pairing(RotaryPairing::interleaved)
                     .rotary_dim(32)
                     .scaling(Llama3Scaling(8, 8192))),
            "(base=500000, pairing=interleaved, rotary_dim=32, scaling=llama3(8, "
            "original_max_position=8192, low_freq_factor=1, high_freq_factor=4))");
  EXPECT_EQ(text(RotaryOptions().scaling(YarnScaling(1, 64))),
            "(base=10000, pairing=half_split, scaling=yarn(1, original_max_position=64, "
            "beta_fast=32, beta_slow=1, attention_factor=1, truncate=true))");
  EXPECT_EQ(text(RotaryOptions().scaling(LinearScaling(2))),
            "(base=10000, pairing=half_split, scaling=linear(2))");
  EXPECT_EQ(text(RotaryOptions().scaling(NtkScaling(3))),
            "(base=10000, pairing=half_split, scaling=ntk(3))");
  EXPECT_EQ(text(RotaryOptions().frequencies({1, 0.5})),
            "(frequencies=[1, 0.5], pairing=half_split, scaling=none)");
  EXPECT_EQ(text(RotaryOptions().scaling(LongRopeScaling({1, 2}, {3, 4.5}, 64))),
            "(base=10000, pairing=half_split, scaling=longrope(1, original_max_position=64, "
            "attention_factor=1, short_factor=[1, 2], long_factor=[3, 4.5]))");
}

TEST(RotaryTest, HeadsBeyondAnyMemoryAreRefused) {
  EXPECT_TRUE(test::refuses([] { rotary_frequencies({}, int64_t{1} << 40); },
                            {"rotary_dim", "2^24", std::to_string(int64_t{1} << 40)}));
  EXPECT_EQ(rotary_frequencies(RotaryOptions().rotary_dim(4), int64_t{1} << 40).numel(), 2);
}

}  // namespace
}  // namespace mha
