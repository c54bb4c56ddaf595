#pragma once

#include <mha/weight_file.h>

#include <string>

namespace mha::detail {

/// The module that one layer of a file holds, of which the options are known beforehand: the
/// file must be as they say. No memory is taken for it before that is checked. The dtype is
/// that of `options`, or that of the file.
MultiHeadAttention load_as(const std::string& path, MultiHeadAttentionOptions options,
                           const WeightFileOptions& where);

}  // namespace mha::detail
