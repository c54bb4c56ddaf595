#include "layer_options.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <weights/find_layers.h>
#include <weights/options_metadata.h>

#include <nlohmann/json.hpp>

#include "model_folder.h"
#include "option_values.h"
#include "output_file.h"
#include "text.h"
#include "validators.h"

namespace mha::cli {

CLI::Option* LayerOptions::add_to(CLI::App& app) {
  constexpr const char* group = "Layer";
  CLI::Option* file =
      app.add_option("--model", file_,
                     "File with the layer's weights, of safetensors or torch.save,\n"
                     "or a model's folder, whose config.json says the rest")
          ->check(not_empty())
          ->type_name("FILE")
          ->group(group);
  app.add_option("--layer", layer_, "The layer of that folder's model, from 0 on")
      ->check(integer_from(0))
      ->needs(file)
      ->group(group);
  app.add_option("--part", part_, "Which attention of it: encoder, decoder, cross, ...")
      ->needs(file)
      ->type_name("NAME")
      ->group(group);
  app.add_option("--prefix", prefix_, "Where the layer lies in that file")
      ->needs(file)
      ->type_name("NAME")
      ->group(group);
  CLI::Option* layout = one_of(app.add_option("--layout", layout_,
                                              "How its weights are named; default: detected"),
                               names_of(layouts()))
                            ->type_name("NAME")
                            ->needs(file)
                            ->group(group);
  app.add_option("--layout-file", layout_file_, "JSON file that says so: see Layout::from_file")
      ->check(not_empty())
      ->type_name("FILE")
      ->needs(file)
      ->excludes(layout)
      ->group(group);
  app.add_option("--num-heads", num_heads_, "Number of heads; default: as the file says")
      ->check(integer_from(1))
      ->needs(file)
      ->group(group);
  rotary_.add_to(app)->needs(file)->group(group);
  scores_.add_to(app, file);
  one_of(app.add_option("--dtype", dtype_, "Convert its weights; default: as in the file"),
         names_of(floating_dtypes()))
      ->needs(file)
      ->group(group);
  reading_.add_to(app, file);
  return file;
}

WeightFileOptions LayerOptions::where() const {
  WeightFileOptions where = reading_.where();
  where.prefix(prefix_).convert_dtype(!dtype_.empty());
  if (!layout_.empty()) where.layout(value_of(layouts(), layout_));
  if (!layout_file_.empty()) where.layout(Layout::from_file(layout_file_));
  return where;
}

/// Names the option, where the library would name its argument.
void LayerOptions::check_num_heads() const {
  if (num_heads_) return;
  const auto file = detail::open_weights(file_, where());
  detail::find_layout(*file, where());  // a wrong prefix is the first thing to say
  TORCH_CHECK(detail::num_heads_in(file_, file->metadata()),
              "--num-heads: expected a number, which ", file_, " does not tell, found none");
}

ModelLayer LayerOptions::load_of_model() const {
  TORCH_CHECK(layer_.has_value(), "--layer: expected the number of a layer of the model in ",
              file_, ", found none");
  const std::pair<const char*, bool> given[] = {{"--prefix", !prefix_.empty()},
                                                {"--layout", !layout_.empty()},
                                                {"--layout-file", !layout_file_.empty()},
                                                {"--num-heads", num_heads_.has_value()},
                                                {"--rotary", rotary_.rotary().has_value()},
                                                {scores_.given(), scores_.given() != nullptr}};
  for (const auto& [option, is_given] : given) {
    TORCH_CHECK(!is_given, option, ": expected it with a file, found the folder ", file_,
                ", whose config.json says it");
  }
  ModelLayerLoadOptions options;
  options.part(part_)
      .ignored(reading_.ignored())
      .missing_checksums(reading_.missing_checksums());
  if (!dtype_.empty()) options.dtype(value_of(floating_dtypes(), dtype_));
  return load_layer(file_, *layer_, options);
}

std::vector<std::string> LayerOptions::files() const {
  const auto checksums =
      reading_.missing_checksums() ? detail::Checksums::optional : detail::Checksums::required;
  return is_model_folder(file_) ? files_of_model(file_, checksums) : files_of(file_, checksums);
}

ModelLayer LayerOptions::load() const {
  if (is_model_folder(file_)) return load_of_model();
  TORCH_CHECK(!layer_ && part_.empty(), layer_ ? "--layer" : "--part",
              ": expected it with a model's folder, found the file ", file_);
  const auto rotary = rotary_.rotary();
  check_num_heads();
  MultiHeadAttentionOptions options = options_from_file(file_, num_heads_, where());
  if (rotary) options.rotary(rotary);
  scores_.apply_to(options, file_, where());
  if (!dtype_.empty()) options.dtype(value_of(floating_dtypes(), dtype_));
  MultiHeadAttention module(options, detail::Undrawn{});
  mha::load(module, file_, where());
  module->eval();
  const Layout layout = detail::find_layout(*detail::open_weights(file_, where()), where());
  return {{"", 0, "", options, layout, {prefix_}, Mask(), std::nullopt, {}}, module};
}

nlohmann::ordered_json LayerOptions::described(const ModelLayer& layer) const {
  const MultiHeadAttention& module = layer.attention;
  const auto& rotary = module->options.rotary();
  nlohmann::ordered_json json = {
      {"file", file_},
      {"prefix", layer.options.prefixes.front()},
      {"layout", layer.options.layout.name()},
      {"d_model", module->options.d_model()},
      {"heads", module->options.num_heads()},
      {"kv_heads", module->num_kv_heads()},
      {"head_dim", module->head_dim()},
      {"dtype", dtype_text(module->W_q->weight.scalar_type())},
      {"rotary", rotary ? nlohmann::ordered_json(stream_text(*rotary)) : nullptr}};
  if (module->v_head_dim() != module->head_dim()) json["v_head_dim"] = module->v_head_dim();
  if (layer.options.chunk) json["chunk"] = *layer.options.chunk;
  if (const auto scale = module->options.scale()) json["scale"] = *scale;
  if (module->options.softcap() > 0) json["softcap"] = module->options.softcap();
  if (module->options.qk_norm() != QKNorm::none) {
    json["qk_norm_eps"] = module->options.qk_norm_eps();
  }
  if (!layer.options.model_type.empty()) {
    json["model_type"] = layer.options.model_type;
    json["layer"] = *layer_;
    json["kind"] = layer.options.kind;
  }
  return json;
}

std::string layer_text(const nlohmann::ordered_json& layer) {
  const auto number = [&](const char* name) { return layer[name].get<int64_t>(); };
  const auto prefix = layer["prefix"].get<std::string>();
  const auto groups = number("kv_heads") == number("heads")
                          ? std::string()
                          : fmt::format(" sharing {} of keys", number("kv_heads"));
  const auto values = layer.contains("v_head_dim")
                          ? fmt::format(", values of {}", number("v_head_dim"))
                          : std::string();
  std::string rotary;
  if (!layer["rotary"].is_null()) {
    rotary = layer["rotary"].get<std::string>();
  } else if (layer["layout"] == Layout::llama.name() && !layer.contains("model_type")) {
    // Nothing in the file says so, and without it the numbers are another model's.
    rotary = "none, though models of the llama layout rotate queries and keys: see --rotary";
  }
  if (!rotary.empty()) rotary = fmt::format("  {:<9}{}\n", "rotary", rotary);
  if (layer.contains("chunk")) {
    rotary += fmt::format("  {:<9}{} tokens attend to each other\n", "chunks", number("chunk"));
  }
  for (const auto& [member, shown] :
       {std::pair{"scale", "scale"}, std::pair{"softcap", "softcap"},
        std::pair{"qk_norm_eps", "norm eps"}}) {
    if (!layer.contains(member)) continue;
    rotary += fmt::format("  {:<9}{}\n", shown, layer[member].get<double>());
  }
  if (layer.contains("model_type")) {
    rotary = fmt::format("  {:<9}{}, layer {}, {}\n", "model",
                         layer["model_type"].get<std::string>(), number("layer"),
                         layer["kind"].get<std::string>()) +
             rotary;
  }
  return fmt::format("{}{}{}\n  {:<9}d_model {}, {} heads of size {}{}{}, {}\n{}",
                     layer["file"].get<std::string>(), prefix.empty() ? "" : ": ", prefix,
                     "layer", number("d_model"), number("heads"), number("head_dim"), values,
                     groups, layer["dtype"].get<std::string>(), rotary);
}

}  // namespace mha::cli
