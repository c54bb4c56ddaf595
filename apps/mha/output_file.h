#pragma once

#include <initializer_list>
#include <string>

namespace mha::cli {

/// Throws if `output` is one of the files that the same call reads, or the one that standard
/// output goes to: writing over them is always a slip. Empty names are none.
void check_output(const std::string& output, std::initializer_list<std::string> read);

}  // namespace mha::cli
