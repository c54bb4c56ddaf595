#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/ranges.h>
#include <mha/multi_head_attention.h>

#include <cmath>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "command.h"
#include "difference.h"
#include "former_names.h"
#include "input_tensors.h"
#include "layer_call.h"
#include "layer_options.h"
#include "mask_options.h"
#include "memory.h"
#include "text.h"
#include "validators.h"

namespace mha::cli {
namespace {

struct CompareArguments {
  LayerOptions layer;
  std::string input, expected;
  MaskOptions mask;
  std::optional<double> tolerance;
  bool json = false;
};

/// A hundred or more times the rounding of numbers near 1: another order of summation stays
/// below it, another formula does not.
double default_tolerance(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 1e-12;
    case at::kBFloat16:
      return 5e-2;
    case at::kHalf:
      return 5e-3;
    default:
      return 1e-5;
  }
}

/// JSON has no infinity.
nlohmann::ordered_json number(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value)
                              : nlohmann::ordered_json(fmt::format("{}", value));
}

nlohmann::ordered_json compared(const std::string& name, const at::Tensor& actual,
                                const at::Tensor& expected, double tolerance) {
  TORCH_CHECK(actual.sizes() == expected.sizes(), "--expected: ", name,
              ": expected the shape of what the layer computes, ", shape_text(actual),
              ", found ", shape_text(expected));
  const Difference difference = largest_difference(actual, expected);
  return {{"largest_difference", number(difference.largest)},
          {"at", difference.at},
          {"computed", number(difference.actual)},
          {"expected", number(difference.expected)},
          {"passed", difference.largest <= tolerance}};
}

std::string comparison_text(const nlohmann::ordered_json& report) {
  const auto value = [](const nlohmann::ordered_json& json) {
    return json.is_string() ? json.get<std::string>()
                            : fmt::format("{:.9g}", json.get<double>());
  };
  std::string lines = layer_text(report["layer"]);
  for (const auto& [name, json] : report["inputs"].items()) {
    lines += fmt::format("  {:<9}{}\n", name, tensor_text(json));
  }
  lines += fmt::format("  {:<9}{}\n", "mask", report["mask"].get<std::string>());
  lines += fmt::format("{}\n", report["expected_file"].get<std::string>());
  for (const auto& [name, json] : report["compared"].items()) {
    lines += fmt::format("  {:<9}largest difference {} at ({}): computed {}, expected {}\n",
                         name, value(json["largest_difference"]),
                         fmt::join(json["at"].get<std::vector<int64_t>>(), ", "),
                         value(json["computed"]), value(json["expected"]));
  }
  return lines + fmt::format("{}: tolerance {}\n",
                             report["passed"].get<bool>() ? "PASS" : "FAIL",
                             value(report["tolerance"]));
}

/// `output`, or the file's only tensor.
at::Tensor read_output(InputTensors& expected) {
  const std::string name =
      expected.has("output") ? "output"
                             : expected.only_one([](const auto&, const auto&) { return true; },
                                                 "a tensor 'output', or a single tensor");
  return expected.tensor(name, "--expected");
}

ExitCode compare_layer(const CompareArguments& arguments) {
  const c10::NoGradGuard no_grad;
  const ModelLayer layer = arguments.layer.load();
  MultiHeadAttention module = layer.attention;
  const double tolerance =
      arguments.tolerance.value_or(default_tolerance(module->W_q->weight.scalar_type()));
  InputTensors expected(arguments.expected);
  const at::Tensor expected_output = read_output(expected);
  at::Tensor expected_weights;
  if (expected.has("weights")) expected_weights = expected.tensor("weights", "--expected");

  InputTensors input(arguments.input);
  const LayerCall call = read_call(input, arguments.mask, layer);
  const bool averaged =
      expected_weights.defined() && expected_weights.dim() < expected_output.dim() + 1;
  const Weights weights = !expected_weights.defined() ? Weights::none
                          : averaged                  ? Weights::averaged
                                                      : Weights::per_head;
  check_memory("--expected", weights_bytes(module, call, weights));
  const AttentionOutput result =
      module->forward(call.query, call.key, call.value, call.mask, weights);

  nlohmann::ordered_json results = {
      {"output", compared("output", result.output, expected_output, tolerance)}};
  if (expected_weights.defined()) {
    results["weights"] = compared("weights", result.weights, expected_weights, tolerance);
  }
  bool passed = true;
  for (const auto& [name, json] : results.items()) passed &= json["passed"].get<bool>();
  const nlohmann::ordered_json report = {{"layer", arguments.layer.described(layer)},
                                         {"input_file", arguments.input},
                                         {"inputs", described(call)},
                                         {"mask", stream_text(call.mask)},
                                         {"expected_file", arguments.expected},
                                         {"compared", results},
                                         {"tolerance", tolerance},
                                         {"passed", passed}};
  print_report(report, arguments.json, comparison_text);
  return passed ? kSuccess : kDiffers;
}

}  // namespace

Command compare_command(CLI::App& program) {
  const auto arguments = std::make_shared<CompareArguments>();
  CLI::App* app =
      program.add_subcommand("compare", "Compare a layer's output with another program's");
  arguments->layer.add_to(*app)->required();
  app->add_option("--input", arguments->input, "File with the input, as for `mha run`")
      ->required()
      ->check(not_empty())
      ->type_name("FILE");
  app->add_option("--expected", arguments->expected,
                  "File with `output`, and `weights` to compare too")
      ->required()
      ->check(not_empty())
      ->type_name("FILE");
  app->add_option("--tolerance", arguments->tolerance,
                  "Largest absolute difference that passes; default: by dtype")
      ->check(number_from_zero());
  app->add_flag("--json", arguments->json, "Write JSON");
  arguments->mask.add_to(*app);
  app->footer(
      "Example: mha compare --model model.pt --prefix encoder.0.self_attn --num-heads 8 \\\n"
      "             --input x.safetensors --expected y.safetensors --tolerance 1e-5\n"
      "Exit code 0: no difference above the tolerance; 1: there is one. Default tolerance:\n"
      "1e-5 for weights of float32, 1e-12 float64, 5e-3 float16, 5e-2 bfloat16.");
  refuse_former_names(*app, {{"--weights", "--model"}, {"--heads", "--num-heads"}});
  return {app, [arguments] { return compare_layer(*arguments); }};
}

}  // namespace mha::cli
