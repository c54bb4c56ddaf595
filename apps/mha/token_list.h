#pragma once

#include <string>
#include <vector>

namespace mha::cli {

/// The tokens that an argument of `option` gives: those of a file of that name, one a line or,
/// if the name ends in .json, a list of strings; else the argument's own words.
std::vector<std::string> token_list(const std::string& argument, const std::string& option);

}  // namespace mha::cli
