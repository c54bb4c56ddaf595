#include "stroke_font.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>
#include <string>

#include "label.h"

namespace mha::draw::detail {
namespace {

constexpr double kSideBearing = 1.6;  // on either side of a glyph

/// A glyph: its width without the room on either side, and a path of commands, each a letter
/// and its points. M moves, L draws a line, Q a quadratic curve by its control point; h and v
/// draw a quarter of an ellipse that leaves horizontally or vertically.
struct Glyph {
  double width;
  const char* path;
};

// Space to tilde.
constexpr std::array<Glyph, 95> kAscii = {{
    {3.5, ""},
    {0, "M0 14L0 4.6M0 .1L0 .4"},
    {3, "M0 14L0 10M3 14L3 10"},
    {9.6, "M2 0L4 14M6 0L8 14M.4 9.6L9.6 9.6M0 4.4L9.2 4.4"},
    {8, "M7.6 11.2v4 14h.4 10.6v4 7.3h8 3.6v4 0h0 3M4 16L4 -2"},
    {12, "M10.5 14L1.5 0M2.6 14h5.2 11v2.6 8h0 11v2.6 14M9.4 6h12 3v9.4 0h6.8 3v9.4 6"},
    {10,
     "M9.8 0L2.5 9.2Q1.6 10.4 1.6 11.4v4 14h6.6 11.4Q6.6 9.4 4 8Q0 6 0 3.4v3.8 0"
     "Q8 0 9.4 6.4"},
    {0, "M0 14L0 10"},
    {3.2, "M3.2 15.6Q0 11.5 0 6.2Q0 .8 3.2 -3.4"},
    {3.2, "M0 15.6Q3.2 11.5 3.2 6.2Q3.2 .8 0 -3.4"},
    {6, "M3 14L3 8M.4 12.5L5.6 9.5M5.6 12.5L.4 9.5"},
    {8, "M4 10L4 2M0 6L8 6"},
    {1, "M.9 .4L0 -2.8"},
    {5, "M0 5.4L5 5.4"},
    {0, "M0 .1L0 .4"},
    {6, "M0 -2L6 15"},
    {8, "M4 14h8 7v4 0h0 7v4 14"},
    {8, "M1.4 11.2L4.8 14L4.8 0"},
    {8, "M.3 10.4v3.9 14h7.6 10.4Q7.6 8.2 5.6 6L.2 0L8 0"},
    {8, "M.6 11.4v3.9 14h7.4 10.7v4 7.5L3 7.5M4 7.5h8 3.8v4 0h0 3"},
    {8, "M6.2 0L6.2 14L0 4.2L8.2 4.2"},
    {8, "M7.3 14L1.3 14L.8 7.6Q2 8.8 4 8.8h8 4.4v4 0h0 2.8"},
    {8, "M6.6 13.6Q0 11.4 0 4.6v4 0h8 4.4v4 8.8h0 4.4"},
    {8, "M0 14L8 14L2.8 0"},
    {8, "M4 14h7.5 10.7v4 7.4h.5 10.7v4 14M4 7.4h8 3.7v4 0h0 3.7v4 7.4"},
    {8, "M1.4 .4Q8 2.6 8 9.4v4 14h0 9.6v4 5.2h8 9.6"},
    {0, "M0 7.6L0 7.9M0 .1L0 .4"},
    {1, "M.9 7.6L.9 7.9M.9 .4L0 -2.8"},
    {7, "M7 10.5L0 6L7 1.5"},
    {8, "M0 8L8 8M0 4L8 4"},
    {7, "M0 10.5L7 6L0 1.5"},
    {6.6, "M0 10.8v3.3 14h6.6 10.8Q6.6 8.9 4.8 7.6Q3.3 6.4 3.3 4.6M3.3 .1L3.3 .4"},
    {13,
     "M6.6 9.4h9.2 6.4v6.6 3.4h4 6.4v6.6 9.4M9.2 9.4L9.2 5.2Q9.2 3.4 10.8 3.4h13 7v6.6 "
     "14h0 5.6v6.6 -2.6Q9 -2.6 10.6 -1.6"},
    {10, "M0 0L5 14L10 0M1.8 5L8.2 5"},
    {8.2, "M0 0L0 14L4.4 14h7.6 10.7v4.4 7.4L0 7.4M4.4 7.4h8.4 3.7v4.4 0L0 0"},
    {9.4, "M9.4 10.8v5.4 14h0 7v5.4 0h9.4 3.2"},
    {9.5, "M0 0L0 14L4 14h9.5 7v4 0L0 0"},
    {7.4, "M7.4 14L0 14L0 0L7.4 0M0 7.3L6.6 7.3"},
    {7, "M7.2 14L0 14L0 0M0 7L6.2 7"},
    {10, "M9.4 11v5.4 14h0 7v5.4 0h10 4L10 6.6L6 6.6"},
    {9, "M0 0L0 14M9 0L9 14M0 7.3L9 7.3"},
    {0, "M0 0L0 14"},
    {6, "M6 14L6 4v3 0h0 3"},
    {8.5, "M0 0L0 14M8.2 14L0 5.4M3 8.5L8.6 0"},
    {7, "M0 14L0 0L7 0"},
    {11, "M0 0L0 14L5.5 4L11 14L11 0"},
    {9, "M0 0L0 14L9 0L9 14"},
    {11, "M5.5 14h11 7v5.5 0h0 7v5.5 14"},
    {8, "M0 0L0 14L4.4 14h8 10.2v4.4 6.4L0 6.4"},
    {11, "M5.5 14h11 7v5.5 0h0 7v5.5 14M7 3.6L11 -1"},
    {8.5, "M0 0L0 14L4.4 14h8 10.4v4.4 6.8L0 6.8M4.4 6.8L8.6 0"},
    {8, "M7.6 11.2v4 14h.4 10.6v4 7.3h8 3.6v4 0h0 3"},
    {9, "M0 14L9 14M4.5 14L4.5 0"},
    {9, "M0 14L0 4.5v4.5 0h9 4.5L9 14"},
    {10, "M0 14L5 0L10 14"},
    {14, "M0 14L3.5 0L7 12.4L10.5 0L14 14"},
    {9, "M0 14L9 0M9 14L0 0"},
    {9, "M0 14L4.5 6.5L9 14M4.5 6.5L4.5 0"},
    {8.6, "M.2 14L8.4 14L0 0L8.7 0"},
    {3, "M3 15.6L0 15.6L0 -3.2L3 -3.2"},
    {6, "M0 15L6 -2"},
    {3, "M0 15.6L3 15.6L3 -3.2L0 -3.2"},
    {6, "M0 9.4L3 14L6 9.4"},
    {8, "M0 -2L8 -2"},
    {2, "M0 14L2 11.4"},
    {7, "M.7 8v3.6 10h7 6.6L7 0M7 5.8L3.1 5.8h0 2.9v2.9 0h7 3.4"},
    {8, "M0 14L0 0M0 5v4 10h8 5v4 0h0 5"},
    {7.2, "M7.2 7.8v4.2 10h0 5v4.2 0h7.2 2.2"},
    {8, "M8 14L8 0M8 5v4 10h0 5v4 0h8 5"},
    {8, "M0 5.2L8 5.2v4 10h0 5v4.2 0h7.6 2.2"},
    {5, "M5.2 14L4.8 14h2 11.2L2 0M0 9.6L4.9 9.6"},
    {8, "M8 10L8 -.6v4 -4.4h.6 -2.2M8 5v4 10h0 5v4 0h8 5"},
    {7.4, "M0 14L0 0M0 5.8v3.9 10h7.4 6.4L7.4 0"},
    {0, "M0 10L0 0M0 13.5L0 13.8"},
    {2.5, "M2.5 10L2.5 -1.6v0 -4.4M2.5 13.5L2.5 13.8"},
    {7, "M0 14L0 0M6.8 10L0 3.8M2.6 6.2L7.2 0"},
    {2, "M0 14L0 2.4v2 0"},
    {12, "M0 10L0 0M0 6v3.2 10h6 6.6L6 0M6 6v9.2 10h12 6.6L12 0"},
    {7.4, "M0 10L0 0M0 5.8v3.9 10h7.4 6.4L7.4 0"},
    {8, "M4 10h8 5v4 0h0 5v4 10"},
    {8, "M0 10L0 -4.4M0 5v4 10h8 5v4 0h0 5"},
    {8, "M8 10L8 -4.4M8 5v4 10h0 5v4 0h8 5"},
    {4.6, "M0 10L0 0M0 5.8v4 10L4.8 10"},
    {6.4, "M6 8v3.2 10h.4 7.6v3.2 5.2h6.4 2.6v3.2 0h0 2.2"},
    {5, "M2 13.4L2 2.6v4.4 0L5 0M0 9.8L4.8 9.8"},
    {7.4, "M0 10L0 3.6v3.6 0h7.4 4.2M7.4 10L7.4 0"},
    {8, "M0 10L4 0L8 10"},
    {11.6, "M0 10L3 0L5.8 9L8.6 0L11.6 10"},
    {7.4, "M0 10L7.4 0M7.4 10L0 0"},
    {8, "M0 10L4 0M8 10L2.3 -4.3"},
    {7, "M.2 10L6.8 10L0 0L7 0"},
    {4, "M4 15.6Q1.8 15.6 1.8 13L1.8 9Q1.8 6.2 0 6.2Q1.8 6.2 1.8 3.4L1.8 -.6Q1.8 -3.2 4 -3.2"},
    {0, "M0 16L0 -4"},
    {4, "M0 15.6Q2.2 15.6 2.2 13L2.2 9Q2.2 6.2 4 6.2Q2.2 6.2 2.2 3.4L2.2 -.6Q2.2 -3.2 0 -3.2"},
    {8, "M0 5Q2 7.6 4 6Q6 4.4 8 7"},
}};

constexpr Glyph kBox = {7, "M0 0L0 12L7 12L7 0L0 0"};

const std::map<char32_t, Glyph>& other_glyphs() {
  static const std::map<char32_t, Glyph> glyphs = {
      {U'\u00B7', {0, "M0 5.8L0 6.1"}},
      {U'\u00D7', {7, "M0 9.5L7 2.5M7 9.5L0 2.5"}},
      {U'\u00DF', {7.4, "M0 0L0 10.6v3.4 14h6.6 10.8v4 7.8h7.4 3.8v3.6 0L2.6 0"}},
      {U'\u00D8', {11, "M5.5 14h11 7v5.5 0h0 7v5.5 14M0 -1L11 15"}},
      {U'\u00F8', {8, "M4 10h8 5v4 0h0 5v4 10M0 -1L8 11"}},
      {U'\u00C6', {14, "M0 0L6.6 14L14 14M7.6 14L7.6 0L14 0M7.6 7.3L13 7.3M2.4 5L7.6 5"}},
      {U'\u00E6',
       {13,
        "M.7 8v3.4 10h6.4 6.6L6.4 0M6.4 5.2L3 5.2h0 2.6v2.8 0h6.4 3M6.4 5.2"
        "L13 5.2v9.6 10h6.4 6"
        "M6.4 4v9.8 0h12.6 2.2"}},
      {U'\u0131', {0, "M0 10L0 0"}},
      {U'\u0141', {7, "M0 14L0 0L7 0M-1.6 5.6L4 9"}},
      {U'\u0142', {2, "M0 14L0 2.4v2 0M-2 6L2.2 9"}},
      {U'\u2013', {8, "M0 5.4L8 5.4"}},
      {U'\u2014', {12, "M0 5.4L12 5.4"}},
      {U'\u2018', {1, "M1 14L0 10.6"}},
      {U'\u2019', {1, "M1 14L0 10.6"}},
      {U'\u201C', {4, "M1 14L0 10.6M4 14L3 10.6"}},
      {U'\u201D', {4, "M1 14L0 10.6M4 14L3 10.6"}},
      {U'\u2026', {9, "M0 .1L0 .4M4.5 .1L4.5 .4M9 .1L9 .4"}},
      {U'\u2192', {11, "M0 5.4L11 5.4M7.4 9L11 5.4L7.4 1.8"}},
      {U'\u2423', {8, "M0 2L0 -1.6L8 -1.6L8 2"}},
      {U'\u2581', {8, "M0 -1.6L8 -1.6L8 -2.8L0 -2.8L0 -1.6"}},
  };
  return glyphs;
}

// What the letters from U+00C0 and U+0100 on are made of: a letter and a mark, '.' for those
// that are not.
constexpr std::string_view kLatin1Letters =
    "AAAAAA.CEEEEIIII.NOOOOO..UUUUY..aaaaaa.ceeeeiiii.nooooo..uuuuy.y";
constexpr std::string_view kLatin1Marks =
    "`'^~\"o.,`'^\"`'^\".~`'^~\"..`'^\"'..`'^~\"o.,`'^\"`'^\".~`'^~\"..`'^\"'.\"";
constexpr std::string_view kExtendedLetters =
    "AaAaAaCcCcCcCcDd..EeEeEeEeEeGgGgGgGgHh..IiIiIiIiI...Jj"
    "Kk.LlLlLl....NnNnNn...OoOoOo..RrRrRrSsSsSsSsTtTt..UuUuUuUuUuUuWwYyYZzZzZz.";
constexpr std::string_view kExtendedMarks =
    "--uu;;''^^**vvvv..--uu**;;vv^^uu**,,^^..~~--uu;;*...^^"
    ",,.'',,vv....'',,vv...--uu==..'',,vv''^^,,vv,,vv..~~--uuoo==;;^^^^\"''**vv.";

/// Around x = 0; at the height of small letters, the bottom marks at the baseline.
const char* mark_path(char mark) {
  switch (mark) {
    case '`':
      return "M-1.6 14L1 11.6";
    case '\'':
      return "M1.6 14L-1 11.6";
    case '^':
      return "M-2.4 11.6L0 14L2.4 11.6";
    case 'v':
      return "M-2.4 14L0 11.6L2.4 14";
    case '~':
      return "M-2.8 12.2Q-1.4 14.4 0 13Q1.4 11.8 2.8 13.6";
    case '"':
      return "M-1.9 12.8L-1.9 13.1M1.9 12.8L1.9 13.1";
    case '*':
      return "M0 12.9L0 13.2";
    case '-':
      return "M-2.6 12.8L2.6 12.8";
    case 'u':
      return "M-2.4 13.8v0 11.6h2.4 13.8";
    case 'o':
      return "M0 14.6h1.6 13v0 11.4h-1.6 13v0 14.6";
    case '=':
      return "M-.4 14L-2 11.6M2.4 14L.8 11.6";
    case ',':
      return "M.2 0L-1 -3.4";
    case ';':
      return "M.6 0v-.6 -2.2h1.4 -3.4";
    default:
      return "";
  }
}

class PathReader {
 public:
  explicit PathReader(std::string_view path) : rest_(path) {}

