#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <mha/draw.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

namespace mha::draw {
namespace {

namespace fs = std::filesystem;

/// Where the file is written: through a link, so that what it points to is replaced. A device
/// or a folder is no place to rename a file to.
fs::path checked_target(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  TORCH_CHECK(!fs::exists(status) || fs::is_regular_file(status), path,
              ": expected a regular file to write to, found something else");
  const bool link = fs::is_symlink(fs::symlink_status(path, error));
  return link ? fs::weakly_canonical(path, error) : fs::path(path);
}

void write_whole(const std::string& path, const std::string& bytes) {
  const fs::path target = checked_target(path);
  const fs::path temporary = target.parent_path() / fmt::format(".mha-{}-{}.tmp", getpid(),
                                                                target.filename().string());
  std::error_code error;
  {
    std::ofstream stream(temporary, std::ios::binary | std::ios::trunc);
    stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    stream.close();
    if (!stream.good()) error.assign(errno, std::generic_category());
  }
  if (!error) fs::rename(temporary, target, error);
  if (!error) return;
  std::error_code ignored;
  fs::remove(temporary, ignored);
  TORCH_CHECK(false, path, ": cannot be written: ", error.message());
}

}  // namespace

Format format_of(const std::string& path) {
  constexpr std::array<std::pair<const char*, Format>, 4> endings = {{{".png", Format::png},
                                                                      {".svg", Format::svg},
                                                                      {".html", Format::html},
                                                                      {".htm", Format::html}}};
  std::string ending = fs::path(path).extension().string();
  std::transform(ending.begin(), ending.end(), ending.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const auto& [known, format] : endings) {
    if (ending == known) return format;
  }
  TORCH_CHECK(false, "expected a name that ends in .png, .svg or .html, found ", path);
}

void save(const Maps& maps, const std::string& path, const Options& options) {
  const Format format = format_of(path);
  write_whole(path, format == Format::png   ? png(maps, options)
                    : format == Format::svg ? svg(maps, options)
                                            : html(maps, options));
}

}  // namespace mha::draw
