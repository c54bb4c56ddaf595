#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace mha::cli {

/// Whether the whole of `text` is an integer; puts it into `value`.
bool read_integer(const std::string& text, int64_t& value);

// In place of CLI11's own validators: these messages say what was expected and found, and do
// not write the range of an integer in floating point.

/// Accepts integers from `smallest` on.
CLI::Validator integer_from(int64_t smallest);

/// Accept finite numbers from 0 on, or beyond it.
CLI::Validator number_from_zero();
CLI::Validator number_above_zero();

/// Accepts any text: of a variable that is not set, nothing is left, and it means no default.
CLI::Validator not_empty();

/// `text`, unless it is empty: the same for options whose value may be left out, of which
/// CLI11 checks no empty one.
std::string given_value(const char* option, const std::string& text);

/// Lets `option` take one of `names`, which the help shows.
CLI::Option* one_of(CLI::Option* option, const std::vector<std::string>& names);

}  // namespace mha::cli
