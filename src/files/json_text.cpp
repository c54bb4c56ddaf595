#include "files/json_text.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "files/excerpt.h"

namespace mha::detail {

void check_json_text(const std::string& where, std::string_view text) {
  constexpr size_t max_token_size = size_t{1} << 20;
  TORCH_CHECK(!text.empty() && text.front() == '{', where,
              ": expected it to begin with '{', found ", excerpt(text.substr(0, 1)));
  const size_t zero = text.find('\0');
  TORCH_CHECK(zero == std::string_view::npos, where,
              ": expected text, found a zero byte at byte ", zero);
  for (size_t quote = 0, next = 0; next < text.size(); quote = next) {
    next = std::min(text.find('"', quote + 1), text.size());
    TORCH_CHECK(next - quote <= max_token_size, where,
                ": expected a quotation mark at least every ", max_token_size,
                " bytes, found none after byte ", quote);
  }
}

}  // namespace mha::detail
