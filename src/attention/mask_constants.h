#pragma once

#include <vector>

#include "mask/mask_lists.h"
#include "mask/resolved_mask.h"

// What of a mask a function that is computed again takes apart from it.
namespace mha::detail {

/// All of its tensors, without gradients.
inline std::vector<at::Tensor> constants_of(const ResolvedMask& mask) {
  std::vector<at::Tensor> constants;
  for (const auto* list : tensor_lists(mask)) {
    for (const auto& tensor : *list) constants.push_back(tensor.detach());
  }
  return constants;
}

/// The mask with these in their places.
inline ResolvedMask with_constants(ResolvedMask mask,
                                   const std::vector<at::Tensor>& constants) {
  auto next = constants.begin();
  for (auto* list : tensor_lists(mask)) {
    for (auto& tensor : *list) tensor = *next++;
  }
  return mask;
}

}  // namespace mha::detail
