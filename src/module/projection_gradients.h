#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace mha::detail {

/// What is wanted of one linear layer, output = input weight^T + bias, and what is found.
struct LayerGradients {
  at::Tensor grad_output;  // (N, T, columns) or (N, T, H, D)
  at::Tensor weight;       // (columns, inner)
  bool wants_weight, wants_bias;
  at::Tensor grad_weight = {}, grad_bias = {};
};

/// The layers that read one input, (N, T, inner), whose gradient is the sum of theirs.
struct InputGradients {
  at::Tensor input;
  bool wants_input;
  std::vector<LayerGradients> layers;
  at::Tensor grad_input = {};
};

/// grad_input = sum of grad_output weight; grad_weight = grad_output^T input; grad_bias = the
/// sum of grad_output over its rows. By the kernels, in float32 or bfloat16 on the CPU. The
/// order of the sums does not depend on the number of threads.
void find_gradients(InputGradients& wanted);

/// The same by ATen, whose calls have gradients themselves.
void find_gradients_by_aten(InputGradients& wanted);

}  // namespace mha::detail
