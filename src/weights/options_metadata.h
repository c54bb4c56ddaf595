#pragma once

#include <mha/multi_head_attention.h>

#include <optional>
#include <string>

#include "files/tensor_source.h"

namespace mha::detail {

/// The metadata of a file with the weights of one module: the options that shapes do not tell,
/// as `mha.num_heads` and so on, and `format: pt`, which Python's readers look for.
Metadata metadata_of(const MultiHeadAttentionOptions& options);

/// The number of heads that the metadata names, if any. Throws `c10::Error` that starts with
/// `path` if it is no number.
std::optional<int64_t> num_heads_in(const std::string& path, const Metadata& metadata);

/// The number of key and value heads, likewise.
std::optional<int64_t> num_kv_heads_in(const std::string& path, const Metadata& metadata);

/// Whether W_o has a bias, likewise. Throws if it is no bool.
std::optional<bool> output_bias_in(const std::string& path, const Metadata& metadata);

/// How heads are rotated, likewise.
std::optional<RotaryOptions> rotary_in(const std::string& path, const Metadata& metadata);

/// Sets the other options that the metadata names. Throws like `num_heads_in`.
void apply_metadata(const std::string& path, const Metadata& metadata,
                    MultiHeadAttentionOptions& options);

}  // namespace mha::detail
