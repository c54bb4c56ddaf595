#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "attention/attention.h"

namespace mha::detail {

/// A call as a node of autograd's graph finds it again in its backward.
struct SavedCall {
  std::vector<at::Tensor> tensors;  ///< query, key and value first
  ResolvedMask mask;
  AttentionCall call;

  /// Those that may get gradients: query, key, value, the mask's added terms and the sinks, if
  /// any.
  std::vector<at::Tensor> inputs() const;
};

/// Keeps a call in a node: `tensors`, the mask's and the sinks by `save_for_backward`, which
/// notices changes in place and lets go of them after the backward.
void save_call(torch::autograd::AutogradContext* context, std::vector<at::Tensor> tensors,
               ResolvedMask mask, AttentionCall call);

SavedCall saved_call(torch::autograd::AutogradContext* context);

}  // namespace mha::detail
