#pragma once

#include <ATen/core/Tensor.h>
#include <vector>

#include "module/packed_weight.h"

namespace mha::detail {

/// One linear layer applied to tokens: output = input weight^T + bias, in float32 on the CPU,
/// where parameters that are not recorded may be a half type; or all in bfloat16 (see
/// tile_projection.h).
struct Projection {
  at::Tensor input;         // (N, T, inner)
  at::Tensor weight, bias;  // (columns, inner), (columns) or undefined
  size_t slot;              // of the layer in the cache
  at::Tensor
      output;  // (N, T, columns), or split into heads (N, T, H, D); any strides but the last
};

/// Computes all of them in one parallel region, without gradients.
void project(const std::vector<Projection>& projections, PackedWeights& cache);

/// The same, and records them as one node for the gradients of inputs, weights and biases: what
/// several layers give to one input is summed in one product. Gives their outputs.
std::vector<at::Tensor> project_recorded(const std::vector<Projection>& projections,
                                         PackedWeights& cache);

}  // namespace mha::detail
