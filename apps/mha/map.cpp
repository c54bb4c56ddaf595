#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <files/safetensors.h>
#include <fmt/format.h>
#include <mha/draw.h>
#include <mha/multi_head_attention.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "command.h"
#include "layer_call.h"
#include "layer_options.h"
#include "mask_options.h"
#include "memory.h"
#include "output_file.h"
#include "text.h"
#include "token_list.h"
#include "validators.h"

namespace mha::cli {
namespace {

struct MapArguments {
  std::string weights, tensor;  // a stored map
  LayerOptions layer;           // or the layer that computes it
  std::string input;
  MaskOptions mask;
  std::string output, title, tokens, key_tokens;
  std::optional<int64_t> sample;
  std::vector<int64_t> heads;
  bool mean = false, json = false;
  std::string colours = "dusk", scale = "square_root";
  std::optional<double> largest;
};

constexpr std::array<std::pair<const char*, draw::ColourMap>, 3> kColours = {
    {{"dusk", draw::ColourMap::dusk},
     {"ink", draw::ColourMap::ink},
     {"grey", draw::ColourMap::grey}}};
constexpr std::array<std::pair<const char*, draw::Scale>, 2> kScales = {
    {{"square_root", draw::Scale::square_root}, {"linear", draw::Scale::linear}}};

template <typename Table>
std::vector<std::string> names_in(const Table& table) {
  std::vector<std::string> names;
  for (const auto& [name, value] : table) names.emplace_back(name);
  return names;
}

/// The value of that name; the parser has let only such names through.
template <typename Table>
auto value_in(const Table& table, const std::string& name) {
  for (const auto& [known, value] : table) {
    if (name == known) return value;
  }
  return table.front().second;
}

/// Weights as a file or a layer gives them, and what their dimensions are.
struct FoundWeights {
  at::Tensor tensor;
  bool has_samples = true;  // (N, ...)
  bool has_heads = true;    // (..., H, L, S)
  std::string source;       // for the title
};

std::string stored_name(const detail::SafetensorsFile& file, const std::string& asked) {
  const auto& entries = file.entries();
  if (!asked.empty()) {
    TORCH_CHECK(entries.count(asked) > 0, "--tensor: expected the name of a tensor in ",
                file.path(), ", found '", asked, "'");
    return asked;
  }
  if (entries.count("weights") > 0) return "weights";
  std::vector<std::string> candidates;
  for (const auto& [name, entry] : entries) {
    if (entry.shape.size() == 4) candidates.push_back(name);
  }
  TORCH_CHECK(candidates.size() == 1, file.path(),
              ": expected a tensor 'weights' or a single one of shape (N, H, L, S), found ",
              candidates.size(), " of that kind; --tensor names another");
  return candidates.front();
}

FoundWeights stored_weights(const MapArguments& arguments) {
  TORCH_CHECK(
      !arguments.mask.has_others(),
      "expected no mask but --causal for stored weights; others need --model, where they "
      "act before the softmax");
  detail::SafetensorsFile file(arguments.weights);
  const std::string name = stored_name(file, arguments.tensor);
  FoundWeights found;
  found.tensor = file.read(name);
  const int64_t dimensions = found.tensor.dim();
  TORCH_CHECK(dimensions >= 2 && dimensions <= 4, file.path(), ": ", name,
              ": expected (N, H, L, S), (H, L, S), with --sample (N, L, S), or (L, S), found ",
              shape_text(found.tensor));
  found.has_samples = dimensions == 4 || (dimensions == 3 && arguments.sample);
  found.has_heads = dimensions == 4 || (dimensions == 3 && !arguments.sample);
  found.source = std::filesystem::path(arguments.weights).filename().string();
  return found;
}

FoundWeights computed_weights(const MapArguments& arguments) {
  TORCH_CHECK(!arguments.input.empty(), "--input is required with --model");
  MultiHeadAttention module = arguments.layer.load();
  LayerInput input(arguments.input);
  const at::ScalarType dtype = module->W_q->weight.scalar_type();
  const LayerCall call = read_call(input, arguments.mask, dtype);
  check_memory("--input", map_bytes(module, call));
  FoundWeights found;
  found.tensor =
      module->forward(call.query, call.key, call.value, call.mask, Weights::per_head).weights;
  found.has_samples = found.tensor.dim() == 4;
  found.source = arguments.layer.prefix().empty()
                     ? std::filesystem::path(arguments.layer.file()).filename().string()
                     : arguments.layer.prefix();
  return found;
}

/// (H, L, S) of the sample that was asked for.
at::Tensor one_sample(const FoundWeights& found, std::optional<int64_t> sample) {
  at::Tensor weights = found.tensor;
  const int64_t index = sample.value_or(0), samples = found.has_samples ? weights.size(0) : 1;
  TORCH_CHECK(index < samples, "--sample: expected below ", samples,
              ", the number of samples, found ", index);
  if (found.has_samples) weights = weights[index];
  return found.has_heads ? weights : weights.unsqueeze(0);
}

void choose_heads(const MapArguments& arguments, draw::Maps& maps) {
  const int64_t heads = maps.weights.size(0);
  if (arguments.mean) {
    maps.weights = maps.weights.to(at::kFloat).mean(0, /*keepdim=*/true);
    maps.names = {fmt::format("mean of {} heads", heads)};
    return;
  }
  if (arguments.heads.empty()) return;
  for (const int64_t head : arguments.heads) {
    TORCH_CHECK(head < heads, "--head: expected below ", heads, ", the number of heads, found ",
                head);
    maps.names.push_back(fmt::format("head {}", head));
  }
  maps.weights = maps.weights.index_select(0, at::tensor(arguments.heads));
}

/// Checked here too, to name the options and not the fields.
std::vector<std::string> tokens_for(const std::string& argument, const std::string& option,
                                    int64_t size, const char* of) {
  std::vector<std::string> tokens = token_list(argument, option);
  TORCH_CHECK(static_cast<int64_t>(tokens.size()) == size, option, ": expected ", size,
              " tokens, one for each ", of, ", found ", tokens.size());
  return tokens;
}

draw::Maps maps_of(const MapArguments& arguments) {
  const FoundWeights found =
      arguments.weights.empty() ? computed_weights(arguments) : stored_weights(arguments);
  draw::Maps maps;
  maps.weights = one_sample(found, arguments.sample);
  choose_heads(arguments, maps);
  const int64_t queries = maps.weights.size(1), keys = maps.weights.size(2);
  if (!arguments.tokens.empty()) {
    maps.queries = tokens_for(arguments.tokens, "--tokens", queries, "query");
  }
  if (!arguments.key_tokens.empty()) {
    maps.keys = tokens_for(arguments.key_tokens, "--key-tokens", keys, "key");
  } else if (queries == keys) {
    maps.keys = maps.queries;
  }
  const bool several = found.has_samples && found.tensor.size(0) > 1;
  maps.title = !arguments.title.empty() ? arguments.title
               : several
                   ? fmt::format("{}, sample {}", found.source, arguments.sample.value_or(0))
                   : found.source;
  return maps;
}

void check_arguments(const MapArguments& arguments) {
  TORCH_CHECK(arguments.weights.empty() != arguments.layer.file().empty(),
              "expected --weights (stored maps) or --model (a layer to compute them), found ",
              arguments.weights.empty() ? "neither" : "both");
  TORCH_CHECK(arguments.weights.empty() || arguments.input.empty(),
              "--input: expected with --model, found with --weights");
  TORCH_CHECK(arguments.layer.file().empty() || arguments.tensor.empty(),
              "--tensor: expected with --weights, found with --model");
  TORCH_CHECK(!arguments.mean || arguments.heads.empty(),
              "expected --head or --mean, found both");
  TORCH_CHECK(!arguments.json || !arguments.output.empty(), "--json: expected with --output");
  if (arguments.output.empty()) return;
  draw::format_of(arguments.output);
  check_output(arguments.output, {arguments.weights, arguments.layer.file(), arguments.input});
}

std::string text(const nlohmann::ordered_json& report) {
  const auto maps = report["maps"].get<int64_t>();
  return fmt::format("{}: {} map{} of {} queries x {} keys\n",
                     report["output_file"].get<std::string>(), maps, maps == 1 ? "" : "s",
                     report["queries"].get<int64_t>(), report["keys"].get<int64_t>());
}

ExitCode run_map(const MapArguments& arguments) {
  const c10::NoGradGuard no_grad;
  check_arguments(arguments);
  const draw::Maps maps = maps_of(arguments);
  draw::Options options;
  options.colours(value_in(kColours, arguments.colours))
      .scale(value_in(kScales, arguments.scale))
      .largest(arguments.largest)
      // A layer's own mask has left its zeros, under whichever alignment.
      .causal(!arguments.weights.empty() && arguments.mask.is_causal());
  if (arguments.output.empty()) {
    print(draw::text(maps, draw::terminal_of(stdout), options));
    return kSuccess;
  }
  draw::save(maps, arguments.output, options);
  print_report({{"output_file", arguments.output},
                {"title", maps.title},
                {"maps", maps.weights.size(0)},
                {"queries", maps.weights.size(1)},
                {"keys", maps.weights.size(2)}},
               arguments.json, text);
  return kSuccess;
}

}  // namespace

Command map_command(CLI::App& program) {
  const auto arguments = std::make_shared<MapArguments>();
  CLI::App* app = program.add_subcommand("map", "Draw attention weights");
  app->add_option("--weights", arguments->weights, "safetensors file with stored maps")
      ->type_name("FILE");
  app->add_option("--tensor", arguments->tensor,
                  "Which of its tensors; default: `weights` or the only 4-D one")
      ->check(not_empty());
  app->add_option("--output", arguments->output,
                  "Picture, .png, .svg or .html; default: draw in the terminal")
      ->check(not_empty())
      ->type_name("FILE");
  app->add_option("--sample", arguments->sample, "Sample of the batch; default: 0")
      ->check(integer_from(0));
  app->add_option("--head", arguments->heads, "Only this head; may be repeated")
      ->check(integer_from(0))
      ->allow_extra_args(false);
  app->add_flag("--mean", arguments->mean, "The mean of all heads");
  app->add_option("--tokens", arguments->tokens, "Tokens of the queries, and of as many keys")
      ->check(not_empty())
      ->type_name("FILE|WORDS");
  app->add_option("--key-tokens", arguments->key_tokens, "Tokens of the keys")
      ->check(not_empty())
      ->type_name("FILE|WORDS");
  app->add_option("--title", arguments->title, "Title; default: the file or the prefix");
  one_of(app->add_option("--colours", arguments->colours, "Colour map"), names_in(kColours))
      ->capture_default_str();
  one_of(app->add_option("--scale", arguments->scale, "From weights to colours"),
         names_in(kScales))
      ->capture_default_str();
  app->add_option("--largest", arguments->largest,
                  "Weight of the last colour; default: the largest")
      ->check(number_above_zero());
  app->add_flag("--json", arguments->json, "Write JSON about the picture");
  arguments->layer.add_to(*app, "--model");
  app->add_option("--input", arguments->input, "safetensors file with the layer's input")
      ->type_name("FILE");
  arguments->mask.add_to(*app);
  app->footer(
      "Example: mha map --weights y.safetensors --output map.html --tokens \"[CLS] a cat "
      "[SEP]\"\n"
      "         mha map --model model.safetensors --prefix encoder.layer.0.attention \\\n"
      "             --heads 12 --input x.safetensors --head 3 --output head3.png\n"
      "Stored weights are (N, H, L, S), (H, L, S), (L, S) or, with --sample, (N, L, S); "
      "--causal\n"
      "leaves the keys after a query blank. A file of tokens has one a line, or is a JSON "
      "list\n"
      "(.json). Long maps are pooled, and the picture says so.");
  return {app, [arguments] { return run_map(*arguments); }};
}

}  // namespace mha::cli
