#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// Labels are what users or files hold: any bytes. They are made printable once, here, and
/// escaped where they are written.
namespace mha::draw::detail {

/// Decodes UTF-8; each byte that belongs to no valid character becomes U+FFFD.
std::u32string decoded(std::string_view utf8);
std::string encoded(std::u32string_view characters);

/// `label` as valid UTF-8 without a character that acts on what shows it: control characters,
/// line breaks, characters without a width and those that turn the direction of writing become
/// their escapes (\n, \x1b, \u202e). A label of spaces alone shows them as U+2423.
std::string printable(std::string_view label);

/// Columns that a printable label takes in a terminal.
int64_t columns_of(std::string_view label);

/// At most `columns` columns of `label`, the last of them an ellipsis (a full stop where
/// `utf8` is false, and a question mark in place of each character beyond ASCII).
std::string fitted(std::string_view label, int64_t columns, bool utf8);

/// For text and attributes of XML and HTML.
std::string xml_escaped(std::string_view label);

}  // namespace mha::draw::detail
