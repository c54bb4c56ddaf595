#include "layer_options.h"

#include <files/tensor_source.h>
#include <fmt/format.h>
#include <weights/layout.h>

#include <nlohmann/json.hpp>

#include "text.h"
#include "validators.h"

namespace mha::cli {
namespace {

constexpr at::ScalarType kFloatingTypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

}  // namespace

std::vector<std::string> layout_names() {
  std::vector<std::string> names;
  for (const Layout layout : detail::kLayouts) names.push_back(stream_text(layout));
  return names;
}

std::optional<Layout> layout_named(const std::string& name) {
  for (const Layout layout : detail::kLayouts) {
    if (stream_text(layout) == name) return layout;
  }
  return std::nullopt;
}

CLI::Option* LayerOptions::add_to(CLI::App& app, const char* file_option) {
  CLI::Option* file =
      app.add_option(file_option, file_, "File with the layer, of safetensors or torch.save")
          ->type_name("FILE");
  app.add_option("--prefix", prefix_, "Where the layer lies in that file")->needs(file);
  one_of(app.add_option("--layout", layout_, "How the weights are named; default: detected"),
         layout_names())
      ->needs(file);
  app.add_option("--heads", heads_, "Number of heads, unless the weight file says it")
      ->check(integer_from(1))
      ->needs(file);
  rotary_.add_to(app)->needs(file);
  std::vector<std::string> dtypes;
  for (const at::ScalarType type : kFloatingTypes) dtypes.push_back(dtype_text(type));
  one_of(app.add_option("--dtype", dtype_, "Convert the weights; default: as in the file"),
         dtypes)
      ->needs(file);
  return file;
}

WeightFileOptions LayerOptions::where() const {
  WeightFileOptions where;
  where.prefix(prefix_).convert_dtype(!dtype_.empty());
  if (const auto layout = layout_named(layout_)) where.layout(*layout);
  return where;
}

MultiHeadAttention LayerOptions::load() const {
  const auto rotary = rotary_.rotary();
  MultiHeadAttentionOptions options = options_from_file(file_, heads_, where());
  if (rotary) options.rotary(rotary);
  for (const at::ScalarType type : kFloatingTypes) {
    if (dtype_text(type) == dtype_) options.dtype(type);
  }
  MultiHeadAttention module(options, detail::Undrawn{});
  mha::load(module, file_, where());
  module->eval();
  return module;
}

nlohmann::ordered_json LayerOptions::described(const MultiHeadAttention& module) const {
  const auto layout = detail::find_layout(*detail::open_tensors(file_), where());
  const auto& rotary = module->options.rotary();
  return {{"file", file_},
          {"prefix", prefix_},
          {"layout", stream_text(layout)},
          {"d_model", module->options.d_model()},
          {"heads", module->options.num_heads()},
          {"kv_heads", module->num_kv_heads()},
          {"head_dim", module->head_dim()},
          {"dtype", dtype_text(module->W_q->weight.scalar_type())},
          {"rotary", rotary ? nlohmann::ordered_json(stream_text(*rotary)) : nullptr}};
}

std::string layer_text(const nlohmann::ordered_json& layer) {
  const auto number = [&](const char* name) { return layer[name].get<int64_t>(); };
  const auto prefix = layer["prefix"].get<std::string>();
  const auto groups = number("kv_heads") == number("heads")
                          ? std::string()
                          : fmt::format(" sharing {} of keys", number("kv_heads"));
  std::string rotary;
  if (!layer["rotary"].is_null()) {
    rotary = layer["rotary"].get<std::string>();
  } else if (layer["layout"] == stream_text(Layout::llama)) {
    // Nothing in the file says so, and without it the numbers are another model's.
    rotary = "none, though models of the llama layout rotate queries and keys: see --rotary";
  }
  if (!rotary.empty()) rotary = fmt::format("  {:<9}{}\n", "rotary", rotary);
  return fmt::format("{}{}{}\n  {:<9}d_model {}, {} heads of size {}{}, {}\n{}",
                     layer["file"].get<std::string>(), prefix.empty() ? "" : ": ", prefix,
                     "layer", number("d_model"), number("heads"), number("head_dim"), groups,
                     layer["dtype"].get<std::string>(), rotary);
}

}  // namespace mha::cli
