#pragma once

#include <vector>

#include "module/projection.h"
#include "module/projection_gradients.h"

// Linear layers in bfloat16 on matrix tiles: input, parameters and output are bfloat16. Each
// number is summed in float32 and rounded once, and depends on no other row of a batch, nor on
// the number of threads.
namespace mha::detail {

/// As `project`.
void project_on_tiles(const std::vector<Projection>& projections, PackedWeights& cache);

/// As `find_gradients`. What several layers give to one input is rounded once too.
void find_gradients_on_tiles(InputGradients& wanted);

}  // namespace mha::detail
