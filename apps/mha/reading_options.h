#pragma once

#include <mha/weight_file.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace mha::cli {

/// The arguments that say what of a weight file is passed over: names, checksums.
class ReadingOptions {
 public:
  /// Adds the options to `app`, which need that of the `file`. This object must outlive the
  /// parsing.
  void add_to(CLI::App& app, CLI::Option* file);

  const std::vector<std::string>& ignored() const { return ignored_; }
  bool missing_checksums() const { return missing_checksums_; }
  WeightFileOptions where() const;

 private:
  std::vector<std::string> ignored_;
  bool missing_checksums_ = false;
};

}  // namespace mha::cli
