#pragma once

#include <ATen/TracerMode.h>
#include <ATen/ops/tensor.h>
#include <c10/core/ScalarType.h>

#include <vector>

namespace mha::detail {

/// Numbers of ours as a tensor on the CPU of their own dtype. A trace, which sees operators
/// alone, would take it for memory that nobody wrote, so it becomes a constant of the trace.
template <typename T>
at::Tensor constant(const std::vector<T>& numbers) {
  const at::tracer::impl::NoTracerDispatchMode untraced;
  return at::tensor(numbers, at::TensorOptions(c10::CppTypeToScalarType<T>::value));
}

}  // namespace mha::detail
