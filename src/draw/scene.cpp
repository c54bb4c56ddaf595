#include "scene.h"

#include <algorithm>
#include <cmath>

#include "label.h"

namespace mha::draw::detail {
namespace {

constexpr double kMargin = 24;
constexpr double kTitleSize = 16, kTextSize = 11, kSmallSize = 9.5;
constexpr double kLargestPanel = 560, kLargestGrid = 1120;
constexpr double kLargestCell = 28;
constexpr int64_t kMostWords = 90, kMostWordsInGrid = 48;  // that may enlarge a panel
constexpr double kThinnestPanel = 56;  // a map of one query is a strip, not a line
constexpr double kNarrowest = 300;     // of the picture, for its title and notes
constexpr double kBarWidth = 12;

/// Columns of the grid: nearly a square, with few places left empty.
int64_t grid_columns(int64_t panels) {
  const auto side = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(panels))));
  const auto empty = [panels](int64_t columns) {
    return (panels + columns - 1) / columns * columns - panels;
  };
  int64_t best = side;
  for (int64_t columns = side + 1; columns <= std::min(side + 2, panels); ++columns) {
    if (empty(columns) < empty(best)) best = columns;
  }
  return best;
}

double panel_size(int64_t panels) {
  if (panels == 1) return kLargestPanel;
  return std::clamp(kLargestGrid / static_cast<double>(grid_columns(panels)), 140.0, 320.0);
}

/// Side of a cell, whole points so that all cells are alike.
double cell_size(int64_t cells, int64_t longer_axis, double panel) {
  const double square =
      std::clamp(std::floor(panel / static_cast<double>(longer_axis)), 1.0, kLargestCell);
  const double thick = std::floor(kThinnestPanel / static_cast<double>(cells));
  return std::max(square, std::min(thick, kLargestCell));
}

std::string cut(const std::string& text, double size, double width) {
  if (text_width(text, size) <= width) return text;
  std::u32string characters = decoded(text);
  do {
    characters.pop_back();
  } while (!characters.empty() && text_width(encoded(characters) + "\u2026", size) > width);
  return encoded(characters) + "\u2026";
}

std::vector<std::string> wrapped(const std::string& text, double size, double width) {
  std::vector<std::string> lines;
  std::string line;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    const std::string longer = line.empty() ? word : line + ' ' + word;
    if (!line.empty() && text_width(longer, size) > width) {
      lines.push_back(cut(line, size, width));
      line = word;
    } else {
      line = longer;
    }
    begin = end + 1;
  }
  if (!line.empty()) lines.push_back(cut(line, size, width));
  return lines;
}

/// Distance of labels in cells: the first of 1, 2, 5, 10, 20, ... that leaves `room` for each.
int64_t label_step(double cell, double room) {
  for (int64_t decade = 1;; decade *= 10) {
    for (const int64_t step : {decade, 2 * decade, 5 * decade}) {
      if (static_cast<double>(step) * cell >= room) return step;
    }
  }
}

struct AxisLabels {
  int64_t step = 1;
  double angle = 0;    // of the key labels
  double extent = 0;   // the room that they take across the axis
  double longest = 0;  // the widest text
};

std::string label_text(const Axis& axis, int64_t cell, int64_t step, double size) {
  constexpr double kLongest = 110;
  return cut(axis.label(cell, step == 1), size, kLongest);
}

double widest(const Axis& axis, int64_t step, double size) {
  double width = 0;
  for (int64_t cell = 0; cell < axis.cells; cell += step) {
    width = std::max(width, text_width(label_text(axis, cell, step, size), size));
  }
  return width;
}

AxisLabels query_labels(const Axis& axis, double cell, double size) {
  AxisLabels labels;
  labels.step = label_step(cell, size * 1.05);
  labels.longest = labels.extent = widest(axis, labels.step, size);
  return labels;
}

