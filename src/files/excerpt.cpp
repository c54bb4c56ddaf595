#include "files/excerpt.h"

namespace mha::detail {

std::string excerpt(std::string_view text) {
  constexpr size_t kMaxShown = 200;
  constexpr char kHex[] = "0123456789abcdef";
  std::string shown = "'";
  for (const char c : text.substr(0, kMaxShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f) {
      shown.append("\\x").append({kHex[byte >> 4], kHex[byte & 15]});
    } else {
      shown.push_back(c);
    }
  }
  if (text.size() > kMaxShown) shown += "...";
  return shown + "'";
}

}  // namespace mha::detail
