#pragma once

#include <CLI/CLI.hpp>

#include <functional>

namespace mha::cli {

/// What the program returns to the shell.
enum ExitCode : int {
  kSuccess = 0,
  kDiffers = 1,  ///< the comparison was made and is above the tolerance
  kError = 2,    ///< a wrong call or a failure; one line on standard error says which
};

/// One subcommand: what parses its arguments, and what runs after they are parsed.
struct Command {
  CLI::App* app;
  std::function<ExitCode()> run;
};

Command demo_command(CLI::App& program);
Command run_command(CLI::App& program);
Command map_command(CLI::App& program);
Command convert_command(CLI::App& program);
Command compare_command(CLI::App& program);
Command info_command(CLI::App& program);
Command bench_command(CLI::App& program);

}  // namespace mha::cli
