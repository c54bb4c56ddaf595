#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <mha/draw.h>
#include <mha/multi_head_attention.h>
#include <mha/torch_conversion.h>
#include <mha/version.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "command.h"
#include "difference.h"
#include "former_names.h"
#include "memory.h"
#include "option_values.h"
#include "text.h"
#include "validators.h"

namespace mha::cli {
namespace {

struct DemoArguments {
  int64_t batch = 4, length = 20, d_model = 512, heads = 8;
  int64_t seed = 0;
  bool causal = false;
  std::string dtype = "float32";
  std::optional<double> tolerance;  // default: by dtype
  int64_t shown_head = 0;
  bool json = false;
};

/// Both modules' results for one input, in this library's layouts.
struct Comparison {
  at::Tensor input;
  AttentionOutput ours, torchs;  // weights per head
  at::Tensor our_average, torch_average;
  int64_t head_dim;
};

/// Four maps are in memory at once, beside inputs, projections and weights of both modules.
void check_fits(const DemoArguments& arguments) {
  const auto batch = static_cast<double>(arguments.batch),
             length = static_cast<double>(arguments.length),
             width = static_cast<double>(arguments.d_model),
             heads = static_cast<double>(arguments.heads);
  const double numbers =
      4 * batch * heads * length * length + 12 * batch * length * width + 8 * width * width;
  check_memory(
      fmt::format("--batch {}, --length {}, --d-model {}, --num-heads {}", arguments.batch,
                  arguments.length, arguments.d_model, arguments.heads),
      numbers * (arguments.dtype == "float64" ? 8 : 4));
}

Comparison compare(const DemoArguments& arguments) {
  const c10::NoGradGuard no_grad;
  const at::ScalarType dtype = value_of(floating_dtypes(), arguments.dtype);
  at::manual_seed(static_cast<uint64_t>(arguments.seed));
  MultiHeadAttention module(
      MultiHeadAttentionOptions(arguments.d_model, arguments.heads).dtype(dtype));
  module->eval();
  torch::nn::MultiheadAttention builtin = to_torch(module);
  const at::Tensor x = at::randn({arguments.batch, arguments.length, arguments.d_model},
                                 at::TensorOptions().dtype(dtype));

  const Mask mask = arguments.causal ? Mask::causal() : Mask();
  at::Tensor
      added;  // the built-in adds a bool mask as numbers, so it gets -inf for blocked keys
  if (arguments.causal) {
    added = at::full({arguments.length, arguments.length}, -INFINITY, x.options()).triu(1);
  }

  Comparison result;
  result.input = x;
  result.head_dim = module->head_dim();
  result.ours = module->forward(x, x, x, mask, Weights::per_head);
  result.our_average = module->forward(x, x, x, mask, Weights::averaged).weights;
  const at::Tensor y = x.transpose(0, 1);  // the built-in takes (L, N, E)
  const auto per_head = builtin->forward(y, y, y, {}, true, added, false);
  const auto averaged = builtin->forward(y, y, y, {}, true, added, true);
  result.torchs = {std::get<0>(per_head).transpose(0, 1), std::get<1>(per_head)};
  result.torch_average = std::get<1>(averaged);
  return result;
}

nlohmann::ordered_json summary(const DemoArguments& arguments, const Comparison& result) {
  const double tolerance =
      arguments.tolerance.value_or(arguments.dtype == "float64" ? 1e-12 : 2e-6);
  const double output = largest_difference(result.ours.output, result.torchs.output).largest;
  const double per_head =
      largest_difference(result.ours.weights, result.torchs.weights).largest;
  const double averaged = largest_difference(result.our_average, result.torch_average).largest;
  const bool within = output <= tolerance && per_head <= tolerance && averaged <= tolerance;
  return {
      {"version", version()},
      {"libtorch", torch_version()},
      {"dtype", arguments.dtype},
      {"seed", arguments.seed},
      {"causal", arguments.causal},
      {"d_model", arguments.d_model},
      {"heads", arguments.heads},
      {"head_dim", result.head_dim},
      {"shapes",
       {{"input", result.input.sizes().vec()},
        {"output", result.ours.output.sizes().vec()},
        {"weights", result.ours.weights.sizes().vec()}}},
      {"largest_difference",
       {{"output", output}, {"weights_per_head", per_head}, {"weights_averaged", averaged}}},
      {"tolerance", tolerance},
      {"within_tolerance", within},
  };
}

std::string text(const DemoArguments& arguments, const Comparison& result,
                 const nlohmann::ordered_json& summary) {
  std::string lines = fmt::format(
      "Self-attention with random {} weights, seed {}{}\n"
      "  input    {}\n"
      "  heads    {} of size {}\n"
      "  output   {}\n"
      "  weights  {}\n\n",
      arguments.dtype, arguments.seed, arguments.causal ? ", causal" : "",
      shape_text(result.input), arguments.heads, result.head_dim,
      shape_text(result.ours.output), shape_text(result.ours.weights));

  const double tolerance = summary["tolerance"];
  lines += "Largest difference to torch::nn::MultiheadAttention with the same weights\n";
  const auto line = [&](const char* name, const char* key) {
    const double difference = summary["largest_difference"][key];
    lines += fmt::format("  {:<18} {:<9.3g} {}\n", name, difference,
                         difference <= tolerance ? "ok" : "ABOVE THE TOLERANCE");
  };
  line("output", "output");
  line("weights, per head", "weights_per_head");
  line("weights, averaged", "weights_averaged");
  lines += fmt::format("  tolerance          {:g}\n\n", tolerance);

  draw::Maps shown;
  shown.weights = result.ours.weights[0][arguments.shown_head];
  lines += fmt::format("Weights of head {}, sample 0: queries down, keys across\n{}",
                       arguments.shown_head, draw::text(shown, draw::terminal_of(stdout)));
  return lines;
}

ExitCode run_demo(const DemoArguments& arguments) {
  TORCH_CHECK(arguments.shown_head < arguments.heads, "--head: expected below ",
              arguments.heads, ", the number of heads, found ", arguments.shown_head);
  TORCH_CHECK(arguments.d_model % arguments.heads == 0,
              "--num-heads: expected a divisor of --d-model ", arguments.d_model, ", found ",
              arguments.heads);
  check_fits(arguments);
  const Comparison result = compare(arguments);
  const nlohmann::ordered_json report = summary(arguments, result);
  if (arguments.json) {
    print_report(report, true, nullptr);
  } else {
    print(text(arguments, result, report));
  }
  return report["within_tolerance"].get<bool>() ? kSuccess : kDiffers;
}

}  // namespace

Command demo_command(CLI::App& program) {
  const auto arguments = std::make_shared<DemoArguments>();
  CLI::App* app =
      program.add_subcommand("demo", "Compare with torch's module and draw a head's weights");
  const auto size = [app](const char* name, int64_t& value, const char* what) {
    app->add_option(name, value, what)->check(integer_from(1))->capture_default_str();
  };
  size("--batch", arguments->batch, "Samples");
  size("--length", arguments->length, "Positions a sample");
  size("--d-model", arguments->d_model, "Width of input and output");
  size("--num-heads", arguments->heads, "Number of heads; must divide --d-model");
  app->add_option("--seed", arguments->seed, "Seed of weights and input")
      ->check(integer_from(0))
      ->capture_default_str();
  app->add_flag("--causal", arguments->causal, "A query sees no later key");
  one_of(app->add_option("--dtype", arguments->dtype, "dtype of weights and input"),
         {"float32", "float64"})
      ->capture_default_str();
  app->add_option("--tolerance", arguments->tolerance,
                  "Largest absolute difference that passes; default: by dtype")
      ->check(number_from_zero());
  app->add_option("--head", arguments->shown_head, "The head whose weights are drawn")
      ->check(integer_from(0))
      ->capture_default_str();
  app->add_flag("--json", arguments->json, "Write JSON, without the picture");
  app->footer(
      "Example: mha demo --length 40 --causal --head 3\n"
      "Exit code 1 if a difference is above the tolerance, by default 2e-6, for float64 "
      "1e-12.");
  refuse_former_names(*app, {{"--heads", "--num-heads"}, {"--show-head", "--head"}});
  return {app, [arguments] { return run_demo(*arguments); }};
}

}  // namespace mha::cli
