#include "files/input_file.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "files/path.h"

namespace mha::detail {
namespace fs = std::filesystem;

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  check_path(path_);
  std::error_code error;
  const fs::file_status status = fs::status(path_, error);
  TORCH_CHECK(fs::exists(status), path_,
              ": cannot be opened: ", error ? error.message() : "No such file or directory");
  check_is_regular(path_, status);
  errno = 0;
  stream_.open(path_, std::ios::binary | std::ios::ate);
  TORCH_CHECK(stream_.is_open(), path_, ": cannot be opened: ", last_error());
  size_ = static_cast<int64_t>(stream_.tellg());
}

void InputFile::read(int64_t offset, void* to, int64_t size, std::string_view what) {
  stream_.clear();
  stream_.seekg(offset);
  stream_.read(static_cast<char*>(to), static_cast<std::streamsize>(size));
  TORCH_CHECK(stream_.gcount() == size, path_, ": ", what, ": expected ", size,
              " bytes, found ", stream_.gcount(), ": the file was cut after it was opened");
}

std::string InputFile::read(int64_t offset, int64_t size, std::string_view what) {
  TORCH_INTERNAL_ASSERT(offset >= 0 && size >= 0 && offset <= size_ && size <= size_ - offset);
  std::string bytes(static_cast<size_t>(size), '\0');
  read(offset, bytes.data(), size, what);
  return bytes;
}

}  // namespace mha::detail
