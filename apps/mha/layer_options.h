#pragma once

#include <mha/multi_head_attention.h>
#include <mha/weight_file.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "rotary_option.h"

namespace mha::cli {

/// The arguments that say which layer of which weight file.
class LayerOptions {
 public:
  /// Adds the options to `app`; returns that of the file. This object must outlive the parsing.
  CLI::Option* add_to(CLI::App& app);

  const std::string& file() const { return file_; }
  const std::string& prefix() const { return prefix_; }
  /// The layer, in evaluation mode.
  MultiHeadAttention load() const;
  /// File, prefix, layout, sizes and rotary positions, for a report.
  nlohmann::ordered_json described(const MultiHeadAttention& module) const;

 private:
  WeightFileOptions where() const;
  void check_num_heads() const;

  std::string file_, prefix_, layout_, dtype_;
  std::optional<int64_t> num_heads_;
  RotaryOption rotary_;
};

/// The first lines of a report about a layer: its file, then its sizes.
std::string layer_text(const nlohmann::ordered_json& layer);

}  // namespace mha::cli
