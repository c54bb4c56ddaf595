#include "files/whole_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <ios>
#include <random>
#include <system_error>
#include <utility>

#include "files/path.h"

namespace mha::detail {
namespace fs = std::filesystem;
namespace {

// Where a link, or a chain of them, leads, whether or not anything lies there.
fs::path end_of_links(const std::string& path) {
  constexpr int most_links = 40;  // as in Linux
  fs::path target = path;
  for (int links = 0;; ++links) {
    std::error_code error;
    if (!fs::is_symlink(fs::symlink_status(target, error))) return target;
    const fs::path next = fs::read_symlink(target, error);
    TORCH_CHECK(!error && links < most_links, path, ": cannot be written: ",
                error ? error.message() : "Too many levels of symbolic links");
    target = target.parent_path() / next;  // `next` itself if it is absolute
  }
}

fs::path folder_of(const std::string& target) {
  const fs::path folder = fs::path(target).parent_path();
  return folder.empty() ? "." : folder;
}

// A name beside the target that nobody else takes, however long the target's own is.
std::string temporary_name(const std::string& target) {
  std::random_device random;
  const std::string name =
      ".mha-" + std::to_string(random()) + "-" + std::to_string(random()) + ".tmp";
  return (folder_of(target) / name).string();
}

// A file without a name can be given one only by way of /proc.
std::string link_of(int descriptor) {
  return "/proc/self/fd/" + std::to_string(descriptor);
}

// The bits that the process takes from the modes of its new files. Asking for them by umask()
// would change them for a moment, under other threads.
mode_t process_umask() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    unsigned mask = 0;
    if (word == "Umask:" && status >> std::oct >> mask) return static_cast<mode_t>(mask);
  }
  return 0077;
}

}  // namespace

WholeFile::WholeFile(std::string path) : path_(std::move(path)) {
  check_path(path_);
  std::error_code error;
  if (const auto status = fs::status(path_, error); fs::exists(status)) {
    check_is_regular(path_, status);
    errno = 0;
    check(faccessat(AT_FDCWD, path_.c_str(), W_OK, AT_EACCESS) == 0);
  }
  target_ = end_of_links(path_).string();
  // What replaces a private file is private from the beginning.
  const mode_t mode = fs::exists(target_, error) ? 0600 : 0666;
#ifdef O_TMPFILE
  descriptor_ = open(folder_of(target_).c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, mode);
  if (descriptor_ >= 0 && access(link_of(descriptor_).c_str(), F_OK) == 0) {
    // Some file systems leave the umask out for files without a name.
    if (mode == 0666) check(fchmod(descriptor_, mode & ~process_umask()) == 0);
    return;
  }
  if (descriptor_ >= 0) close(descriptor_);
#endif
  temporary_ = temporary_name(target_);
  errno = 0;
  descriptor_ = open(temporary_.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, mode);
  check(descriptor_ >= 0);
}

WholeFile::~WholeFile() {
  if (descriptor_ >= 0) close(descriptor_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

void WholeFile::write(const void* data, size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0) {
    errno = 0;
    const ssize_t count = ::write(descriptor_, bytes, size);
    if (count < 0 && errno == EINTR) continue;
    check(count > 0);
    bytes += count;
    size -= static_cast<size_t>(count);
  }
}

void WholeFile::finish() {
  keep_mode_and_owner();
  if (temporary_.empty()) {
    const std::string link = link_of(descriptor_);
    const auto name = [&link](const std::string& file) {
      return linkat(AT_FDCWD, link.c_str(), AT_FDCWD, file.c_str(), AT_SYMLINK_FOLLOW) == 0;
    };
    if (!name(target_)) {  // a name that is taken can only be taken over from another one
      check(errno == EEXIST);
      const std::string other = temporary_name(target_);
      check(name(other));
      temporary_ = other;
    }
  }
  check(close(std::exchange(descriptor_, -1)) == 0);
  if (temporary_.empty()) return;
  check(std::rename(temporary_.c_str(), target_.c_str()) == 0);
  temporary_.clear();
}

void WholeFile::check(bool good) const {
  TORCH_CHECK(good, path_, ": cannot be written: ", last_error());
}

void WholeFile::keep_mode_and_owner() const {
  struct stat before {};
  struct stat ours {};
  if (stat(target_.c_str(), &before) != 0 || fstat(descriptor_, &ours) != 0) return;
  mode_t mode = before.st_mode & 0777;
  const bool kept = before.st_uid == ours.st_uid && before.st_gid == ours.st_gid;
  if (!kept && fchown(descriptor_, before.st_uid, before.st_gid) != 0 &&
      fchown(descriptor_, static_cast<uid_t>(-1), before.st_gid) != 0) {
    mode = (mode & 0707) | (mode & 0007) << 3;  // what was its group's is not for ours
  }
  if ((ours.st_mode & 0777) == mode) return;  // some file systems have no modes to change
  errno = 0;
  check(fchmod(descriptor_, mode) == 0);
}

}  // namespace mha::detail
