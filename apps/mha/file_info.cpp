#include "file_info.h"

#include <c10/util/Exception.h>
#include <files/tensor_source.h>
#include <fmt/format.h>
#include <weights/file_layer.h>
#include <weights/find_layers.h>
#include <weights/layer_check.h>
#include <weights/options_metadata.h>

#include <nlohmann/json.hpp>

#include "text.h"

namespace mha::cli {
namespace {

/// What the shapes and names say of one layer, or why they say nothing.
nlohmann::ordered_json layer_information(const detail::TensorSource& file,
                                         const detail::FoundLayer& layer,
                                         WeightFileOptions where) {
  nlohmann::ordered_json json = {{"prefix", layer.prefix},
                                 {"layout", stream_text(layer.layout)}};
  try {
    // What `load` would say, but for the dtypes, which it can convert.
    where.prefix(layer.prefix).convert_dtype(true);
    const auto shapes = detail::parameter_shapes_in(file, layer.layout, where);
    const auto tensors = detail::layout_tensors(file.path(), layer.layout, shapes);
    json["d_model"] = shapes.at("W_q.weight")[1];
    json["width"] = shapes.at("W_q.weight")[0];
    json["kv_width"] = shapes.at("W_k.weight")[0];
    json["bias"] = shapes.count("W_q.bias") != 0;
    const auto& dtype = detail::dtype_of_projections(file, layer.layout, where, tensors);
    json["dtype"] = dtype.name;
    detail::check_layer(file, layer.layout, where, tensors, dtype.name, {});
  } catch (const c10::Error& error) {
    // An error of another file, of which this is the index, starts with that one's path.
    const std::string text = error.what_without_backtrace(), start = file.path() + ": ";
    json["problem"] =
        text.compare(0, start.size(), start) == 0 ? text.substr(start.size()) : text;
  }
  return json;
}

}  // namespace

nlohmann::ordered_json file_information(const std::string& path,
                                        const WeightFileOptions& where) {
  const auto file = detail::open_weights(path, where);
  nlohmann::ordered_json information = {{"file", path},
                                        {"format", file->format()},
                                        {"tensors", file->size()},
                                        {"num_heads", nullptr},
                                        {"num_kv_heads", nullptr},
                                        {"layers", nlohmann::ordered_json::array()}};
  if (const auto heads = detail::num_heads_in(path, file->metadata())) {
    information["num_heads"] = *heads;
    information["num_kv_heads"] =
        detail::num_kv_heads_in(path, file->metadata()).value_or(*heads);
  }
  for (const detail::FoundLayer& layer : detail::find_layers(*file, std::nullopt)) {
    information["layers"].push_back(layer_information(*file, layer, where));
  }
  return information;
}

std::string file_text(const nlohmann::ordered_json& information) {
  const auto& layers = information["layers"];
  std::string lines = fmt::format(
      "{}\n  {} tensors, {}\n", information["file"].get<std::string>(),
      information["tensors"].get<size_t>(), information["format"].get<std::string>());
  if (!information["num_heads"].is_null()) {
    lines += fmt::format("  num_heads {}, num_kv_heads {}\n",
                         information["num_heads"].get<int64_t>(),
                         information["num_kv_heads"].get<int64_t>());
  }
  if (layers.empty()) lines += "  no attention layer\n";
  for (const auto& layer : layers) {
    const auto prefix = layer["prefix"].get<std::string>();
    lines += fmt::format("  {}: {} layout, ", prefix.empty() ? "(no prefix)" : prefix,
                         layer["layout"].get<std::string>());
    if (layer.contains("problem")) {
      lines += layer["problem"].get<std::string>() + "\n";
      continue;
    }
    const auto width = layer["width"].get<int64_t>(),
               kv_width = layer["kv_width"].get<int64_t>();
    lines += fmt::format("d_model {}", layer["d_model"].get<int64_t>());
    if (width != layer["d_model"].get<int64_t>()) lines += fmt::format(", heads of {}", width);
    if (width != kv_width) lines += fmt::format(", of keys {}", kv_width);
    lines += fmt::format(", {}{}\n", layer["bias"].get<bool>() ? "biases, " : "no biases, ",
                         layer["dtype"].get<std::string>());
  }
  return lines;
}

}  // namespace mha::cli
