#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

namespace mha::detail {

enum class Path {
  plain,  ///< the composition of ATen calls
  fused,  ///< the CPU kernels
  torch,  ///< LibTorch's own fused attention where it serves a call, else the composition
};

struct PathChoice {
  Path path;
  const char* reason;  ///< a clause that completes "because ..."
};

/// The one place that decides how a call is computed, from what is known before any number is
/// read. `MHA_PATH=plain` or `torch` in the environment chooses that path. `followed`: what
/// `is_followed` says of the call's tensors.
PathChoice choose_path(at::Device device, at::ScalarType dtype, int64_t head_dim,
                       int64_t value_dim, bool followed = false);

/// The same for a projection with a weight of `dtype`.
PathChoice choose_projection_path(at::Device device, at::ScalarType dtype,
                                  bool followed = false);

/// Whether a trace is being recorded (torch::jit::tracer). It holds for other numbers than
/// those at hand, too.
bool is_tracing();

/// Whether somebody follows what becomes of the tensors, operator by operator: a trace, or
/// forward-mode derivatives of a tensor. The kernels are no operators. Tensors may be
/// undefined.
bool is_followed(at::TensorList tensors);

/// What `MHA_PATH` in the environment says, if it keeps every call from the CPU kernels.
std::optional<Path> forced_path();
inline bool kernels_are_off() {
  return forced_path().has_value();
}

}  // namespace mha::detail
