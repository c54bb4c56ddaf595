#pragma once

#include <cstdint>
#include <vector>

#include "support/expect.h"

// Tensors that tests write by hand, draw by a seed or spoil.
namespace mha::test {

inline at::Tensor numbers(const std::vector<int64_t>& values) {
  return torch::tensor(values, at::kLong);
}

inline at::Tensor bools(const std::vector<int64_t>& values) {
  return numbers(values).to(at::kBool);
}

/// A copy whose storage says that it holds less than the tensor needs.
inline at::Tensor with_freed_memory(const at::Tensor& tensor) {
  auto copy = tensor.clone();
  copy.storage().unsafeGetStorageImpl()->set_nbytes(1);
  return copy;
}

/// Query, key and value of a call, (N, H, L or S, 8).
struct CallInputs {
  at::Tensor query, key, value;
};

inline CallInputs draw_call_inputs(uint64_t seed, const Sizes& sizes, at::ScalarType dtype) {
  Random random(seed);
  return {random.normal({sizes.n, sizes.h, sizes.l, 8}, dtype),
          random.normal({sizes.n, sizes.h, sizes.s, 8}, dtype),
          random.normal({sizes.n, sizes.h, sizes.s, 8}, dtype)};
}

}  // namespace mha::test
