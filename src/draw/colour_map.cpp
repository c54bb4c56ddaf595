#include "colour_map.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace mha::draw::detail {
namespace {

constexpr double kPi = 3.14159265358979323846;

/// A colour by lightness (0 to 1), chroma and hue in degrees, in OKLab.
/// Source: B. Ottosson, "A perceptual color space for image processing", 2020.
struct Knot {
  double lightness, chroma, hue;
};

struct Lab {
  double lightness, a, b;
};

/// The curve through the middle two of four values, in [0, 1] of the way between them.
double catmull_rom(double before, double from, double to, double after, double part) {
  const double slope = to - before;
  const double bend = 2 * before - 5 * from + 4 * to - after;
  const double twist = 3 * (from - to) + after - before;
  return from + 0.5 * part * (slope + part * (bend + part * twist));
}

Lab on_curve(const std::vector<Knot>& knots, double position) {
  const auto last = static_cast<int>(knots.size()) - 1;
  const int begin = std::min(static_cast<int>(position * last), last - 1);
  const double part = position * last - begin;
  const auto value = [&](double Knot::*field) {
    const auto at = [&](int i) {
      return knots[static_cast<size_t>(std::clamp(i, 0, last))].*field;
    };
    return catmull_rom(at(begin - 1), at(begin), at(begin + 1), at(begin + 2), part);
  };
  const double chroma = value(&Knot::chroma), hue = value(&Knot::hue) * kPi / 180;
  return {value(&Knot::lightness), chroma * std::cos(hue), chroma * std::sin(hue)};
}

double distance(const Lab& x, const Lab& y) {
  return std::sqrt((x.lightness - y.lightness) * (x.lightness - y.lightness) +
                   (x.a - y.a) * (x.a - y.a) + (x.b - y.b) * (x.b - y.b));
}

uint8_t srgb_byte(double linear) {
  const double x = std::clamp(linear, 0.0, 1.0);
  const double encoded = x <= 0.0031308 ? 12.92 * x : 1.055 * std::pow(x, 1 / 2.4) - 0.055;
  return static_cast<uint8_t>(std::lround(255 * encoded));
}

Rgb srgb(const Lab& colour) {
  const auto cube = [](double x) { return x * x * x; };
  const double l = cube(colour.lightness + 0.3963377774 * colour.a + 0.2158037573 * colour.b);
  const double m = cube(colour.lightness - 0.1055613458 * colour.a - 0.0638541728 * colour.b);
  const double s = cube(colour.lightness - 0.0894841775 * colour.a - 1.2914855480 * colour.b);
  return {srgb_byte(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s),
          srgb_byte(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s),
          srgb_byte(-0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s)};
}

/// Colours in equal steps of OKLab's distance along the curve through `knots`.
ColourTable equal_steps(const std::vector<Knot>& knots) {
  constexpr int kSamples = 2000;
  std::vector<Lab> curve;
  std::vector<double> length = {0};
  for (int i = 0; i <= kSamples; ++i) {
    curve.push_back(on_curve(knots, static_cast<double>(i) / kSamples));
    if (i > 0) length.push_back(length.back() + distance(curve[i - 1], curve[i]));
  }
  ColourTable table{};
  for (int i = 0; i < kColours; ++i) {
    const double wanted = length.back() * i / (kColours - 1);
    const auto found = std::lower_bound(length.begin(), length.end(), wanted);
    const auto index = std::min(found - length.begin(), std::ptrdiff_t{kSamples});
    table[static_cast<size_t>(i)] = srgb(curve[static_cast<size_t>(index)]);
  }
  return table;
}

// Knots within sRGB: teal is where the cube leaves least room for chroma.
const std::vector<Knot> kDusk = {{0.24, 0.105, 302},
                                 {0.41, 0.125, 268},
                                 {0.575, 0.098, 222},
                                 {0.745, 0.135, 162},
                                 {0.93, 0.165, 106}};
const std::vector<Knot> kInk = {{0.972, 0.012, 220},
                                {0.80, 0.085, 232},
                                {0.60, 0.125, 250},
                                {0.40, 0.13, 266},
                                {0.22, 0.075, 280}};
const std::vector<Knot> kGrey = {{0.965, 0, 0}, {0.15, 0, 0}};

}  // namespace

const ColourTable& colour_table(ColourMap map) {
  static const std::array<ColourTable, 3> tables = {equal_steps(kDusk), equal_steps(kInk),
                                                    equal_steps(kGrey)};
  return tables[static_cast<size_t>(map)];
}

Rgb colour_at(ColourMap map, double position) {
  const double index = std::clamp(position, 0.0, 1.0) * (kColours - 1);
  return colour_table(map)[static_cast<size_t>(std::lround(index))];
}

}  // namespace mha::draw::detail
