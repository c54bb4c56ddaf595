#pragma once

#include <string>
#include <string_view>

namespace mha::detail {

/// Checks what the JSON lexer does not guard against, in the text of an object: it takes a zero
/// byte for the end of its input, and buffers, twice, everything from the beginning of one
/// string to the next. Throws `c10::Error` that starts with `where`.
void check_json_text(const std::string& where, std::string_view text);

}  // namespace mha::detail
