#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace mha::detail {

/// Gives part `i` of a tensor as a view. Parts may overlap.
using PartOf = std::function<at::Tensor(const at::Tensor& tensor, size_t i)>;

/// The first `count` parts of a tensor. Autograd has one node for all of them, so that their
/// gradients are written in their places once, instead of each beside zeros.
std::vector<at::Tensor> parts_of(const at::Tensor& tensor, size_t count, const PartOf& part_of);

/// The sum of parts in their places, in ascending order. Undefined ones are zeros; one at least
/// is defined.
at::Tensor sum_of_parts(const std::vector<at::Tensor>& parts, at::IntArrayRef sizes,
                        const PartOf& part_of);

}  // namespace mha::detail
