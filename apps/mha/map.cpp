#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <mha/draw.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "command.h"
#include "former_names.h"
#include "map_source.h"
#include "option_values.h"
#include "output_file.h"
#include "text.h"
#include "token_list.h"
#include "validators.h"

namespace mha::cli {
namespace {

struct MapArguments {
  MapSource source;
  std::string output, title, tokens, key_tokens;
  std::string colours = "dusk", scale = "square-root";
  std::optional<double> largest;
  bool json = false;
};

const OptionValues<draw::ColourMap>& colour_maps() {
  static const OptionValues<draw::ColourMap> values = {{"dusk", draw::ColourMap::dusk},
                                                       {"ink", draw::ColourMap::ink},
                                                       {"grey", draw::ColourMap::grey}};
  return values;
}

const OptionValues<draw::Scale>& scales() {
  static const OptionValues<draw::Scale> values = {{"square-root", draw::Scale::square_root},
                                                   {"linear", draw::Scale::linear}};
  return values;
}

std::string format_problem(const std::string& path) {
  try {
    draw::format_of(path);
    return {};
  } catch (const c10::Error&) {
    return "expected a name that ends in .png, .svg or .html, found '" + path + "'";
  }
}

/// Heads, queries and keys.
struct Sizes {
  int64_t maps, queries, keys;
};

Sizes sizes_of(const draw::Maps& maps) {
  if (maps.map) return {maps.map->num_heads(), maps.map->num_queries(), maps.map->num_keys()};
  const int64_t dimensions = maps.weights.dim();
  return {dimensions == 3 ? maps.weights.size(0) : 1, maps.weights.size(-2),
          maps.weights.size(-1)};
}

/// Checked here too, to name the options and not the fields.
std::vector<std::string> tokens_for(const std::string& argument, const char* option,
                                    int64_t size, const char* of) {
  std::vector<std::string> tokens = token_list(argument);
  TORCH_CHECK(static_cast<int64_t>(tokens.size()) == size, option, ": expected ", size,
              " tokens, one for each ", of, ", found ", tokens.size());
  return tokens;
}

void add_labels(const MapArguments& arguments, draw::Maps& maps) {
  const Sizes sizes = sizes_of(maps);
  if (!arguments.tokens.empty()) {
    maps.queries = tokens_for(arguments.tokens, "--tokens", sizes.queries, "query");
  }
  if (!arguments.key_tokens.empty()) {
    maps.keys = tokens_for(arguments.key_tokens, "--key-tokens", sizes.keys, "key");
  } else if (sizes.queries == sizes.keys) {
    maps.keys = maps.queries;
  }
  if (!arguments.title.empty()) maps.title = arguments.title;
}

void check_arguments(const MapArguments& arguments) {
  arguments.source.check();
  TORCH_CHECK(!arguments.json || !arguments.output.empty(), "--json: expected with --output");
  if (arguments.output.empty()) return;
  std::vector<std::string> read = arguments.source.files();
  for (const std::string& tokens : {arguments.tokens, arguments.key_tokens}) {
    if (is_token_file(tokens)) read.push_back(tokens);
  }
  check_output(arguments.output, read);
}

std::string map_text(const nlohmann::ordered_json& report) {
  const auto maps = report["maps"].get<int64_t>();
  return fmt::format("{}: {} map{} of {} queries x {} keys\n",
                     report["output_file"].get<std::string>(), maps, maps == 1 ? "" : "s",
                     report["queries"].get<int64_t>(), report["keys"].get<int64_t>());
}

ExitCode run_map(const MapArguments& arguments) {
  const c10::NoGradGuard no_grad;
  check_arguments(arguments);
  draw::Maps maps = arguments.source.maps();
  add_labels(arguments, maps);
  draw::Options options;
  options.colours(value_of(colour_maps(), arguments.colours))
      .scale(value_of(scales(), arguments.scale))
      .largest(arguments.largest)
      .causal(arguments.source.hides_later_keys());
  if (arguments.output.empty()) {
    print(draw::text(maps, draw::terminal_of(stdout), options));
    return kSuccess;
  }
  draw::save(maps, arguments.output, options);
  const Sizes sizes = sizes_of(maps);
  print_report({{"output_file", arguments.output},
                {"title", maps.title},
                {"maps", sizes.maps},
                {"queries", sizes.queries},
                {"keys", sizes.keys}},
               arguments.json, map_text);
  return kSuccess;
}

}  // namespace

Command map_command(CLI::App& program) {
  const auto arguments = std::make_shared<MapArguments>();
  CLI::App* app =
      program.add_subcommand("map", "Draw attention weights, stored or computed by a layer");
  app->add_option("--output", arguments->output,
                  "Picture, .png, .svg or .html; default: draw in the terminal")
      ->check(not_empty())
      ->check(CLI::Validator(format_problem, ""))
      ->type_name("FILE");
  app->add_flag("--json", arguments->json, "Write JSON about the picture");
  arguments->source.add_to(*app);
  constexpr const char* group = "Picture";
  app->add_option("--tokens", arguments->tokens, "Tokens of the queries, and of as many keys")
      ->check(not_empty())
      ->type_name("FILE|WORDS")
      ->group(group);
  app->add_option("--key-tokens", arguments->key_tokens, "Tokens of the keys")
      ->check(not_empty())
      ->type_name("FILE|WORDS")
      ->group(group);
  app->add_option("--title", arguments->title, "Title; default: the file or the prefix")
      ->group(group);
  one_of(app->add_option("--colours", arguments->colours, "Colour map"),
         names_of(colour_maps()))
      ->capture_default_str()
      ->group(group);
  one_of(app->add_option("--colour-scale", arguments->scale, "From weights to colours"),
         names_of(scales()))
      ->capture_default_str()
      ->group(group);
  app->add_option("--largest", arguments->largest,
                  "Weight of the last colour; default: the largest")
      ->check(number_above_zero())
      ->group(group);
  refuse_former_names(*app, {{"--weights", "--maps"}, {"--heads", "--num-heads"}});
  app->footer(
      "Example: mha map --maps y.safetensors --output map.html --tokens \"[CLS] a cat [SEP]\"\n"
      "         mha map --model model.safetensors --prefix encoder.layer.0.attention \\\n"
      "             --num-heads 12 --input x.safetensors --head 3 --output head3.png\n"
      "Maps are drawn from a file (--maps) or computed (--model and --input). Stored maps are\n"
      "(N, H, L, S), (H, L, S), (L, S) or, with --sample, (N, L, S); --causal leaves the keys\n"
      "after a query blank. A file of tokens has one a line, or is a JSON list (.json). Long\n"
      "maps are pooled, and the picture says so.");
  return {app, [arguments] { return run_map(*arguments); }};
}

}  // namespace mha::cli
