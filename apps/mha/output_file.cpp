#include "output_file.h"

#include <c10/util/Exception.h>
#include <files/tensor_source.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>

namespace mha::cli {
namespace {

bool is_standard_output(const std::string& path) {
  struct stat file{};
  struct stat stream{};
  return stat(path.c_str(), &file) == 0 && fstat(STDOUT_FILENO, &stream) == 0 &&
         S_ISREG(file.st_mode) && file.st_dev == stream.st_dev && file.st_ino == stream.st_ino;
}

}  // namespace

std::vector<std::string> files_of(const std::string& path, detail::Checksums checksums) {
  if (path.empty()) return {};
  return detail::open_tensors(path, checksums)->files();
}

void check_output(const std::string& output, const std::vector<std::string>& read) {
  for (const std::string& input : read) {
    std::error_code ignored;  // a file that isn't there yet is no input
    TORCH_CHECK(!std::filesystem::equivalent(output, input, ignored),
                "--output: expected another file than ", input, ", which is read");
  }
  TORCH_CHECK(!is_standard_output(output), "--output: expected another file than ", output,
              ", which the report on standard output goes to");
}

}  // namespace mha::cli
