#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace mha::detail {

/// Computes results from inputs, which get gradients, and from tensors that get none. Which
/// results are undefined may depend on which inputs require gradients, not on numbers. It
/// computes the same again when it is called again.
using Recomputable = std::function<std::vector<at::Tensor>(
    const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& constants)>;

/// What `function` gives, of which autograd keeps the inputs alone: a backward computes the
/// function again, and if it is recorded itself it keeps no more, so that gradients of any
/// order take memory for one call of the function at a time. The tensors are saved, so that
/// changes in place are noticed.
std::vector<at::Tensor> recomputed(const Recomputable& function,
                                   const std::vector<at::Tensor>& inputs,
                                   const std::vector<at::Tensor>& constants);

/// Gradients of the inputs, `recomputed` from these and from the results' gradients, which may
/// be undefined: undefined for inputs that require none and those that no gradient reaches.
std::vector<at::Tensor> recomputed_gradients(const Recomputable& function,
                                             const std::vector<at::Tensor>& inputs,
                                             const std::vector<at::Tensor>& grad_results,
                                             const std::vector<at::Tensor>& constants);

}  // namespace mha::detail
