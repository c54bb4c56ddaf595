#pragma once

#include <mha/rotary.h>

#include <cstdint>
#include <optional>
#include <string>

#include "weights/config_value.h"

namespace mha::detail {

/// How the configuration has a layer of that kind rotate heads of that size, in the form that
/// transformers 5 writes (`rope_parameters`, by kind where these differ) and in the older one
/// (`rope_theta`, `rope_scaling`). Nothing where the architecture does not rotate. Throws
/// `c10::Error` that names a type or a number that is not known.
std::optional<RotaryOptions> rotary_in_config(const ConfigValues& values,
                                              const std::string& kind, int64_t head_dim);

}  // namespace mha::detail
