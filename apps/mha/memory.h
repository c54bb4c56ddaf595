#pragma once

#include <string>

namespace mha::cli {

/// Throws if `bytes`, which `what` (an option and what it asks for) would take, are more than
/// there is: asked for, the system may grant them and end the program when they are used.
void check_memory(const std::string& what, double bytes);

/// What a failure to take memory says in LibTorch's and the standard library's words, in ours;
/// any other message as it is.
std::string in_our_words(const std::string& message);

}  // namespace mha::cli
