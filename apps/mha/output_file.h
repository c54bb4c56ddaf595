#pragma once

#include <files/checksums.h>

#include <string>
#include <vector>

namespace mha::cli {

/// What is at `path`, and in case it is the index of a model in several files, those too; none
/// for the empty path.
std::vector<std::string> files_of(const std::string& path,
                                  detail::Checksums checksums = detail::Checksums::required);

/// Throws if `output` is one of the files that the same call reads, or the one that standard
/// output goes to: writing over them is always a slip. Names of no files are none.
void check_output(const std::string& output, const std::vector<std::string>& read);

}  // namespace mha::cli
