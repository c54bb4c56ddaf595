#pragma once

#include <vector>

#include "mask/resolved_mask.h"
#include "support/expect.h"

// Masks of one list each, for what must hold of every list of a resolved mask.
namespace mha::test {

struct MaskSample {
  const char* name;
  std::vector<at::Tensor> detail::MaskLists::*list;
  Mask mask;
};

/// At least one for each list, which holds its terms alone, but for documents, which come in
/// two. Each blocks some pairs, if its list can, and leaves some open. N = 2, H = 2, L > 1, S
/// > 3.
std::vector<MaskSample> mask_samples(const Sizes& sizes);

detail::ResolvedMask resolve(const Mask& mask, const Sizes& sizes);

}  // namespace mha::test
