#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace mha::detail {

/// The text from its first byte that is no white space of JSON.
std::string_view without_leading_space(std::string_view text);

/// Checks what the JSON lexer does not guard against, in the text of an object: it takes a zero
/// byte for the end of its input, and buffers, twice, everything from the beginning of one
/// string to the next. Throws `c10::Error` that starts with `where`.
void check_json_text(const std::string& where, std::string_view text);

/// The object that such a text is, checked like that, valid, and no deeper than 32 levels,
/// since a copy of one takes as much of the stack. Throws `c10::Error` that starts with
/// `where`.
nlohmann::json parse_json(const std::string& where, std::string_view text);

}  // namespace mha::detail
