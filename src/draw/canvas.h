#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "colour_map.h"
#include "scene.h"

namespace mha::draw::detail {

/// A raster of colours, drawn on in points of the scene.
class Canvas {
 public:
  static constexpr double kPixelsPerPoint = 2;

  Canvas(double width, double height, Rgb paper);

  int64_t width() const { return width_; }
  int64_t height() const { return height_; }
  /// Rows from the top, three bytes a pixel.
  const std::vector<uint8_t>& bytes() const { return bytes_; }

  /// Fills the pixels whose centres lie in `box`.
  void fill(const Box& box, Rgb colour);
  /// A line of one pixel around the outside of `box`.
  void outline(const Box& box, Rgb colour);
  void write(const Label& label, Rgb colour);

 private:
  void set(int64_t x, int64_t y, Rgb colour);
  void blend(int64_t x, int64_t y, Rgb colour, double part);

  int64_t width_, height_;
  std::vector<uint8_t> bytes_;
};

}  // namespace mha::draw::detail
