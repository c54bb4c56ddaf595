#pragma once

#include <cstdint>

namespace mha::detail {

/// Whether an archive's entry may have the checksum 0, which stands for none: torch.save leaves
/// it where it was told to compute none. Any other is compared.
enum class Checksums : uint8_t { required, optional };

}  // namespace mha::detail
