#pragma once

#include <torch/nn/module.h>

namespace mha::detail {

/// `torch::nn::Module::load` of a module and its children, all or nothing: throws `c10::Error`
/// that lists every parameter and buffer that the archive lacks, has beside the module's, or
/// has in another shape or dtype, with the module unchanged. Tensors stay on the archive's
/// device, as with torch's own modules.
void load_archive(torch::nn::Module& module, torch::serialize::InputArchive& archive);

}  // namespace mha::detail
