#pragma once

#include <files/checksums.h>

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace mha::cli {

bool is_model_folder(const std::string& path);

/// Its config.json and the files of its weights.
std::vector<std::string> files_of_model(
    const std::string& folder, detail::Checksums checksums = detail::Checksums::required);

/// The architecture of the model in a folder, and each of its layers: kind, options and mask,
/// or why it has none that can be computed.
nlohmann::ordered_json folder_information(const std::string& folder);

/// The same for a person.
std::string folder_text(const nlohmann::ordered_json& information);

}  // namespace mha::cli
