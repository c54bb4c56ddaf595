#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>

namespace mha::detail {

/// A file open for reading at any place. Not for use by two threads at once.
class InputFile {
 public:
  /// Throws `c10::Error` that starts with the path if it cannot be opened.
  explicit InputFile(std::string path);

  const std::string& path() const { return path_; }
  /// Size in bytes when it was opened.
  int64_t size() const { return size_; }

  /// Reads `size` bytes at `offset`; throws if they are not there. `what` they are stands in
  /// the error.
  void read(int64_t offset, void* to, int64_t size, std::string_view what);
  std::string read(int64_t offset, int64_t size, std::string_view what);

 private:
  std::string path_;
  std::ifstream stream_;
  int64_t size_ = 0;
};

}  // namespace mha::detail
