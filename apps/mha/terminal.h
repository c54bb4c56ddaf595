#pragma once

#include <cstdio>

namespace mha::cli {

enum class Colours {
  none,         ///< plain characters
  palette_256,  ///< xterm's 256 colours
  rgb,          ///< 24-bit colour
};

/// What may be written to a stream.
struct Terminal {
  int columns = 80;
  Colours colours = Colours::none;
  bool utf8 = false;  ///< block characters may be written
};

/// Looks at `stream` and the environment: NO_COLOR (no-color.org) and TERM=dumb forbid colours,
/// COLORTERM grants 24-bit ones. A stream that is no terminal gets 80 columns of plain text.
Terminal terminal_of(std::FILE* stream);

}  // namespace mha::cli
