#pragma once

#include <mha/layout.h>

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace mha::detail {

/// The description that `json` is, as `Layout::from_file` documents it, not yet checked for
/// what it means. Throws `c10::Error` that starts with `where` and names the member.
LayoutDescription layout_from_json(const std::string& where, const nlohmann::json& json);

}  // namespace mha::detail
