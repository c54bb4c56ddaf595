#pragma once

#include <string_view>
#include <vector>

namespace mha::draw::detail {

struct Point {
  double x, y;
};

using Polyline = std::vector<Point>;

/// A font of strokes, drawn for this library: no font file is needed and every machine gives
/// the same pixels. It knows ASCII, the accented letters of U+00C0 to U+017F and a few signs of
/// tokenizers; anything else is a box.
///
/// One em is 20 units; the baseline is at 0, capitals reach 14, small letters 10, tails -4.4.
constexpr double kEm = 20;
constexpr double kCapitalHeight = 14;

/// Width of `text` (printable UTF-8) set at `size` points an em.
double text_width(std::string_view text, double size);

/// The strokes of `text` in points, from the origin to the right, y upwards.
std::vector<Polyline> text_strokes(std::string_view text, double size);

}  // namespace mha::draw::detail
