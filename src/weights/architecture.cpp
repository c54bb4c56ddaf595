#include "weights/architecture.h"

#include <c10/util/Exception.h>

#include "weights/architectures.h"

namespace mha::detail {
namespace {

nlohmann::json with_inherited(const nlohmann::json& table, const std::string& name) {
  nlohmann::json own = table.at(name);
  const auto like = own.find("like");
  if (like == own.end()) return own;
  nlohmann::json whole = with_inherited(table, like->get<std::string>());
  own.erase("like");
  whole.update(own);
  return whole;
}

const nlohmann::json& architectures() {
  static const nlohmann::json resolved = [] {
    const auto table = nlohmann::json::parse(kArchitectures);
    nlohmann::json all = nlohmann::json::object();
    for (const auto& [name, entry] : table.items()) all[name] = with_inherited(table, name);
    all.erase("any");
    return all;
  }();
  return resolved;
}

}  // namespace

const nlohmann::json* find_architecture(const std::string& model_type) {
  const auto found = architectures().find(model_type);
  return found == architectures().end() ? nullptr : &*found;
}

std::vector<std::string> architecture_names() {
  std::vector<std::string> names;
  for (const auto& [name, entry] : architectures().items()) names.push_back(name);
  return names;
}

}  // namespace mha::detail
