#pragma once

#include <mha/attention_map.h>

namespace torch::nn {
class Module;
}

namespace mha::detail {

/// Whether a `MapRecorder` lives in this thread.
bool is_recording();

/// Hands the map of a call of `module` to every recorder that lives in this thread.
void record_map(const torch::nn::Module& module, const AttentionMap& map);

}  // namespace mha::detail
