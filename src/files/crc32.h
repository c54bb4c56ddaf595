#pragma once

#include <cstddef>
#include <cstdint>

namespace mha::detail {

/// The checksum of zip files (polynomial 0x04c11db7, reflected) over `size` bytes.
uint32_t crc32(const void* data, size_t size);

}  // namespace mha::detail
