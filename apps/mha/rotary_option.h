#pragma once

#include <mha/rotary.h>

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

namespace mha::cli {

/// The argument that says how a layer rotates queries and keys, which no weight file but our
/// own tells: `NAME=VALUE,...` with the names of `RotaryOptions` and of its scalings, in
/// hyphens.
class RotaryOption {
 public:
  /// This object must outlive the parsing.
  CLI::Option* add_to(CLI::App& app);

  /// None if the argument is absent. Throws `c10::Error` that names the wrong setting.
  std::optional<RotaryOptions> rotary() const;

 private:
  std::string text_;
};

}  // namespace mha::cli
