#pragma once

#include <mha/weight_file.h>

#include <optional>
#include <string_view>
#include <vector>

#include "weights/file_layer.h"

namespace mha::detail {

/// Numbers of heads, which the metadata may be silent about.
struct HeadNumbers {
  std::optional<int64_t> num_heads, num_kv_heads;
};

/// Throws one error with all the ways in which the layer at `options.prefix()` differs from
/// what is expected; with a module, its rotary positions too.
void check_layer(const TensorSource& file, const Layout& layout,
                 const WeightFileOptions& options, const std::vector<FileTensor>& expected,
                 std::string_view dtype, const HeadNumbers& heads,
                 const MultiHeadAttentionImpl* module = nullptr);

/// The dtype that holds the numbers of all projections. Throws `c10::Error` that names the
/// tensor if one of the layer is of none that is floating, or if the file has none of them.
const DtypeInfo& dtype_of_projections(const TensorSource& file, const Layout& layout,
                                      const WeightFileOptions& options,
                                      const std::vector<FileTensor>& tensors);

}  // namespace mha::detail
