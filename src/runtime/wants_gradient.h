#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace mha::detail {

/// Whether any of the tensors, which may be undefined, asks for its gradient.
inline bool any_requires_grad(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

/// The same where gradients are recorded.
template <typename... Tensors>
bool wants_gradient(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (... || tensors.requires_grad());
}

}  // namespace mha::detail
