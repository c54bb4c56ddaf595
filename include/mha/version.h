#pragma once

#include <string>

namespace mha {

/// This library's version, "major.minor.patch".
std::string version();

/// The version of the LibTorch that this library was compiled against.
std::string torch_version();

}  // namespace mha
