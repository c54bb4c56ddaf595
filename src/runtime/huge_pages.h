#pragma once

#include <cstddef>

namespace mha::detail {

/// Asks the system to back freshly allocated memory by huge pages. A large result is written
/// once, right after it is allocated, and the fault for each 4 KiB page costs more than writing
/// it. A hint: it does nothing where the system has no such thing, or for less than 4 MiB.
void prefer_huge_pages(void* data, size_t bytes);

}  // namespace mha::detail
