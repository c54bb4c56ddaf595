#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace mha::cli {

/// How the help is set: an option with its value's name, then what it is and its default. What
/// an option needs beside it is told by its group and by the error.
class HelpFormat : public CLI::Formatter {
 public:
  HelpFormat() { label("SUBCOMMAND", "COMMAND"); }

  std::string make_option_opts(const CLI::Option* option) const override;
  std::string make_option_desc(const CLI::Option* option) const override;
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override;
};

}  // namespace mha::cli
