#pragma once

#include <string_view>

namespace mha::draw::detail {

/// The files in page/, which the build turns into strings. The page has places named @TITLE@,
/// @STYLE@, @DATA@ and @SCRIPT@.
extern const std::string_view kPageHtml, kPageStyle, kPageScript;

}  // namespace mha::draw::detail