/// Words level where they fit, else slanted, else upright: as readable as there is room. Where
/// even so not each has room, indices.
AxisLabels key_labels(const Axis& axis, double cell, double size) {
  const double slanted_room = size * 1.5, upright_room = size * 1.05;
  AxisLabels labels;
  labels.longest = widest(axis, 1, size);
  labels.extent = size * 0.7;
  if (axis.labels.empty() || axis.is_pooled() || cell < upright_room) {
    labels.step = label_step(cell, text_width(std::to_string(axis.size), size) + 8);
  } else if (labels.longest + 8 > cell) {
    labels.angle = cell >= slanted_room ? -45 : -90;
    labels.extent = (labels.longest + size * 0.3) * (labels.angle == -45 ? std::sqrt(0.5) : 1);
  }
  return labels;
}

class Composer {
 public:
  explicit Composer(const Picture& picture)
      : picture_(picture),
        count_(static_cast<int64_t>(picture.panels.size())),
        columns_(grid_columns(count_)),
        text_size_(count_ == 1 ? kTextSize : kSmallSize) {}

  Scene compose() {
    const int64_t longer = std::max(picture_.queries.cells, picture_.keys.cells);
    double panel = panel_size(count_);
    const bool words = !picture_.queries.labels.empty() || !picture_.keys.labels.empty();
    if (words && longer <= (count_ == 1 ? kMostWords : kMostWordsInGrid)) {
      panel = std::max(panel, static_cast<double>(longer) * std::ceil(text_size_ * 1.05));
    }
    scene_.cell_width = cell_size(picture_.keys.cells, longer, panel);
    scene_.cell_height = cell_size(picture_.queries.cells, longer, panel);
    panel_width_ = scene_.cell_width * static_cast<double>(picture_.keys.cells);
    panel_height_ = scene_.cell_height * static_cast<double>(picture_.queries.cells);
    rows_ = query_labels(picture_.queries, scene_.cell_height, text_size_);
    keys_ = key_labels(picture_.keys, scene_.cell_width, text_size_);

    left_ = std::ceil(kMargin + rows_.extent + 6);
    const double grid_width = left_ + static_cast<double>(columns_) * panel_width_ +
                              static_cast<double>(columns_ - 1) * gap();
    const double bar_x = grid_width + 22;
    double right = bar_x + kBarWidth + 8 + text_width("0.0001", kSmallSize);
    right = std::max({right, grid_width + overhang(), left_ + kNarrowest});
    scene_.width = std::ceil(right + kMargin);
    put_title();
    put_panels();
    put_bar(bar_x);
    put_notes();
    return std::move(scene_);
  }

 private:
  double gap() const { return 20; }
  double caption_height() const {
    const auto named = [](const Panel& panel) { return !panel.name.empty(); };
    const bool any = std::any_of(picture_.panels.begin(), picture_.panels.end(), named);
    return any ? kTextSize + 12 : 0;
  }

  /// How far slanted key labels stand out to the right of their map.
  double overhang() const {
    if (keys_.angle != -45) return 0;
    double furthest = 0;
    for (int64_t cell = 0; cell < picture_.keys.cells; cell += keys_.step) {
      const double width =
          text_width(label_text(picture_.keys, cell, keys_.step, text_size_), text_size_);
      const double begin = (static_cast<double>(cell) + 0.5) * scene_.cell_width;
      furthest = std::max(furthest, begin + width * std::sqrt(0.5) + 4 - panel_width_);
    }
    return furthest;
  }

  double usable_width() const { return scene_.width - 2 * kMargin; }

  void put_title() {
    y_ = kMargin;
    for (const std::string& line : wrapped(picture_.title, kTitleSize, usable_width())) {
      y_ += kTitleSize;
      scene_.labels.push_back(
          {line, {kMargin, y_ - 3}, kTitleSize, Anchor::start, Ink::strong, true});
      y_ += 4;
    }
    if (!picture_.title.empty()) y_ += 12;
  }

