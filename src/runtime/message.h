#pragma once
#ifndef MHA_IS_KERNEL

// Included before every file of the library that is not a kernel, by the compiler's command
// line: what TORCH_CHECK writes does not depend on the locale that the program has set, which
// may group digits and put a comma for the point. (c10 writes into a stream of that locale.)

#include <c10/util/Exception.h>

#include <locale>
#include <sstream>
#include <string>

namespace mha::detail {

/// The arguments one after the other, as C's locale writes them.
template <typename First, typename... Args>
std::string message(const First& first, const Args&... args) {
  std::ostringstream stream;
  stream.imbue(std::locale::classic());
  ((stream << first) << ... << args);
  return stream.str();
}

/// What a check says of its condition alone, as do some in LibTorch's headers.
inline std::string check_message(const char* condition) {
  return message("Expected ", condition, " to be true, found false");
}
template <typename... Args>
std::string check_message(const char* /*condition*/, const Args&... args) {
  return message(args...);
}

}  // namespace mha::detail

#undef TORCH_CHECK_MSG
#define TORCH_CHECK_MSG(cond, type, ...) (::mha::detail::check_message(#cond, ##__VA_ARGS__))

#endif
