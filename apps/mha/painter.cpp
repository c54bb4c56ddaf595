#include "painter.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

namespace mha::cli {
namespace {

struct Rgb {
  int red, green, blue;
};

/// Dark violet to yellow by way of teal: brightness only rises, so the order of two weights can
/// be seen without telling hues apart, and in grey too.
Rgb rgb(double position) {
  constexpr std::array<Rgb, 6> anchors = {{{62, 14, 96},
                                           {64, 68, 150},
                                           {38, 116, 152},
                                           {30, 164, 136},
                                           {122, 208, 84},
                                           {250, 234, 60}}};
  const double scaled = std::clamp(position, 0.0, 1.0) * (anchors.size() - 1);
  const size_t below = std::min(static_cast<size_t>(scaled), anchors.size() - 2);
  const double part = scaled - static_cast<double>(below);
  const auto mix = [part](int a, int b) {
    return static_cast<int>(std::lround(a + part * (b - a)));
  };
  const Rgb &a = anchors[below], &b = anchors[below + 1];
  return {mix(a.red, b.red), mix(a.green, b.green), mix(a.blue, b.blue)};
}

/// The entry of `steps` nearest to `position`.
template <typename Steps>
auto nearest(const Steps& steps, double position) {
  const double last = static_cast<double>(steps.size() - 1);
  return steps[static_cast<size_t>(std::lround(std::clamp(position, 0.0, 1.0) * last))];
}

/// The same ramp in xterm's 6 x 6 x 6 cube; brightness rises at each step here too.
int palette_index(double position) {
  constexpr std::array steps = {53, 54, 55, 25, 31, 36, 72, 77, 113, 149, 185, 227};
  return nearest(steps, position);
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
    const Rgb colour = rgb(position);
    wanted = fmt::format("{}8;2;{};{};{}", digit, colour.red, colour.green, colour.blue);
  } else if (position >= 0) {
    wanted = fmt::format("{}8;5;{}", digit, palette_index(position));
  }
  std::string& current = ground == Ground::front ? front_ : back_;
  if (wanted == current) return;
  current = wanted;
  line_ += fmt::format("\x1b[{}m", wanted);
}

}  // namespace mha::cli
