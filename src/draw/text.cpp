#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <mha/draw.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "label.h"
#include "painter.h"
#include "picture.h"
#include "runtime/enum_check.h"

namespace mha::draw {
namespace {

using detail::Axis;
using detail::Painter;
using detail::Panel;
using detail::Picture;

// A character is about twice as high as wide, so a square cell is two columns wide and one line
// high, a multiple of that, or one column wide and half a line high (a half-block character).
constexpr int64_t kMaxLines = 40;          // of a map
constexpr int64_t kMaxEnlargedLines = 20;  // small maps are enlarged up to this height
constexpr int64_t kMaxCellColumns = 8;
constexpr int64_t kMinWidth = 8;        // narrower terminals wrap
constexpr int64_t kMaxTokenWidth = 16;  // of a query's label
constexpr int64_t kMaxListedKeys = 100;

/// How the maps are set; the same for each, so that their columns stand below each other.
struct Setting {
  int64_t index_width, token_width;  // of the labels on the left
  int64_t size;                      // columns of a cell; at 1 two rows share a line
  int64_t row_step, column_step;     // from one label to the next

  int64_t margin() const {
    return 2 + index_width + (token_width > 0 ? token_width + 1 : 0) + 1;
  }
  int64_t lines_per_row() const { return std::max<int64_t>(size / 2, 1); }
  int64_t rows_per_line() const { return size == 1 ? 2 : 1; }
};

/// Columns of one cell: `smallest`, or larger where a small map would be hard to see.
int64_t cell_columns(const Picture& picture, int64_t width, int64_t smallest) {
  int64_t size = smallest;
  for (int64_t larger = 2; larger <= kMaxCellColumns; larger += 2) {
    const bool fits = larger * picture.keys.cells <= width;
    if (fits && larger / 2 * picture.queries.cells <= kMaxEnlargedLines) {
      size = std::max(size, larger);
    }
  }
  return size;
}

/// Distance of the labels of an axis, in cells: the first of 1, 5, 10, 50, ... that leaves
/// `room` characters for each.
int64_t character_label_step(int64_t room, int64_t characters_per_cell) {
  int64_t step = 1;
  for (int64_t factor = 5; step * characters_per_cell < room; factor = 7 - factor) {
    step *= factor;  // by 5 and 2 in turn
  }
  return step;
}

std::string key_axis(const Axis& keys, const Setting& setting) {
  std::string axis;
  for (int64_t column = 0; column < keys.cells; column += setting.column_step) {
    axis.resize(static_cast<size_t>(column * setting.size), ' ');
    axis += fmt::format("{}", keys.first(column));
  }
  return axis;
}

/// The index and the token of a query, as wide as all others; blank without `shown`.
std::string row_label(const Axis& queries, int64_t row, bool shown, const Setting& setting,
                      bool utf8) {
  if (!shown) return std::string(static_cast<size_t>(setting.margin()), ' ');
  const int64_t index = queries.first(row);
  std::string label = fmt::format("  {:>{}} ", index, setting.index_width);
  if (setting.token_width > 0) {
    const std::string token =
        detail::fitted(queries.labels[static_cast<size_t>(index)], setting.token_width, utf8);
    label += token;
    label.append(static_cast<size_t>(setting.token_width + 1 - detail::columns_of(token)), ' ');
  }
  return label;
}

std::string map_lines(const Picture& picture, const Panel& panel, const Setting& setting,
                      const Terminal& terminal) {
  const int64_t rows = picture.queries.cells;
  // Half a line may be left below the last row.
  const auto position = [&](int64_t row, int64_t column) {
    return row < rows ? picture.position(picture.value(panel, row, column)) : Painter::kBlank;
  };
  std::string lines =
      std::string(static_cast<size_t>(setting.margin()), ' ') + key_axis(picture.keys, setting);
  lines += '\n';
  Painter painter(terminal.colours, picture.colours);
  for (int64_t row = 0; row < rows; row += setting.rows_per_line()) {
    for (int64_t line = 0; line < setting.lines_per_row(); ++line) {
      for (int64_t column = 0; column < picture.keys.cells; ++column) {
        if (setting.rows_per_line() == 1) {
          painter.cell(position(row, column), setting.size);
        } else {
          painter.half_cells(position(row, column), position(row + 1, column));
        }
      }
      const bool shown = line == 0 && row % setting.row_step == 0;
      lines += row_label(picture.queries, row, shown, setting, terminal.utf8);
      lines += painter.take() + '\n';
    }
  }
  return lines;
}

/// "0 <lower half of the colours> the weight in their middle <upper half> the largest".
std::string legend(const Picture& picture, Colours colours) {
  constexpr int steps = 20;
  Painter painter(colours, picture.colours);
  const auto half = [&painter](int begin) {
    for (int i = begin; i < begin + steps / 2; ++i) {
      painter.cell(static_cast<double>(i) / (steps - 1), 1);
    }
    return painter.take();
  };
  const std::string lower = half(0), upper = half(steps / 2);
  const double middle = picture.largest / (picture.scale == Scale::linear ? 2 : 4);
  return fmt::format("0 {} {} {} {}{}", lower, detail::number_text(middle), upper,
                     detail::number_text(picture.largest),
                     picture.has_blank ? "   blank: exactly 0" : "");
}

/// `words` in lines of at most `width` columns where they can be broken, each after `margin`.
std::string paragraph(const std::vector<std::string>& words, int64_t margin, int64_t width) {
  std::string lines, line;
  const auto end_line = [&] {
    if (!line.empty()) lines += std::string(static_cast<size_t>(margin), ' ') + line + '\n';
    line.clear();
  };
  for (const std::string& word : words) {
    if (!line.empty() && detail::columns_of(line) + 1 + detail::columns_of(word) > width) {
      end_line();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  end_line();
  return lines;
}

std::vector<std::string> split_at_spaces(const std::string& text) {
  std::vector<std::string> words;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

/// The tokens of the keys, which have no room above their columns, where the queries' labels do
/// not tell them already.
std::vector<std::string> listed_keys(const Picture& picture, bool utf8) {
  const Axis& keys = picture.keys;
  if (keys.labels.empty() || keys.labels == picture.queries.labels) return {};
  if (keys.is_pooled() || keys.size > kMaxListedKeys) return {};
  std::vector<std::string> words = {"keys:"};
  for (int64_t key = 0; key < keys.size; ++key) {
    words.push_back(
        fmt::format("{} {}{}", key,
                    detail::fitted(keys.labels[static_cast<size_t>(key)], kMaxTokenWidth, utf8),
                    key + 1 < keys.size ? "," : ""));
  }
  return words;
}

int64_t widest_token(const std::vector<std::string>& labels) {
  int64_t width = 0;
  for (const std::string& label : labels) width = std::max(width, detail::columns_of(label));
  return std::min(width, kMaxTokenWidth);
}

}  // namespace

std::string text(const Maps& maps, const Terminal& terminal, const Options& options) {
  mha::detail::check_enum({"terminal.colours"}, terminal.colours, Colours::rgb,
                          "none, palette_256 or rgb");
  TORCH_CHECK(terminal.columns > 0, "terminal.columns: expected a number > 0, found ",
              terminal.columns);
  const detail::Axes whole = detail::axes_of(maps, options);
  const int64_t queries = whole.queries.size, keys = whole.keys.size;
  const auto label_width =
      static_cast<int64_t>(fmt::format("{}", std::max(queries, keys) - 1).size());
  Setting setting{};
  setting.index_width = label_width;
  setting.token_width =
      terminal.columns >= 40 ? widest_token(whole.queries.labels) : 0;  // else no room
  // The last label of the upper axis may stand out beyond its cell.
  const int64_t width =
      std::max(terminal.columns - setting.margin() - label_width + 1, kMinWidth);

  const bool fits = 2 * keys <= width && queries <= kMaxLines;
  const bool half_blocks = terminal.colours != Colours::none && terminal.utf8;
  const int64_t smallest = half_blocks && !fits ? 1 : 2;
  const Picture picture =
      detail::picture_of(maps, options, kMaxLines * 2 / smallest, width / smallest);
  setting.size = cell_columns(picture, width, smallest);
  setting.row_step =
      setting.size == 1
          ? 10
          : character_label_step(picture.queries.cells > 10 ? 5 : 1, setting.lines_per_row());
  setting.column_step =
      std::max(setting.row_step, character_label_step(label_width + 2, setting.size));
  if (setting.token_width > 0) setting.row_step = setting.rows_per_line();

  const auto cut = [&](const std::string& line) {
    return detail::fitted(line, terminal.columns, terminal.utf8) + '\n';
  };
  std::string result;
  if (!picture.title.empty()) result += cut(picture.title) + '\n';
  for (const Panel& panel : picture.panels) {
    if (!panel.name.empty()) result += cut(panel.name);
    result += map_lines(picture, panel, setting, terminal) + '\n';
  }
  const int64_t margin = setting.margin();
  result +=
      std::string(static_cast<size_t>(margin), ' ') + legend(picture, terminal.colours) + '\n';
  const int64_t room = std::max(terminal.columns - margin, kMinWidth);
  result += paragraph(listed_keys(picture, terminal.utf8), margin, room);
  if (picture.is_pooled()) {
    result += paragraph(split_at_spaces(picture.notes().back()), margin, room);
  }
  return result;
}

}  // namespace mha::draw
