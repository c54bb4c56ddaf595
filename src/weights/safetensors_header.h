#pragma once

#include <string>
#include <string_view>

#include "weights/safetensors.h"

namespace mha::detail {

/// The format's own limit on the header, in bytes.
inline constexpr int64_t kMaxHeaderSize = 100'000'000;

struct SafetensorsHeader {
  TensorEntries entries;
  Metadata metadata;
};

/// Parses the JSON text of a header and checks it against the `data_size` bytes that follow it:
/// nothing that it returns reaches outside them, and the tensors cover them exactly once.
/// Throws `c10::Error` that starts with `path`.
SafetensorsHeader parse_safetensors_header(const std::string& path, std::string_view text,
                                           int64_t data_size);

/// `text` in single quotes for an error message: cut if it is long, and with `\\x1b` for bytes
/// that are not printable ASCII, since a hostile file may address the terminal.
std::string excerpt(std::string_view text);

}  // namespace mha::detail
