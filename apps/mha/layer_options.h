#pragma once

#include <mha/model_config.h>
#include <mha/multi_head_attention.h>
#include <mha/weight_file.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "reading_options.h"
#include "rotary_option.h"
#include "score_numbers.h"

namespace mha::cli {

/// The arguments that say which layer of which weight file, or of which model's folder.
class LayerOptions {
 public:
  /// Adds the options to `app`; returns that of the file. This object must outlive the parsing.
  CLI::Option* add_to(CLI::App& app);

  const std::string& file() const { return file_; }
  /// Every file that the layer is read from; none if there is no layer.
  std::vector<std::string> files() const;
  /// The layer, in evaluation mode, with the mask that its model's folder tells of. Of a file,
  /// nothing is known but the layer, its layout and its prefix.
  ModelLayer load() const;
  /// File, prefix, layout, sizes, rotary positions and mask, for a report.
  nlohmann::ordered_json described(const ModelLayer& layer) const;

 private:
  WeightFileOptions where() const;
  void check_num_heads() const;
  ModelLayer load_of_model() const;

  std::string file_, prefix_, layout_, layout_file_, dtype_, part_;
  std::optional<int64_t> num_heads_, layer_;
  RotaryOption rotary_;
  ScoreNumbers scores_;
  ReadingOptions reading_;
};

/// The first lines of a report about a layer: its file, then its sizes.
std::string layer_text(const nlohmann::ordered_json& layer);

}  // namespace mha::cli
