#include "files/json_text.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "files/excerpt.h"

namespace mha::detail {

std::string_view without_leading_space(std::string_view text) {
  return text.substr(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
}

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

nlohmann::json parse_json(const std::string& where, std::string_view text) {
  constexpr int max_depth = 32;
  text = without_leading_space(text);
  check_json_text(where, text);
  bool is_too_deep = false;
  const auto keep = [&](int depth, nlohmann::json::parse_event_t /*event*/,
                        nlohmann::json& /*parsed*/) {
    is_too_deep |= depth > max_depth;
    return !is_too_deep;
  };
  nlohmann::json parsed = nlohmann::json::parse(text, keep, /*allow_exceptions=*/false);
  TORCH_CHECK(!is_too_deep, where, ": expected JSON of at most ", max_depth,
              " levels, found more");
  TORCH_CHECK(parsed.is_object(), where, ": expected valid JSON, found none");
  return parsed;
}

}  // namespace mha::detail
