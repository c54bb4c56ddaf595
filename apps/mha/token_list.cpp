#include "token_list.h"

#include <c10/util/Exception.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

namespace mha::cli {
namespace {

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() &&
         text.compare(text.size() - end.size(), end.size(), end) == 0;
}

std::vector<std::string> from_json(std::istream& stream, const std::string& path) {
  const nlohmann::json list =
      nlohmann::json::parse(stream, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK(list.is_array(), path, ": expected a JSON list of strings, found ",
              list.is_discarded() ? "no JSON" : list.type_name());
  std::vector<std::string> tokens;
  for (const nlohmann::json& token : list) {
    TORCH_CHECK(token.is_string(), path, ": expected a JSON list of strings, found ",
                token.type_name(), " at index ", tokens.size());
    tokens.push_back(token.get<std::string>());
  }
  return tokens;
}

std::vector<std::string> lines_of(std::istream& stream) {
  std::vector<std::string> tokens;
  for (std::string line; std::getline(stream, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    tokens.push_back(line);
  }
  return tokens;
}

}  // namespace

std::vector<std::string> token_list(const std::string& argument, const std::string& option) {
  std::error_code ignored;  // what cannot be a path is no file
  const bool json = ends_with(argument, ".json");
  const bool named_as_file = json || ends_with(argument, ".txt");
  if (named_as_file || std::filesystem::exists(argument, ignored)) {
    std::ifstream stream(argument);
    TORCH_CHECK(stream && !std::filesystem::is_directory(argument, ignored), option,
                ": cannot read ", argument);
    return json ? from_json(stream, argument) : lines_of(stream);
  }
  std::istringstream stream(argument);
  std::vector<std::string> tokens;
  for (std::string token; stream >> token;) tokens.push_back(token);
  return tokens;
}

}  // namespace mha::cli