  /// The strokes with curves cut into lines, moved by the given distance.
  std::vector<Polyline> strokes(Point by) {
    std::vector<Polyline> result;
    while (!rest_.empty()) {
      const char command = rest_.front();
      rest_.remove_prefix(1);
      const Point first = point(by);
      if (command == 'M') {
        result.push_back({first});
        continue;
      }
      Polyline& stroke = result.back();
      const Point from = stroke.back();
      if (command == 'L') {
        stroke.push_back(first);
      } else if (command == 'Q') {
        const Point to = point(by);
        curve(stroke, [&](double t) {
          const double a = (1 - t) * (1 - t), b = 2 * t * (1 - t), c = t * t;
          return Point{a * from.x + b * first.x + c * to.x,
                       a * from.y + b * first.y + c * to.y};
        });
      } else {
        const bool horizontal = command == 'h';
        curve(stroke, [&](double t) {
          const double fast = std::sin(t * kQuarter), slow = 1 - std::cos(t * kQuarter);
          return Point{from.x + (first.x - from.x) * (horizontal ? fast : slow),
                       from.y + (first.y - from.y) * (horizontal ? slow : fast)};
        });
      }
    }
    return result;
  }

 private:
  static constexpr double kQuarter = 1.57079632679489662;

  template <typename At>
  static void curve(Polyline& stroke, At at) {
    constexpr int kPieces = 8;
    for (int i = 1; i <= kPieces; ++i) stroke.push_back(at(static_cast<double>(i) / kPieces));
  }

