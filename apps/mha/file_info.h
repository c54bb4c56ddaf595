#pragma once

#include <mha/weight_file.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace mha::cli {

/// The format of a weight file and the attention layers in it, wherever they lie.
nlohmann::ordered_json file_information(const std::string& path,
                                        const WeightFileOptions& where);

/// The same for a person.
std::string file_text(const nlohmann::ordered_json& information);

}  // namespace mha::cli
