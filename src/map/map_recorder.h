#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "map/map_state.h"

namespace torch::nn {
class Module;
}

namespace mha::detail {

/// Whether a `MapRecorder` lives in this thread.
bool is_recording();

/// Hands the map of a call of `module` to every recorder that lives in this thread. `value`
/// (N, Hk, S, Dv) and `output` (N, H, L, Dv) are those of the heads; where a recorder asks for
/// gradients, a hook on `output` tells it of each backward.
void record_map(const torch::nn::Module& module, const std::shared_ptr<const MapState>& map,
                const at::Tensor& value, const at::Tensor& output);

}  // namespace mha::detail
