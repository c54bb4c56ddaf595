#include "painter.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

#include "colour_map.h"

namespace mha::draw::detail {
namespace {

/// The entry of `steps` nearest to `position`.
template <typename Steps>
auto nearest(const Steps& steps, double position) {
  const double last = static_cast<double>(steps.size() - 1);
  return steps[static_cast<size_t>(std::lround(std::clamp(position, 0.0, 1.0) * last))];
}

/// The colour maps in xterm's palette; lightness only rises or only falls here too.
int palette_index(ColourMap map, double position) {
  constexpr std::array dusk = {53, 54, 55, 25, 31, 36, 72, 77, 113, 149, 185, 227};
  constexpr std::array ink = {195, 159, 153, 117, 81, 75, 69, 33, 27, 26, 19, 17};
  constexpr std::array grey = {255, 253, 251, 249, 247, 245, 243, 241, 239, 237, 235, 233};
  switch (map) {
    case ColourMap::ink:
      return nearest(ink, position);
    case ColourMap::grey:
      return nearest(grey, position);
    default:
      return nearest(dusk, position);
  }
}

char character(double position) {
  constexpr std::string_view steps = ".:-=+*#%@";
  return nearest(steps, position);
}

}  // namespace

void Painter::cell(double position, int64_t columns) {
  const auto count = static_cast<size_t>(columns);
  if (colours_ == Colours::none) {
    line_.append(count, position < 0 ? ' ' : character(position));
    return;
  }
  set(Ground::back, position);
  line_.append(count, ' ');
}

void Painter::half_cells(double upper, double lower) {
  if (upper < 0 && lower < 0) {
    set(Ground::back, kBlank);
    line_ += ' ';
  } else if (upper < 0) {
    set(Ground::front, lower);
    set(Ground::back, kBlank);
    line_ += "\u2584";  // lower half block
  } else {
    set(Ground::front, upper);
    set(Ground::back, lower);
    line_ += "\u2580";  // upper half block
  }
}

std::string Painter::take() {
  if (front_ != "39" || back_ != "49") line_ += "\x1b[0m";
  front_ = "39";
  back_ = "49";
  return std::exchange(line_, {});
}

void Painter::set(Ground ground, double position) {
  const int digit = static_cast<int>(ground);
  std::string wanted = fmt::format("{}9", digit);  // the terminal's own colour
  if (position >= 0 && colours_ == Colours::rgb) {
    const Rgb colour = colour_at(map_, position);
    wanted = fmt::format("{}8;2;{};{};{}", digit, colour.red, colour.green, colour.blue);
  } else if (position >= 0) {
    wanted = fmt::format("{}8;5;{}", digit, palette_index(map_, position));
  }
  std::string& current = ground == Ground::front ? front_ : back_;
  if (wanted == current) return;
  current = wanted;
  line_ += fmt::format("\x1b[{}m", wanted);
}

}  // namespace mha::draw::detail
