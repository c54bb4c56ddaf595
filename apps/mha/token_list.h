#pragma once

#include <string>
#include <vector>

namespace mha::cli {

/// Whether an argument names a file of tokens: there is one, or its ending says so.
bool is_token_file(const std::string& argument);

/// The tokens that an argument gives: those of a file of that name, one a line or, if the name
/// ends in .json, a list of strings; else the argument's own words.
std::vector<std::string> token_list(const std::string& argument);

}  // namespace mha::cli
