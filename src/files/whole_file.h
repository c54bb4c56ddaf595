#pragma once

#include <cstddef>
#include <string>

namespace mha::detail {

/// A file that appears under its name whole or not at all. One that it replaces hands on its
/// mode and, where that is allowed, its owner; a link is written through. What was begun and
/// not finished leaves nothing, even if the process ends: until it is complete the file has no
/// name, where the system has such files.
///
/// Throws `c10::Error` that starts with the path, and then leaves what lay there as it was.
class WholeFile {
 public:
  /// Expects the place of a regular file: no device, pipe or folder lies there.
  explicit WholeFile(std::string path);
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  void write(const void* data, size_t size);
  /// Gives the file its name. Nothing is written after it.
  void finish();

 private:
  void check(bool good) const;
  void keep_mode_and_owner() const;

  std::string path_;       // as it was given, for errors
  std::string target_;     // at the end of all links
  std::string temporary_;  // beside the target; empty: the file has no name
  int descriptor_ = -1;
};

}  // namespace mha::detail
