#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "picture.h"
#include "stroke_font.h"

namespace mha::draw::detail {

enum class Anchor { start, middle, end };
enum class Ink { strong, muted };

struct Label {
  std::string text;  // printable
  Point at;          // on the baseline
  double size = 0;   // points an em
  Anchor anchor = Anchor::start;
  Ink ink = Ink::muted;
  bool bold = false;
  double angle = 0;  // degrees, clockwise
};

struct Box {
  double x = 0, y = 0, width = 0, height = 0;
};

/// Where everything of a still picture stands, in points from the upper left corner.
struct Scene {
  double width = 0, height = 0;
  double cell_width = 0, cell_height = 0;
  std::vector<Box> panels;  // as in the picture
  Box bar;                  // of the colour map, the largest weight on top
  std::vector<double> tick_heights;
  std::vector<Label> labels;
};

/// How many cells across and down a panel of a still picture has room for.
int64_t most_cells(int64_t panels);

Scene scene_of(const Picture& picture);

}  // namespace mha::draw::detail
