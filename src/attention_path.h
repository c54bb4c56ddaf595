#pragma once

#include <ATen/core/Tensor.h>

namespace mha::detail {

enum class Path {
  plain,  ///< the composition of ATen calls
  fused,  ///< the CPU kernels
};

struct PathChoice {
  Path path;
  const char* reason;  ///< a clause that completes "because ..."
};

/// The one place that decides how a call is computed, from what is known before any number is
/// read. `MHA_PATH=plain` in the environment always chooses the plain path.
PathChoice choose_path(const at::Tensor& query, const at::Tensor& value);

/// Whether `MHA_PATH=plain` is set in the environment.
bool plain_is_forced();

}  // namespace mha::detail
