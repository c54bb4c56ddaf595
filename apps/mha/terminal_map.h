#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "terminal.h"

namespace mha::cli {

/// One head's attention map as a picture: queries downwards, keys to the right, square cells
/// coloured from 0 to the map's largest weight, axes and a legend. A weight of exactly 0 (a
/// blocked key) is left blank. A map that does not fit the terminal is pooled by the maximum,
/// so that a narrow diagonal stays visible, and the picture says so.
///
/// `map`: (L, S), floating, on the CPU. The result ends with a newline.
std::string draw_map(const at::Tensor& map, const Terminal& terminal);

}  // namespace mha::cli
