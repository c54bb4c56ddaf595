#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/kernels.h"

namespace mha::detail {

/// (N, H, T, D) with unit stride in D, as the kernels read it: the tensor itself, or a copy.
inline at::Tensor kernel_view(const at::Tensor& tensor) {
  return tensor.size(3) > 1 && tensor.stride(3) != 1 ? tensor.contiguous() : tensor;
}

/// Where the rows of a float32 tensor (N, H, T, ...) lie.
template <typename T>
cpu::Rows<T> kernel_rows(const at::Tensor& tensor) {
  return {tensor.data_ptr<float>(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

/// The same in any storage.
inline cpu::StoredRows stored_rows(const at::Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

/// What a CPU tensor of float32 or a half type is stored as.
inline cpu::Storage storage_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16:
      return cpu::Storage::bfloat16;
    case at::kHalf:
      return cpu::Storage::float16;
    default:
      return cpu::Storage::float32;
  }
}

}  // namespace mha::detail
