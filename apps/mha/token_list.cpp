#include "token_list.h"

#include <c10/util/Exception.h>
#include <files/input_file.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>

namespace mha::cli {
namespace {

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() &&
         text.compare(text.size() - end.size(), end.size(), end) == 0;
}

/// The contents of a file that someone has named, which may be anything.
std::string text_of(const std::string& path) {
  constexpr int64_t most = 64 << 20;
  detail::InputFile file(path);
  TORCH_CHECK(file.size() <= most, path, ": expected tokens of at most ", most,
              " bytes, found ", file.size());
  std::string text = file.read(0, file.size(), "tokens");
  // Some editors put this mark in front of UTF-8.
  if (text.rfind("\xEF\xBB\xBF", 0) == 0) text.erase(0, 3);
  return text;
}

std::vector<std::string> from_json(const std::string& text, const std::string& path) {
  using nlohmann::json;
  // Refused as soon as it is seen, since a tree of a hostile text takes many times its size.
  const auto expect_flat = [&path](int depth, json::parse_event_t event, json& /*value*/) {
    const bool nested = depth > 0 && (event == json::parse_event_t::array_start ||
                                      event == json::parse_event_t::object_start);
    TORCH_CHECK(!nested, path,
                ": expected a JSON list of strings, found a list or an object "
                "inside of it");
    return true;
  };
  const json list = json::parse(text, expect_flat, /*allow_exceptions=*/false);
  TORCH_CHECK(list.is_array(), path, ": expected a JSON list of strings, found ",
              list.is_discarded() ? "no JSON" : list.type_name());
  std::vector<std::string> tokens;
  for (const json& token : list) {
    TORCH_CHECK(token.is_string(), path, ": expected a JSON list of strings, found ",
                token.type_name(), " at index ", tokens.size());
    tokens.push_back(token.get<std::string>());
  }
  return tokens;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> tokens;
  for (std::string line; std::getline(stream, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    tokens.push_back(line);
  }
  return tokens;
}

}  // namespace

bool is_token_file(const std::string& argument) {
  std::error_code ignored;  // what cannot be a path is no file
  return ends_with(argument, ".json") || ends_with(argument, ".txt") ||
         std::filesystem::exists(argument, ignored);
}

std::vector<std::string> token_list(const std::string& argument) {
  if (is_token_file(argument)) {
    const std::string text = text_of(argument);
    return ends_with(argument, ".json") ? from_json(text, argument) : lines_of(text);
  }
  std::istringstream stream(argument);
  std::vector<std::string> tokens;
  for (std::string token; stream >> token;) tokens.push_back(token);
  return tokens;
}

}  // namespace mha::cli
