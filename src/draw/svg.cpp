#include <fmt/format.h>
#include <mha/draw.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <string>

#include "colour_map.h"
#include "label.h"
#include "picture.h"
#include "scene.h"

namespace mha::draw {
namespace {

using detail::Box;
using detail::Label;
using detail::Picture;
using detail::Scene;

constexpr const char* kStyle =
    "<style>\n"
    "svg { --paper: #fff; --strong: #1c1e24; --muted: #545a66; --line: #bec2ca }\n"
    "@media (prefers-color-scheme: dark) {\n"
    "  svg { --paper: #14161b; --strong: #eceef2; --muted: #a9b0bd; --line: #454b57 }\n"
    "}\n"
    "text { font-family: system-ui, \"Helvetica Neue\", Arial, sans-serif; "
    "white-space: pre; fill: #545a66; fill: var(--muted) }\n"
    ".strong { fill: #1c1e24; fill: var(--strong) }\n"
    ".paper { fill: #fff; fill: var(--paper) }\n"
    ".line { fill: none; stroke: #bec2ca; stroke: var(--line) }\n"
    "</style>\n";

std::string hex(detail::Rgb colour) {
  return fmt::format("#{:02x}{:02x}{:02x}", colour.red, colour.green, colour.blue);
}

/// Up to two decimals, none where there are none.
std::string short_number(double number) {
  return fmt::format("{:g}", std::round(number * 100) / 100);
}

std::string text_element(const Label& label) {
  const char* anchor = label.anchor == detail::Anchor::start    ? ""
                       : label.anchor == detail::Anchor::middle ? " text-anchor=\"middle\""
                                                                : " text-anchor=\"end\"";
  const std::string x = short_number(label.at.x), y = short_number(label.at.y);
  std::string turn;
  if (label.angle != 0)
    turn = fmt::format(" transform=\"rotate({} {} {})\"", label.angle, x, y);
  return fmt::format("<text x=\"{}\" y=\"{}\" font-size=\"{}\"{}{}{}{}>{}</text>\n", x, y,
                     label.size, anchor, turn,
                     label.ink == detail::Ink::strong ? " class=\"strong\"" : "",
                     label.bold ? " font-weight=\"600\"" : "", detail::xml_escaped(label.text));
}

std::string outline(const Box& box) {
  return fmt::format("<rect class=\"line\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>\n",
                     short_number(box.x - 0.5), short_number(box.y - 0.5),
                     short_number(box.width + 1), short_number(box.height + 1));
}

/// One path a colour, with neighbours of one colour in a row as one rectangle: a fraction of
/// what a rectangle a cell would take.
std::string cells(const Picture& picture, const Scene& scene, size_t index) {
  std::array<std::string, detail::kColours> paths;
  const auto colour_of = [&](int64_t row, int64_t column) {
    const double position = picture.position(picture.value(picture.panels[index], row, column));
    return position < 0 ? -1 : static_cast<int>(std::lround(position * (detail::kColours - 1)));
  };
  for (int64_t row = 0; row < picture.queries.cells; ++row) {
    for (int64_t column = 0; column < picture.keys.cells;) {
      const int colour = colour_of(row, column);
      int64_t end = column + 1;
      while (end < picture.keys.cells && colour_of(row, end) == colour) ++end;
      if (colour >= 0) {
        const double width = static_cast<double>(end - column) * scene.cell_width;
        fmt::format_to(std::back_inserter(paths[static_cast<size_t>(colour)]),
                       "M{} {}h{}v{}h-{}z", static_cast<double>(column) * scene.cell_width,
                       static_cast<double>(row) * scene.cell_height, width, scene.cell_height,
                       width);
      }
      column = end;
    }
  }
  const Box& box = scene.panels[index];
  std::string group = fmt::format(
      "<g class=\"map\" shape-rendering=\"crispEdges\" transform=\"translate({} {})\">", box.x,
      box.y);
  const auto& table = detail::colour_table(picture.colours);
  for (size_t colour = 0; colour < paths.size(); ++colour) {
    if (paths[colour].empty()) continue;
    group += fmt::format("\n<path fill=\"{}\" d=\"{}\"/>", hex(table[colour]), paths[colour]);
  }
  return group + "\n</g>\n";
}

std::string bar(const Picture& picture, const Scene& scene) {
  constexpr int kStops = 32;
  const Box& box = scene.bar;
  std::string result = "<linearGradient id=\"bar\" x1=\"0\" y1=\"1\" x2=\"0\" y2=\"0\">\n";
  for (int i = 0; i <= kStops; ++i) {
    const double position = static_cast<double>(i) / kStops;
    result += fmt::format("<stop offset=\"{}\" stop-color=\"{}\"/>\n", position,
                          hex(detail::colour_at(picture.colours, position)));
  }
  result += "</linearGradient>\n" + outline(box);
  result +=
      fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"url(#bar)\"/>\n",
                  box.x, box.y, box.width, box.height);
  for (const double y : scene.tick_heights) {
    result += fmt::format("<path class=\"line\" d=\"M{} {}h4\"/>\n", box.x + box.width,
                          short_number(y));
  }
  return result;
}

}  // namespace

std::string svg(const Maps& maps, const Options& options) {
  // Documents of more cells than this are slow to show.
  constexpr double kMostCells = 200000;
  const int64_t heads = detail::heads_of(maps);
  const auto bound = static_cast<int64_t>(
      std::sqrt(kMostCells / static_cast<double>(std::max<int64_t>(heads, 1))));
  const int64_t most = std::min(detail::most_cells(heads), bound);
  const Picture picture = detail::picture_of(maps, options, most, most);
  const Scene scene = detail::scene_of(picture);

  std::string document = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" "
      "viewBox=\"0 0 {0} {1}\" role=\"img\">\n",
      scene.width, scene.height);
  document += fmt::format(
      "<title>{}</title>\n{}",
      detail::xml_escaped(picture.title.empty() ? "Attention weights" : picture.title), kStyle);
  document += "<rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n";
  for (size_t i = 0; i < picture.panels.size(); ++i) {
    document += outline(scene.panels[i]) + cells(picture, scene, i);
  }
  document += bar(picture, scene);
  for (const Label& label : scene.labels) document += text_element(label);
  return document + "</svg>\n";
}

}  // namespace mha::draw
