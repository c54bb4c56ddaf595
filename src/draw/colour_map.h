#pragma once

#include <mha/draw.h>

#include <array>
#include <cstdint>

namespace mha::draw::detail {

struct Rgb {
  uint8_t red, green, blue;
};

constexpr int kColours = 256;
using ColourTable = std::array<Rgb, kColours>;

/// The colours from the smallest weight to the largest.
const ColourTable& colour_table(ColourMap map);

/// The colour at a position from 0 to 1; beyond, the colour at that end.
Rgb colour_at(ColourMap map, double position);

}  // namespace mha::draw::detail
