#pragma once

#include <string>
#include <string_view>

#include "files/tensor_source.h"

namespace mha::detail {

/// Limits on the header in bytes, stricter than the format's own of 100,000,000: on its text,
/// and on what is kept of it, which is enough for 40,000 tensors. So a hostile file is refused
/// within a second and 16 MiB.
inline constexpr int64_t kMaxHeaderSize = 16 << 20;
inline constexpr size_t kMaxKeptSize = 10 << 20;

struct SafetensorsHeader {
  TensorEntries entries;
  Metadata metadata;
};

/// Parses the JSON text of a header and checks it against the `data_size` bytes that follow it:
/// nothing that it returns reaches outside them, and the tensors cover them exactly once.
/// Throws `c10::Error` that starts with `path`.
SafetensorsHeader parse_safetensors_header(const std::string& path, std::string_view text,
                                           int64_t data_size);

}  // namespace mha::detail
