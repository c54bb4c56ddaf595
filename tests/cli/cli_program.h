#pragma once

#include <map>
#include <string>
#include <vector>

namespace mha::test {

/// What a run of the command line left.
struct ProgramResult {
  int exit_code = -1;  // -1: it did not end by itself
  std::string output;  // standard output; at a terminal standard error too
  std::string error;   // standard error
};

/// Changes to the environment; an empty value unsets the variable.
using Environment = std::map<std::string, std::string>;

/// Runs the built `mha` with its output going to files, as in a pipe.
ProgramResult run_mha(const std::vector<std::string>& arguments,
                      const Environment& environment = {});

/// Runs it with standard output going to the file at `path`; `output` stays empty.
ProgramResult run_mha_into(const std::string& path, const std::vector<std::string>& arguments,
                           const Environment& environment = {});

/// Runs it with these standard streams closed; of the others nothing is read.
ProgramResult run_mha_without(const std::vector<int>& streams,
                              const std::vector<std::string>& arguments);

/// Runs it at a terminal (a pseudo-terminal of that width).
ProgramResult run_mha_at_terminal(const std::vector<std::string>& arguments, int columns,
                                  const Environment& environment);

/// Checks that the run failed as every error must: exit code 2, nothing on standard output, and
/// on standard error one line that begins with `mha: error: ` and contains `text`.
void expect_error(const ProgramResult& result, const std::string& text);

}  // namespace mha::test
