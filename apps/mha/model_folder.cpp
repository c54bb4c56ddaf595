#include "model_folder.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <mha/model_config.h>
#include <weights/read_config.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "output_file.h"
#include "text.h"

namespace mha::cli {
namespace {

constexpr int64_t kMaxLayers = 1024;  // a configuration may claim any number

std::string config_of(const std::string& folder) {
  return (std::filesystem::path(folder) / "config.json").string();
}

std::string without(const std::string& start, const std::string& text) {
  return text.compare(0, start.size(), start) == 0 ? text.substr(start.size()) : text;
}

// By the configuration, since layer 0 may be of a kind that is not computed; where that tells
// nothing, layer 0 says why.
int64_t layers_of(const std::string& folder, const nlohmann::json& config,
                  const std::string& part) {
  try {
    return std::min(detail::num_layers_in_config(config_of(folder), config, part), kMaxLayers);
  } catch (const c10::Error&) {
    return 1;
  }
}

nlohmann::ordered_json layer_of(const std::string& folder, const nlohmann::json& config,
                                int64_t layer, const std::string& part) {
  nlohmann::ordered_json json = {{"layer", layer}, {"part", part}};
  try {
    const auto options = detail::options_in_config(config_of(folder), config, layer, part);
    json["model_type"] = options.model_type;
    json["kind"] = options.kind;
    json["layout"] = options.layout.name();
    json["mask"] = stream_text(options.mask);
    if (options.chunk) json["chunk"] = *options.chunk;
    json["position_bias"] = options.position_bias.has_value();
    // On no device: what it would be, without its weights.
    const MultiHeadAttention module(
        MultiHeadAttentionOptions(options.attention).device(at::kMeta), detail::Undrawn{});
    const std::string text = stream_text(module);
    json["attention"] = text.substr(0, text.find(", dtype=")) + ")";
  } catch (const c10::Error& error) {
    json["problem"] = without(config_of(folder) + ": ", error.what_without_backtrace());
  }
  return json;
}

}  // namespace

bool is_model_folder(const std::string& path) {
  std::error_code ignored;
  return !path.empty() && std::filesystem::is_directory(path, ignored);
}

std::vector<std::string> files_of_model(const std::string& folder,
                                        detail::Checksums checksums) {
  auto files = files_of(weights_of_model(folder), checksums);
  files.push_back(config_of(folder));
  return files;
}

nlohmann::ordered_json folder_information(const std::string& folder) {
  nlohmann::ordered_json information = {{"folder", folder},
                                        {"layers", nlohmann::ordered_json::array()}};
  const nlohmann::json config = detail::read_config(config_of(folder));
  auto parts = detail::parts_in_config(config_of(folder), config);
  if (parts.empty()) parts.push_back("");
  for (const std::string& part : parts) {
    const int64_t num_layers = layers_of(folder, config, part);
    for (int64_t layer = 0; layer < num_layers; ++layer) {
      information["layers"].push_back(layer_of(folder, config, layer, part));
    }
  }
  return information;
}

std::string folder_text(const nlohmann::ordered_json& information) {
  std::string lines = information["folder"].get<std::string>() + "\n";
  const auto text = [](const nlohmann::ordered_json& json) { return json.get<std::string>(); };
  std::string last;
  for (const auto& layer : information["layers"]) {
    const std::string part = text(layer["part"]);
    const std::string number = fmt::format("  layer {}{}{}: ", layer["layer"].get<int64_t>(),
                                           part.empty() ? "" : " ", part);
    if (layer.contains("problem")) {
      const std::string problem = text(layer["problem"]);
      lines += number + (problem == last ? "the same" : problem) + "\n";
      last = problem;
      continue;
    }
    const auto chunks = layer.contains("chunk")
                            ? fmt::format(" & chunks of {}", layer["chunk"].get<int64_t>())
                            : std::string();
    const std::string what =
        fmt::format("{}, {} layout, mask {}{}{}\n    {}", text(layer["kind"]),
                    text(layer["layout"]), text(layer["mask"]), chunks,
                    layer["position_bias"].get<bool>() ? " & a learned bias" : "",
                    text(layer["attention"]));
    lines += number + (what == last ? "the same" : what) + "\n";
    last = what;
  }
  return lines;
}

}  // namespace mha::cli
