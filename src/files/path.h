#pragma once

#include <filesystem>
#include <string>

namespace mha::detail {

/// The text of `errno`.
std::string last_error();

/// Throws `c10::Error` unless `path` can be the name of a file: not empty, and without a zero
/// byte, at which the system would take it to end.
void check_path(const std::string& path);

/// Throws unless `status`, of `path`, is that of a regular file or a link to one.
void check_is_regular(const std::string& path, const std::filesystem::file_status& status);

}  // namespace mha::detail
