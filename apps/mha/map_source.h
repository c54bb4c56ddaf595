#pragma once

#include <mha/draw.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layer_options.h"
#include "mask_options.h"

namespace mha::cli {

/// The arguments that say which maps are drawn: those in a file, or those that a layer
/// computes.
class MapSource {
 public:
  /// Adds the options to `app`. This object must outlive the parsing.
  void add_to(CLI::App& app);

  /// Throws `c10::Error` if the arguments do not fit together.
  void check() const;
  /// Every file that maps are read or computed from.
  std::vector<std::string> files() const;
  /// Whether the keys after a query are to be left blank. A layer's own mask has left its zeros
  /// there, under whichever alignment.
  bool hides_later_keys() const { return is_stored() && mask_.is_causal(); }

  /// Weights or map, names and title, for what has no tokens yet.
  draw::Maps maps() const;

 private:
  bool is_stored() const { return !file_.empty(); }
  draw::Maps stored() const;
  draw::Maps computed() const;
  int64_t chosen_sample(int64_t samples) const;
  void check_heads(int64_t heads) const;
  std::vector<std::string> names(int64_t heads) const;
  std::string title(const std::string& source, int64_t samples) const;

  std::string file_, tensor_;  // stored maps
  LayerOptions layer_;         // or the layer that computes them
  std::string input_;
  MaskOptions mask_;
  std::optional<int64_t> sample_;
  std::vector<int64_t> heads_;
  bool mean_ = false;
};

}  // namespace mha::cli
