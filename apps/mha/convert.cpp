#include <files/safetensors.h>
#include <fmt/format.h>
#include <mha/multi_head_attention.h>
#include <mha/weight_file.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "command.h"
#include "former_names.h"
#include "layer_call.h"
#include "layer_options.h"
#include "option_values.h"
#include "output_file.h"
#include "text.h"
#include "validators.h"

namespace mha::cli {
namespace {

struct ConvertArguments {
  LayerOptions layer;
  std::string output, layout = "native", prefix;
  bool json = false;
};

std::string conversion_text(const nlohmann::ordered_json& report) {
  std::string lines = layer_text(report["layer"]);
  lines += fmt::format("{} ({} layout)\n", report["output_file"].get<std::string>(),
                       report["layout"].get<std::string>());
  for (const auto& [name, json] : report["tensors"].items()) {
    lines += fmt::format("  {}  {}\n", name, tensor_text(json));
  }
  return lines;
}

ExitCode convert_layer(const ConvertArguments& arguments) {
  check_output(arguments.output, arguments.layer.files());
  const ModelLayer layer = arguments.layer.load();
  const MultiHeadAttention& module = layer.attention;
  save(module, arguments.output,
       WeightFileOptions()
           .prefix(arguments.prefix)
           .layout(value_of(layouts(), arguments.layout)));

  nlohmann::ordered_json report = {{"layer", arguments.layer.described(layer)},
                                   {"output_file", arguments.output},
                                   {"layout", arguments.layout},
                                   {"tensors", nlohmann::ordered_json::object()}};
  for (const auto& [name, tensor] : detail::read_safetensors(arguments.output).tensors) {
    report["tensors"][name] = described(tensor);
  }
  print_report(report, arguments.json, conversion_text);
  return kSuccess;
}

}  // namespace

Command convert_command(CLI::App& program) {
  const auto arguments = std::make_shared<ConvertArguments>();
  CLI::App* app =
      program.add_subcommand("convert", "Write a layer in another layout, format or dtype");
  arguments->layer.add_to(*app)->required();
  app->add_option("--output", arguments->output, "safetensors file to write")
      ->required()
      ->check(not_empty())
      ->type_name("FILE");
  one_of(app->add_option("--to-layout", arguments->layout, "How to name the weights there"),
         names_of(layouts()))
      ->type_name("NAME")
      ->capture_default_str();
  app->add_option("--to-prefix", arguments->prefix, "Where to put the layer there")
      ->type_name("NAME");
  app->add_flag("--json", arguments->json, "Write JSON");
  app->footer(
      "Example: mha convert --model pytorch_model.bin --prefix h.0.attn --num-heads 12 \\\n"
      "             --output layer.safetensors --to-layout torch --dtype float32\n"
      "The options of the layer are stored too, so that --num-heads is not needed again.");
  refuse_former_names(*app, {{"--weights", "--model"}, {"--heads", "--num-heads"}});
  return {app, [arguments] { return convert_layer(*arguments); }};
}

}  // namespace mha::cli
