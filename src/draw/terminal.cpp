#include <c10/util/Exception.h>
#include <mha/draw.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace mha::draw {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

Colours allowed_colours() {
  const std::string term = environment("TERM");
  if (!environment("NO_COLOR").empty() || term.empty() || term == "dumb") return Colours::none;
  const std::string depth = environment("COLORTERM");
  return depth == "truecolor" || depth == "24bit" ? Colours::rgb : Colours::palette_256;
}

/// Whether the locale's character set is UTF-8; the first variable that is set decides.
bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const std::string locale = environment(name);
    if (locale.empty()) continue;
    for (const char* charset : {"UTF-8", "utf-8", "UTF8", "utf8"}) {
      if (locale.find(charset) != std::string::npos) return true;
    }
    return false;
  }
  return false;
}

}  // namespace

Terminal terminal_of(std::FILE* stream) {
  TORCH_CHECK(stream != nullptr, "stream: expected an open stream, found a null pointer");
  Terminal terminal;
  const int descriptor = fileno(stream);
  if (isatty(descriptor) == 0) return terminal;
  winsize size{};
  if (ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    terminal.columns = size.ws_col;
  }
  terminal.colours = allowed_colours();
  terminal.utf8 = locale_is_utf8();
  return terminal;
}

}  // namespace mha::draw
