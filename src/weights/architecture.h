#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace mha::detail {

/// The table of `architectures.h`, with the members that an architecture has from another.
/// Null if there is none of that name.
const nlohmann::json* find_architecture(const std::string& model_type);

/// The names in the table, in their order, without those that stand for no model.
std::vector<std::string> architecture_names();

}  // namespace mha::detail
