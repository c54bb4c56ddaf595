#pragma once

#include <mha/multi_head_attention.h>
#include <mha/weight_file.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "rotary_option.h"

namespace mha::cli {

/// The names of the layouts, for `one_of`, and the layout of that name, which the parser has
/// let through; none for the empty name.
std::vector<std::string> layout_names();
std::optional<Layout> layout_named(const std::string& name);

/// The arguments that say which layer of which weight file.
class LayerOptions {
 public:
  /// Adds the options to `app`, that of the file under the name `file_option`. This object must
  /// outlive the parsing.
  CLI::Option* add_to(CLI::App& app, const char* file_option = "--weights");

  const std::string& file() const { return file_; }
  const std::string& prefix() const { return prefix_; }
  /// The layer, in evaluation mode.
  MultiHeadAttention load() const;
  /// File, prefix, layout, sizes and rotary positions, for a report.
  nlohmann::ordered_json described(const MultiHeadAttention& module) const;

 private:
  WeightFileOptions where() const;

  std::string file_, prefix_, layout_, dtype_;
  std::optional<int64_t> heads_;
  RotaryOption rotary_;
};

/// The first lines of a report about a layer: its file, then its sizes.
std::string layer_text(const nlohmann::ordered_json& layer);

}  // namespace mha::cli
