// Guards what the header says of the colour maps. Lightness and differences are computed from
// the bytes of the tables by formulas other than those that made them: CIE lightness, OKLab's
// inverse, and the simulations of colour-blindness of Machado, Oliveira and Fernandes (2009) at
// severity 1. The tolerance of equal steps covers the rounding to bytes, up to half a unit in
// 255.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <regex>
#include <string>
#include <vector>

#include "draw/colour_map.h"
#include "draw/painter.h"

namespace mha::draw {
namespace {

using detail::colour_table;
using detail::ColourTable;
using detail::Rgb;
using Triple = std::array<double, 3>;
using Matrix = std::array<Triple, 3>;

constexpr std::array kMaps = {ColourMap::dusk, ColourMap::ink, ColourMap::grey};

Triple linear(Rgb colour) {
  const auto decode = [](uint8_t byte) {
    const double x = byte / 255.0;
    return x <= 0.04045 ? x / 12.92 : std::pow((x + 0.055) / 1.055, 2.4);
  };
  return {decode(colour.red), decode(colour.green), decode(colour.blue)};
}

Triple times(const Matrix& m, const Triple& x) {
  Triple y{};
  for (size_t i = 0; i < 3; ++i) y[i] = m[i][0] * x[0] + m[i][1] * x[1] + m[i][2] * x[2];
  return y;
}

// L* of CIE 1976, 0 to 100.
double lightness(const Triple& rgb) {
  const double y = std::max(0.0, 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]);
  return y > 0.008856 ? 116 * std::cbrt(y) - 16 : 903.3 * y;
}

Triple oklab(const Triple& rgb) {
  const Matrix cones = {{{0.4122214708, 0.5363325363, 0.0514459929},
                         {0.2119034982, 0.6806995451, 0.1073969566},
                         {0.0883024619, 0.2817188376, 0.6299787005}}};
  Triple lms = times(cones, rgb);
  for (double& x : lms) x = std::cbrt(x);
  return times({{{0.2104542553, 0.7936177850, -0.0040720468},
                 {1.9779984951, -2.4285922050, 0.4505937099},
                 {0.0259040371, 0.7827717662, -0.8086757660}}},
               lms);
}

double difference(Rgb x, Rgb y) {
  const Triple a = oklab(linear(x)), b = oklab(linear(y));
  return std::hypot(a[0] - b[0], a[1] - b[1], a[2] - b[2]);
}

// 1 if the numbers only rise, -1 if they only fall, else 0.
int direction(const std::vector<double>& numbers) {
  bool rise = true, fall = true;
  for (size_t i = 1; i < numbers.size(); ++i) {
    rise = rise && numbers[i] > numbers[i - 1];
    fall = fall && numbers[i] < numbers[i - 1];
  }
  return (rise ? 1 : 0) - (fall ? 1 : 0);
}

TEST(ColourMapTest, LightnessOnlyRisesOrOnlyFalls) {
  for (const ColourMap map : kMaps) {
    std::vector<double> values;
    for (size_t i = 0; i < detail::kColours; i += 3) {  // bytes are too coarse for every one
      values.push_back(lightness(linear(colour_table(map)[i])));
    }
    EXPECT_EQ(direction(values), map == ColourMap::dusk ? 1 : -1);
    EXPECT_GT(std::abs(values.back() - values.front()), 70);  // of 100
  }
}

TEST(ColourMapTest, EqualStepsAreEqualDifferences) {
  for (const ColourMap map : kMaps) {
    constexpr size_t step = 15;  // 17 steps
    std::vector<double> differences;
    for (size_t i = step; i < detail::kColours; i += step) {
      differences.push_back(difference(colour_table(map)[i - step], colour_table(map)[i]));
    }
    const auto [least, most] = std::minmax_element(differences.begin(), differences.end());
    EXPECT_LT(*most / *least, 1.2);
  }
}

TEST(ColourMapTest, TheColourBlindSeeTheOrderToo) {
  const std::array<Matrix, 3> sights = {{
      {{{0.152286, 1.052583, -0.204868},
        {0.114503, 0.786281, 0.099216},
        {-0.003882, -0.048116, 1.051998}}},
      {{{0.367322, 0.860646, -0.227968},
        {0.280085, 0.672501, 0.047413},
        {-0.011820, 0.042940, 0.968881}}},
      {{{1.255528, -0.076749, -0.178779},
        {-0.078411, 0.930809, 0.147602},
        {0.004733, 0.691367, 0.303900}}},
  }};
  for (const ColourMap map : kMaps) {
    for (const Matrix& sight : sights) {
      std::vector<double> values;
      for (size_t i = 0; i < detail::kColours; i += 5) {
        values.push_back(lightness(times(sight, linear(colour_table(map)[i]))));
      }
      EXPECT_EQ(direction(values), map == ColourMap::dusk ? 1 : -1);
    }
  }
}

TEST(ColourMapTest, PositionsBeyondTheEndsHaveTheColourOfTheEnd) {
  const ColourTable& table = detail::colour_table(ColourMap::dusk);
  const auto equal = [](Rgb a, Rgb b) {
    return a.red == b.red && a.green == b.green && a.blue == b.blue;
  };
  EXPECT_TRUE(equal(detail::colour_at(ColourMap::dusk, -0.5), table.front()));
  EXPECT_TRUE(equal(detail::colour_at(ColourMap::dusk, 1.5), table.back()));
  EXPECT_TRUE(equal(detail::colour_at(ColourMap::dusk, 0.2), table[51]));
}

// A colour of xterm's palette: a cube of 6 x 6 x 6 from 16 on, then greys from 232 on.
Rgb xterm(int index) {
  if (index >= 232) {
    const auto grey = static_cast<uint8_t>(8 + 10 * (index - 232));
    return {grey, grey, grey};
  }
  constexpr std::array<uint8_t, 6> levels = {0, 95, 135, 175, 215, 255};
  const auto at = [&](int i) { return levels[static_cast<size_t>(i % 6)]; };
  return {at((index - 16) / 36), at((index - 16) / 6), at(index - 16)};
}

TEST(ColourMapTest, InTheTerminalsPaletteLightnessOnlyRisesOrOnlyFallsToo) {
  for (const ColourMap map : kMaps) {
    detail::Painter painter(Colours::palette_256, map);
    for (int i = 0; i <= 200; ++i) painter.cell(i / 200.0, 1);
    const std::string line = painter.take();
    std::vector<double> values;
    const std::regex code("48;5;([0-9]+)m");
    for (std::sregex_iterator match(line.begin(), line.end(), code), end; match != end;
         ++match) {
      values.push_back(lightness(linear(xterm(std::stoi((*match)[1])))));
    }
    EXPECT_EQ(values.size(), 12u);  // each step once
    EXPECT_EQ(direction(values), map == ColourMap::dusk ? 1 : -1);
  }
}

}  // namespace
}  // namespace mha::draw
