#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace mha::cli {

/// The largest difference between two tensors of one shape, and where it is.
struct Difference {
  double largest = 0;  // infinite where one of a pair is NaN or the infinities differ
  std::vector<int64_t> at;
  double actual = 0, expected = 0;  // the two values there
};

/// Compares in float64. Equal infinities and two NaN do not differ; empty tensors neither.
Difference largest_difference(const at::Tensor& actual, const at::Tensor& expected);

}  // namespace mha::cli
