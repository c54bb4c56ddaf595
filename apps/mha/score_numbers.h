#pragma once

#include <mha/multi_head_attention.h>
#include <mha/weight_file.h>

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

namespace mha::cli {

/// The arguments for numbers of a layer that no weight file but our own tells: `--scale`,
/// `--softcap`, `--qk-norm-eps`.
class ScoreNumbers {
 public:
  /// Adds the options to `app`, which need that of the `file`. This object must outlive the
  /// parsing.
  void add_to(CLI::App& app, CLI::Option* file);

  /// The first that is given; null if none is.
  const char* given() const;
  /// Puts them into the options of the layer in a file. Throws `c10::Error` if its metadata
  /// tells another number, or if the layer has no use for one.
  void apply_to(MultiHeadAttentionOptions& options, const std::string& path,
                const WeightFileOptions& where) const;

 private:
  std::optional<double> scale_, softcap_, eps_;
};

}  // namespace mha::cli
