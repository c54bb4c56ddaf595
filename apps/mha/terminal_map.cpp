#include "terminal_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "painter.h"

namespace mha::cli {
namespace {

// A character is about twice as high as wide, so a square cell is two columns wide and one line
// high, a multiple of that, or one column wide and half a line high (a half-block character).
constexpr int64_t kMaxLines = 40;          // of a picture
constexpr int64_t kMaxEnlargedLines = 20;  // small maps are enlarged up to this height
constexpr int64_t kMaxCellColumns = 8;
constexpr int64_t kMinWidth = 8;  // narrower terminals wrap

/// Weights of a map, pooled by the maximum.
struct Grid {
  int64_t rows = 0, columns = 0;
  int64_t queries_per_row = 1, keys_per_column = 1;
  std::vector<double> values;
  double largest = 0;
  bool has_zero = false;

  /// Place in the colour ramp, by the square root: attention rows hold few large and many small
  /// weights, which a linear ramp would all show alike. Blank also below the last row, where
  /// half a line may be left.
  double position(int64_t row, int64_t column) const {
    if (row >= rows) return Painter::kBlank;
    const double value = values[static_cast<size_t>(row * columns + column)];
    return value > 0 ? std::sqrt(value / largest) : Painter::kBlank;
  }
};

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

Grid pool(const at::Tensor& map, int64_t max_rows, int64_t max_columns) {
  const at::Tensor weights = map.to(at::kDouble).contiguous();
  const int64_t queries = map.size(0), keys = map.size(1);
  Grid grid;
  grid.queries_per_row = std::max<int64_t>(1, divide_up(queries, max_rows));
  grid.keys_per_column = std::max<int64_t>(1, divide_up(keys, max_columns));
  grid.rows = divide_up(queries, grid.queries_per_row);
  grid.columns = divide_up(keys, grid.keys_per_column);
  grid.values.assign(static_cast<size_t>(grid.rows * grid.columns), 0.0);
  const double* weight = weights.data_ptr<double>();
  for (int64_t i = 0; i < queries; ++i) {
    for (int64_t j = 0; j < keys; ++j, ++weight) {
      const int64_t cell = i / grid.queries_per_row * grid.columns + j / grid.keys_per_column;
      double& value = grid.values[static_cast<size_t>(cell)];
      value = std::max(value, *weight);
    }
  }
  for (const double value : grid.values) {
    grid.largest = std::max(grid.largest, value);
    grid.has_zero = grid.has_zero || value == 0;
  }
  return grid;
}

/// Columns of one cell: `smallest`, or larger where a small map would be hard to see.
int64_t cell_columns(const Grid& grid, int64_t width, int64_t smallest) {
  int64_t size = smallest;
  for (int64_t larger = 2; larger <= kMaxCellColumns; larger += 2) {
    const bool fits = larger * grid.columns <= width;
    if (fits && larger / 2 * grid.rows <= kMaxEnlargedLines) size = std::max(size, larger);
  }
  return size;
}

/// Distance of the labels of an axis, in cells: the first of 1, 5, 10, 50, ... that leaves
/// `room` characters for each.
int64_t label_step(int64_t room, int64_t characters_per_cell) {
  int64_t step = 1;
  for (int64_t factor = 5; step * characters_per_cell < room; factor = 7 - factor) {
    step *= factor;  // by 5 and 2 in turn
  }
  return step;
}

std::string key_axis(const Grid& grid, int64_t size, int64_t step) {
  std::string axis;
  for (int64_t column = 0; column < grid.columns; column += step) {
    axis.resize(static_cast<size_t>(column * size), ' ');
    axis += fmt::format("{}", column * grid.keys_per_column);
  }
  return axis;
}

/// "0 <lower half of the ramp> a quarter of the largest <upper half> the largest".
std::string legend(const Grid& grid, Colours colours) {
  constexpr int steps = 20;
  Painter painter(colours);
  const auto half = [&painter](int begin) {
    for (int i = begin; i < begin + steps / 2; ++i) {
      painter.cell(static_cast<double>(i) / (steps - 1), 1);
    }
    return painter.take();
  };
  const std::string lower = half(0), upper = half(steps / 2);
  return fmt::format("0 {} {:.3g} {} {:.3g}{}", lower, grid.largest / 4, upper, grid.largest,
                     grid.has_zero ? "   blank: exactly 0" : "");
}

}  // namespace

std::string draw_map(const at::Tensor& map, const Terminal& terminal) {
  const int64_t queries = map.size(0), keys = map.size(1);
  const std::string last_index =
      fmt::format("{}", std::max<int64_t>({queries - 1, keys - 1, 0}));
  const auto label_width = static_cast<int64_t>(last_index.size());
  const std::string margin(static_cast<size_t>(2 + label_width + 1), ' ');
  // The last label of the upper axis may stand out beyond its cell.
  const int64_t width = std::max(
      terminal.columns - static_cast<int64_t>(margin.size()) - label_width + 1, kMinWidth);

  const bool fits = 2 * keys <= width && queries <= kMaxLines;
  const bool half_blocks = terminal.colours != Colours::none && terminal.utf8;
  const int64_t smallest = half_blocks && !fits ? 1 : 2;
  const Grid grid = pool(map, kMaxLines * 2 / smallest, width / smallest);
  const int64_t size = cell_columns(grid, width, smallest);
  const int64_t lines_per_row = std::max<int64_t>(size / 2, 1);
  const int64_t rows_per_line = size == 1 ? 2 : 1;
  const int64_t row_step = size == 1 ? 10 : label_step(grid.rows > 10 ? 5 : 1, lines_per_row);
  const int64_t column_step = std::max(row_step, label_step(label_width + 2, size));

  std::string picture = margin + key_axis(grid, size, column_step) + '\n';
  Painter painter(terminal.colours);
  for (int64_t row = 0; row < grid.rows; row += rows_per_line) {
    for (int64_t line = 0; line < lines_per_row; ++line) {
      for (int64_t column = 0; column < grid.columns; ++column) {
        if (rows_per_line == 1) {
          painter.cell(grid.position(row, column), size);
        } else {
          painter.half_cells(grid.position(row, column), grid.position(row + 1, column));
        }
      }
      const bool labelled = line == 0 && row % row_step == 0;
      const std::string label =
          labelled ? fmt::format("{}", row * grid.queries_per_row) : std::string();
      picture += fmt::format("  {:>{}} {}\n", label, label_width, painter.take());
    }
  }
  picture += fmt::format("\n{}{}\n", margin, legend(grid, terminal.colours));
  if (grid.queries_per_row > 1 || grid.keys_per_column > 1) {
    picture += fmt::format("{}pooled: a cell is the largest weight of {} queries x {} keys\n",
                           margin, grid.queries_per_row, grid.keys_per_column);
  }
  return picture;
}

}  // namespace mha::cli
