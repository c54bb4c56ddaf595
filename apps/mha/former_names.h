#pragma once

#include <CLI/CLI.hpp>

#include <initializer_list>

namespace mha::cli {

/// An option under the name that it had, and under the one that it has.
struct FormerName {
  const char* former;
  const char* present;
};

/// Lets the parser refuse former names of options with an error that tells the present one. The
/// help does not show them.
void refuse_former_names(CLI::App& app, std::initializer_list<FormerName> names);

}  // namespace mha::cli
