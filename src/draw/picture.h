#pragma once

#include <mha/draw.h>

#include <cstdint>
#include <string>
#include <vector>

namespace mha::draw::detail {

/// The queries or the keys of a picture.
struct Axis {
  int64_t size = 0;                 ///< queries or keys
  int64_t cells = 0;                ///< that they are pooled into, as evenly as may be
  std::vector<std::string> labels;  ///< printable, `size` of them; empty: indices

  bool is_pooled() const { return cells < size; }
  /// The first query or key in a cell; of the cell after the last, `size`.
  int64_t first(int64_t cell) const { return cell * size / cells; }
  /// The token of a cell, where every cell shows its own; else the index of its first.
  std::string label(int64_t cell, bool every_one_shown) const;
};

struct Axes {
  Axis queries, keys;
};

struct Panel {
  std::string name;           ///< printable
  std::vector<float> values;  ///< row after row, -1 in blank cells
};

/// Everything that is shown, checked, pooled and made printable, for any format.
struct Picture {
  static constexpr float kBlank = -1;

  std::string title;
  Axis queries, keys;
  std::vector<Panel> panels;
  double largest = 0;  ///< the weight at the end of the colour map, > 0
  bool is_clipped = false, is_causal = false, has_blank = false;
  Scale scale = Scale::square_root;
  ColourMap colours = ColourMap::dusk;

  bool is_pooled() const { return queries.is_pooled() || keys.is_pooled(); }
  float value(const Panel& panel, int64_t row, int64_t column) const {
    return panel.values[static_cast<size_t>(row * keys.cells + column)];
  }
  /// Place in the colour map, from 0 to 1; below 0 for a blank.
  double position(double value) const;
  /// Sentences that tell what cells and blanks mean.
  std::vector<std::string> notes() const;
};

/// Throws `c10::Error` for what `Maps` and `Options` do not allow. `most_cells`: a longer axis
/// is pooled.
Picture picture_of(const Maps& maps, const Options& options, int64_t most_rows,
                   int64_t most_columns);

/// The axes of a picture that pools nothing; forms none of its cells.
Axes axes_of(const Maps& maps, const Options& options);

/// Heads of `maps`, 1 for (L, S); what is no map at all throws.
int64_t heads_of(const Maps& maps);

/// A weight with three digits, as short as possible.
std::string number_text(double number);

/// Values from 0 to the largest that can stand at the colour bar, at least `gap` of the bar's
/// length apart; the first is 0, the last the largest.
std::vector<double> bar_ticks(const Picture& picture, double gap);

}  // namespace mha::draw::detail
