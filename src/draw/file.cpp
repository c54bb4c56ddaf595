#include <c10/util/Exception.h>
#include <mha/draw.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <string>
#include <utility>

#include "files/whole_file.h"

namespace mha::draw {

Format format_of(const std::string& path) {
  constexpr std::array<std::pair<const char*, Format>, 4> endings = {{{".png", Format::png},
                                                                      {".svg", Format::svg},
                                                                      {".html", Format::html},
                                                                      {".htm", Format::html}}};
  std::string ending = std::filesystem::path(path).extension().string();
  std::transform(ending.begin(), ending.end(), ending.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const auto& [known, format] : endings) {
    if (ending == known) return format;
  }
  TORCH_CHECK(false, "path: expected a name that ends in .png, .svg or .html, found ", path);
}

void save(const Maps& maps, const std::string& path, const Options& options) {
  const Format format = format_of(path);
  const std::string bytes = format == Format::png   ? png(maps, options)
                            : format == Format::svg ? svg(maps, options)
                                                    : html(maps, options);
  mha::detail::WholeFile file(path);
  file.write(bytes.data(), bytes.size());
  file.finish();
}

}  // namespace mha::draw
