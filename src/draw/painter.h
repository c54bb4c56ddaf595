#pragma once

#include <mha/draw.h>

#include <cstdint>
#include <string>

namespace mha::draw::detail {

/// Writes the cells of one line. A position is the place in the colour map, from 0 to 1;
/// `kBlank` leaves the terminal's own background.
class Painter {
 public:
  static constexpr double kBlank = -1;

  Painter(Colours colours, ColourMap map) : colours_(colours), map_(map) {}

  /// A cell over the full height of the line.
  void cell(double position, int64_t columns);

  /// Two cells of one column, one above the other. Needs colours and UTF-8.
  void half_cells(double upper, double lower);

  /// Takes the line, with the colours set back at its end.
  std::string take();

 private:
  enum class Ground : int { front = 3, back = 4 };  // first digit of the escape code
  void set(Ground ground, double position);

  Colours colours_;
  ColourMap map_;
  std::string line_, front_ = "39", back_ = "49";  // the two codes now in force
};

}  // namespace mha::draw::detail
