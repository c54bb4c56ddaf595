#include "files/path.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <system_error>

#include "files/excerpt.h"

namespace mha::detail {

std::string last_error() {
  return errno == 0 ? "unknown error" : std::generic_category().message(errno);
}

void check_path(const std::string& path) {
  TORCH_CHECK(!path.empty() && path.find('\0') == std::string::npos,
              "path: expected the name of a file, found ", excerpt(path));
}

void check_is_regular(const std::string& path, const std::filesystem::file_status& status) {
  // A device or a pipe may never end, and has no places to read at.
  TORCH_CHECK(
      std::filesystem::is_regular_file(status), path, ": expected a regular file, found ",
      std::filesystem::is_directory(status) ? "a directory" : "a device, pipe or socket");
}

}  // namespace mha::detail
