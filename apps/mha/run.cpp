#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <files/safetensors.h>
#include <fmt/ranges.h>
#include <mha/multi_head_attention.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "command.h"
#include "former_names.h"
#include "input_tensors.h"
#include "layer_call.h"
#include "layer_options.h"
#include "mask_options.h"
#include "memory.h"
#include "option_values.h"
#include "output_file.h"
#include "text.h"
#include "validators.h"

namespace mha::cli {
namespace {

struct RunArguments {
  LayerOptions layer;
  std::string input, output;
  std::string weights = "per-head";
  MaskOptions mask;
  bool json = false;
};

std::string text(const nlohmann::ordered_json& report) {
  std::string lines = layer_text(report["layer"]);
  const auto line = [&lines](const std::string& name, const std::string& content) {
    lines += fmt::format("  {:<9}{}\n", name, content);
  };
  for (const auto& [name, json] : report["inputs"].items()) line(name, tensor_text(json));
  line("mask", report["mask"].get<std::string>());
  lines += fmt::format("{}\n", report["output_file"].get<std::string>());
  for (const auto& [name, json] : report["outputs"].items()) line(name, tensor_text(json));
  const auto unused = report["unused_tensors"].get<std::vector<std::string>>();
  if (!unused.empty()) {
    lines += fmt::format("Not used: {} in {}\n", fmt::join(unused, ", "),
                         report["input_file"].get<std::string>());
  }
  return lines;
}

ExitCode run_layer(const RunArguments& arguments) {
  const c10::NoGradGuard no_grad;
  check_output(arguments.output, arguments.layer.files());
  check_output(arguments.output, files_of(arguments.input));
  const ModelLayer layer = arguments.layer.load();
  MultiHeadAttention module = layer.attention;
  InputTensors input(arguments.input);
  const LayerCall call = read_call(input, arguments.mask, layer);
  const Weights weights = value_of(returned_weights(), arguments.weights);
  check_memory("--return-weights " + arguments.weights, weights_bytes(module, call, weights));
  const AttentionOutput result =
      module->forward(call.query, call.key, call.value, call.mask, weights);
  detail::TensorFile file;
  file.tensors["output"] = result.output;
  if (result.weights.defined()) file.tensors["weights"] = result.weights;
  detail::write_safetensors(arguments.output, file);

  nlohmann::ordered_json report = {
      {"layer", arguments.layer.described(layer)},
      {"input_file", arguments.input},
      {"inputs", described(call)},
      {"mask", stream_text(call.mask)},
      {"output_file", arguments.output},
      {"outputs", nlohmann::ordered_json::object()},
      {"unused_tensors", input.unused()},
  };
  for (const auto& [name, tensor] : file.tensors) report["outputs"][name] = described(tensor);
  print_report(report, arguments.json, text);
  return kSuccess;
}

}  // namespace

Command run_command(CLI::App& program) {
  const auto arguments = std::make_shared<RunArguments>();
  CLI::App* app =
      program.add_subcommand("run", "Run a layer from a weight file over input from a file");
  const auto file = [app](const char* name, std::string& path, const char* what) {
    app->add_option(name, path, what)->required()->check(not_empty())->type_name("FILE");
  };
  arguments->layer.add_to(*app)->required();
  file("--input", arguments->input, "File with the input, of safetensors or torch.save");
  file("--output", arguments->output, "safetensors file for `output` and `weights`");
  one_of(app->add_option("--return-weights", arguments->weights,
                         "Which attention weights to write"),
         names_of(returned_weights()))
      ->capture_default_str();
  app->add_flag("--json", arguments->json, "Write JSON");
  arguments->mask.add_to(*app);
  app->footer(
      "Example: mha run --model model.safetensors --prefix encoder.layer.0.attention \\\n"
      "             --num-heads 12 --input x.safetensors --keep-keys attention_mask \\\n"
      "             --output y.safetensors\n"
      "The input: `query`, `key` and `value`; or `query` or `x` alone, or the file's only "
      "tensor,\n"
      "for self-attention. A mask option's TENSOR is the name of another tensor in that file.\n"
      "Masks combine: a key must be allowed by all of them. Where there are more keys than\n"
      "queries, the last query stands at the last key; with top-left, the first at the first.");
  refuse_former_names(
      *app,
      {{"--weights", "--model"}, {"--heads", "--num-heads"}, {"--maps", "--return-weights"}});
  return {app, [arguments] { return run_layer(*arguments); }};
}

}  // namespace mha::cli