  void put_panels() {
    y_ = std::ceil(y_ + keys_.extent + 7);
    top_ = y_;
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t column = i % columns_;
      if (i > 0 && column == 0) y_ += panel_height_ + std::max(caption_height(), 12.0);
      const double x = left_ + static_cast<double>(column) * (panel_width_ + gap());
      scene_.panels.push_back({x, y_, panel_width_, panel_height_});
      if (i < columns_) put_key_labels(x);
      if (column == 0) put_query_labels();
      const std::string& name = picture_.panels[static_cast<size_t>(i)].name;
      if (!name.empty()) {
        scene_.labels.push_back({cut(name, kTextSize, std::max(panel_width_, 60.0)),
                                 {x + panel_width_ / 2, y_ + panel_height_ + kTextSize + 3},
                                 kTextSize,
                                 Anchor::middle,
                                 Ink::strong});
      }
    }
    y_ += panel_height_ + caption_height();
  }

  void put_key_labels(double x) {
    const double drop = text_size_ * 0.35;  // from the middle of a small letter to the baseline
    for (int64_t cell = 0; cell < picture_.keys.cells; cell += keys_.step) {
      Label label;
      label.text = label_text(picture_.keys, cell, keys_.step, text_size_);
      label.size = text_size_;
      label.angle = keys_.angle;
      const double middle = x + (static_cast<double>(cell) + 0.5) * scene_.cell_width;
      label.at = {keys_.angle == 0 ? middle : middle + drop, y_ - 5};
      label.anchor = keys_.angle == 0 ? Anchor::middle : Anchor::start;
      scene_.labels.push_back(label);
    }
  }

  void put_query_labels() {
    for (int64_t cell = 0; cell < picture_.queries.cells; cell += rows_.step) {
      Label label;
      label.text = label_text(picture_.queries, cell, rows_.step, text_size_);
      label.size = text_size_;
      label.at = {left_ - 6, y_ + (static_cast<double>(cell) + 0.5) * scene_.cell_height +
                                 text_size_ * 0.35};
      label.anchor = Anchor::end;
      scene_.labels.push_back(label);
    }
  }

  void put_bar(double x) {
    const double height = std::clamp(y_ - top_ - caption_height(), 90.0, 240.0);
    scene_.bar = {x, top_, kBarWidth, height};
    for (const double tick : bar_ticks(picture_, 16 / height)) {
      const double y = top_ + height * (1 - picture_.position(tick));
      scene_.tick_heights.push_back(y);
      scene_.labels.push_back(
          {number_text(tick), {x + kBarWidth + 7, y + kSmallSize * 0.35}, kSmallSize});
    }
    scene_.labels.push_back({"weight", {x, top_ + height + kSmallSize + 8}, kSmallSize});
    y_ = std::max(y_, top_ + height + kSmallSize + 12);
  }

  void put_notes() {
    std::string text;
    for (const std::string& sentence : picture_.notes()) {
      text += (text.empty() ? "" : " ") + sentence;
    }
    y_ += 10;
    for (const std::string& line : wrapped(text, kSmallSize, usable_width())) {
      y_ += kSmallSize + 5;
      scene_.labels.push_back({line, {kMargin, y_}, kSmallSize});
    }
    scene_.height = std::ceil(y_ + kMargin);
  }

  const Picture& picture_;
  const int64_t count_, columns_;
  const double text_size_;
  Scene scene_;
  AxisLabels rows_, keys_;
  double panel_width_ = 0, panel_height_ = 0;
  double left_ = 0;  // of the first panel
  double top_ = 0;   // of the first panel
  double y_ = 0;     // how far down the scene is filled
};

}  // namespace

int64_t most_cells(int64_t panels) {
  return static_cast<int64_t>(panel_size(panels));
}

Scene scene_of(const Picture& picture) {
  return Composer(picture).compose();
}

}  // namespace mha::draw::detail