  double number() {
    while (!rest_.empty() && rest_.front() == ' ') rest_.remove_prefix(1);
    double value = 0;
    const auto end = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value).ptr;
    rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
    return value;
  }
  Point point(Point by) {
    const double x = number();
    return {x + by.x, number() + by.y};
  }

  std::string_view rest_;
};

struct Parts {
  Glyph glyph;
  char mark = '.';  // '.': none
  bool capital = false;
};

std::optional<Parts> accented(char32_t character) {
  const bool latin1 = character >= 0xC0 && character <= 0xFF;
  if (!latin1 && (character < 0x100 || character > 0x17F)) return std::nullopt;
  const size_t index = character - (latin1 ? 0xC0 : 0x100);
  const char letter = (latin1 ? kLatin1Letters : kExtendedLetters)[index];
  if (letter == '.') return std::nullopt;
  const char mark = (latin1 ? kLatin1Marks : kExtendedMarks)[index];
  const bool dotted = (letter == 'i' || letter == 'j') && mark != ',' && mark != ';';
  Glyph glyph = kAscii[static_cast<size_t>(letter - ' ')];
  if (dotted) glyph.path = letter == 'i' ? "M0 10L0 0" : "M2.5 10L2.5 -1.6v0 -4.4";
  return Parts{glyph, mark, letter >= 'A' && letter <= 'Z'};
}

Parts parts_of(char32_t character) {
  if (character >= ' ' && character <= '~') return {kAscii[character - ' ']};
  if (character == 0xA0) return {kAscii[0]};
  const auto& others = other_glyphs();
  if (const auto found = others.find(character); found != others.end()) return {found->second};
  return accented(character).value_or(Parts{kBox});
}

double advance(const Glyph& glyph) {
  return glyph.width + 2 * kSideBearing;
}

}  // namespace

double text_width(std::string_view text, double size) {
  double width = 0;
  for (const char32_t character : decoded(text)) width += advance(parts_of(character).glyph);
  return width * size / kEm;
}

std::vector<Polyline> text_strokes(std::string_view text, double size) {
  std::vector<Polyline> strokes;
  double x = kSideBearing;
  const auto add = [&strokes](const char* path, Point by) {
    for (Polyline& stroke : PathReader(path).strokes(by)) strokes.push_back(std::move(stroke));
  };
  for (const char32_t character : decoded(text)) {
    const Parts parts = parts_of(character);
    add(parts.glyph.path, {x, 0});
    const bool below = parts.mark == ',' || parts.mark == ';';
    // Marks over capitals sit a little closer than the difference of the heights.
    add(mark_path(parts.mark),
        {x + parts.glyph.width / 2, parts.capital && !below ? kCapitalHeight - 10.4 : 0});
    x += advance(parts.glyph);
  }
  for (Polyline& stroke : strokes) {
    for (Point& point : stroke) point = {point.x * size / kEm, point.y * size / kEm};
  }
  return strokes;
}

}  // namespace mha::draw::detail
