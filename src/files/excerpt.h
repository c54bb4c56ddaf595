#pragma once

#include <string>
#include <string_view>

namespace mha::detail {

/// `text` in single quotes for an error message: cut if it is long, and with `\\x1b` for bytes
/// that are not printable ASCII, since a hostile file may address the terminal.
std::string excerpt(std::string_view text);

}  // namespace mha::detail
