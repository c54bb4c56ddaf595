#pragma once

#include <mha/model_config.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace mha::detail {

// What `model_config.h` has, of a configuration that was read once: many layers of a large one
// would cost its parsing each.

/// The object in a config.json. Throws `c10::Error` that starts with the path.
nlohmann::json read_config(const std::string& path);

ModelLayerOptions options_in_config(const std::string& path, const nlohmann::json& config,
                                    int64_t layer, const std::string& part);
int64_t num_layers_in_config(const std::string& path, const nlohmann::json& config,
                             const std::string& part);
std::vector<std::string> parts_in_config(const std::string& path, const nlohmann::json& config);

}  // namespace mha::detail
