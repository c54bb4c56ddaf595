#include "layer_options.h"

#include <c10/util/Exception.h>
#include <files/tensor_source.h>
#include <fmt/format.h>
#include <weights/layout.h>
#include <weights/options_metadata.h>

#include <nlohmann/json.hpp>

#include "option_values.h"
#include "text.h"
#include "validators.h"

namespace mha::cli {

CLI::Option* LayerOptions::add_to(CLI::App& app) {
  constexpr const char* group = "Layer";
  CLI::Option* file =
      app.add_option("--model", file_,
                     "File with the layer's weights, of safetensors or torch.save")
          ->check(not_empty())
          ->type_name("FILE")
          ->group(group);
  app.add_option("--prefix", prefix_, "Where the layer lies in that file")
      ->needs(file)
      ->type_name("NAME")
      ->group(group);
  one_of(app.add_option("--layout", layout_, "How its weights are named; default: detected"),
         names_of(layouts()))
      ->needs(file)
      ->group(group);
  app.add_option("--num-heads", num_heads_, "Number of heads; default: as the file says")
      ->check(integer_from(1))
      ->needs(file)
      ->group(group);
  rotary_.add_to(app)->needs(file)->group(group);
  one_of(app.add_option("--dtype", dtype_, "Convert its weights; default: as in the file"),
         names_of(floating_dtypes()))
      ->needs(file)
      ->group(group);
  return file;
}

WeightFileOptions LayerOptions::where() const {
  WeightFileOptions where;
  where.prefix(prefix_).convert_dtype(!dtype_.empty());
  if (!layout_.empty()) where.layout(value_of(layouts(), layout_));
  return where;
}

/// Names the option, where the library would name its argument.
void LayerOptions::check_num_heads() const {
  if (num_heads_) return;
  const auto file = detail::open_tensors(file_);
  detail::find_layout(*file, where());  // a wrong prefix is the first thing to say
  TORCH_CHECK(detail::num_heads_in(file_, file->metadata()),
              "--num-heads: expected a number, which ", file_, " does not tell, found none");
}

MultiHeadAttention LayerOptions::load() const {
  const auto rotary = rotary_.rotary();
  check_num_heads();
  MultiHeadAttentionOptions options = options_from_file(file_, num_heads_, where());
  if (rotary) options.rotary(rotary);
  if (!dtype_.empty()) options.dtype(value_of(floating_dtypes(), dtype_));
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
