#include "files/crc32.h"

#include <array>

namespace mha::detail {
namespace {

// kCrcTables[k][b]: the checksum's share of byte b with k more bytes after it.
constexpr std::array<std::array<uint32_t, 256>, 8> crc_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ (0xedb88320u & (0u - (rest & 1u)));
    tables[0][byte] = rest;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xffu];
    }
  }
  return tables;
}

constexpr auto kCrcTables = crc_tables();

}  // namespace

// Eight bytes a step, since one at a time is slower than a disk.
uint32_t crc32(const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint32_t crc = ~0u;
  for (; size >= 8; bytes += 8, size -= 8) {
    const uint32_t low = crc ^ (bytes[0] | uint32_t{bytes[1]} << 8 | uint32_t{bytes[2]} << 16 |
                                uint32_t{bytes[3]} << 24);
    crc = kCrcTables[7][low & 0xffu] ^ kCrcTables[6][low >> 8 & 0xffu] ^
          kCrcTables[5][low >> 16 & 0xffu] ^ kCrcTables[4][low >> 24] ^
          kCrcTables[3][bytes[4]] ^ kCrcTables[2][bytes[5]] ^ kCrcTables[1][bytes[6]] ^
          kCrcTables[0][bytes[7]];
  }
  for (; size > 0; ++bytes, --size) crc = (crc >> 8) ^ kCrcTables[0][(crc ^ *bytes) & 0xffu];
  return ~crc;
}

}  // namespace mha::detail
