#pragma once

#include <mha/multi_head_attention.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>

namespace mha::cli {

/// The command line's arguments that say which layer of which weight file is meant.
class LayerOptions {
 public:
  /// Adds the options to `app`, that of the file under the name `file_option`. This object must
  /// outlive the parsing.
  CLI::Option* add_to(CLI::App& app, const char* file_option);

  const std::string& file() const { return file_; }
  const std::string& prefix() const { return prefix_; }

  /// The module with its weights, in evaluation mode.
  MultiHeadAttention load() const;

 private:
  std::string file_, prefix_, layout_;
  std::optional<int64_t> heads_;
};

}  // namespace mha::cli
