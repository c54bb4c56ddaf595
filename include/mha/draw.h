#pragma once

#include <ATen/core/Tensor.h>
#include <mha/attention_map.h>
#include <torch/arg.h>

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

/// Pictures of attention weights, of the component `draw` (CMake: `mha::draw`).
///
///     mha::draw::Maps maps;
///     maps.weights = attention->forward(x).weights[0];  // (H, L, S) of one sample
///     maps.queries = maps.keys = {"[CLS]", "a", "cat", "[SEP]"};
///     mha::draw::save(maps, "cat.html");
///
///     maps.weights = {};
///     maps.map = attention->trace(x, x, x).map;  // the same, also for long inputs
///
/// Queries go downwards, keys to the right. Blank is what may not be attended to: a weight of
/// exactly 0, which the softmax gives to a blocked key only.
namespace mha::draw {

/// What is drawn: the map of one head, or of several side by side.
struct Maps {
  /// (H, L, S) or (L, S), floating, >= 0, on any device.
  at::Tensor weights;
  /// In place of `weights`: a traced call, of which only the cells of the picture are formed,
  /// so that long inputs take no memory for a map. It shows its own mask, and `Options::causal`
  /// is not for it.
  std::optional<AttentionMap> map;
  /// Which sample of `map` is drawn.
  int64_t sample = 0;
  /// The tokens, L and S of them; empty: their indices. They may hold anything: bytes that are
  /// no UTF-8, control characters and markup are shown, never acted on.
  std::vector<std::string> queries, keys;
  std::string title;
  /// What stands at each map, H of them. Empty: "head 0", "head 1", ...; nothing at a map
  /// alone.
  std::vector<std::string> names;
};

/// Each goes through equal steps of perceived difference (in OKLab), lightness only rises or
/// only falls, so that the order of two weights can be seen in grey and by the colour-blind.
enum class ColourMap {
  dusk,  ///< dark violet by way of teal to light yellow
  ink,   ///< pale to dark blue, for print
  grey,  ///< pale to dark grey
};

/// How a weight becomes a place in the colour map.
enum class Scale {
  square_root,  ///< shows small weights beside large ones: a quarter of the largest lies
                ///< halfway
  linear,
};

struct Options {
  TORCH_ARG(ColourMap, colours) = ColourMap::dusk;
  TORCH_ARG(Scale, scale) = Scale::square_root;
  /// The weight at the end of the colour map, > 0; larger ones get its colour too. Default: the
  /// largest weight in the picture.
  TORCH_ARG(std::optional<double>, largest);
  /// Leave the keys after a query's own position blank, whatever weights they have. The last
  /// query stands at the last key, as in `Mask::causal()`.
  TORCH_ARG(bool, causal) = false;
};

// A map that is too long for its picture is pooled: neighbouring queries and neighbouring keys
// share a cell, which shows the mean over its queries of what they give to its keys together,
// so a row still sums to what it did. The picture says so.
//
// All functions throw `c10::Error` that names the field, what was expected and what was found.

/// The bytes of a PNG file, at two pixels to a point. Latin letters, digits and signs are drawn
/// with strokes that the library brings along; a character that it lacks becomes a box.
std::string png(const Maps& maps, const Options& options = {});

/// An SVG document, which follows the viewer's choice of dark or light.
std::string svg(const Maps& maps, const Options& options = {});

/// A page without any outside resource: choose heads, see them side by side, point at a token
/// to see its row; by mouse, touch or keyboard; dark or light.
std::string html(const Maps& maps, const Options& options = {});

enum class Format { png, svg, html };

/// By the ending of a file's name, in letters of either case.
Format format_of(const std::string& path);

/// Writes the picture in the format of the name's ending. The file appears whole or not at all.
void save(const Maps& maps, const std::string& path, const Options& options = {});

enum class Colours {
  none,         ///< plain characters
  palette_256,  ///< xterm's 256 colours
  rgb,          ///< 24-bit colour
};

/// What may be written to a stream.
struct Terminal {
  int columns = 80;
  Colours colours = Colours::none;
  bool utf8 = false;  ///< characters beyond ASCII may be written
};

/// Looks at `stream` and the environment: NO_COLOR (no-color.org) and TERM=dumb forbid colours,
/// COLORTERM grants 24-bit ones. A stream that is no terminal gets 80 columns of plain text.
Terminal terminal_of(std::FILE* stream);

/// The maps one below the other as lines of text, each within the terminal's width.
std::string text(const Maps& maps, const Terminal& terminal, const Options& options = {});

}  // namespace mha::draw
