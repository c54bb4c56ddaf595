#include "layer_options.h"

#include <mha/weight_file.h>
#include <weights/layout_spec.h>

#include <algorithm>
#include <vector>

#include "text.h"
#include "validators.h"

namespace mha::cli {
namespace {

std::vector<std::string> layout_names() {
  std::vector<std::string> names;
  for (const Layout layout : detail::kLayouts) names.push_back(stream_text(layout));
  return names;
}

/// The layout of that name; the parser has let only such names through.
Layout layout_named(const std::string& name) {
  return *std::find_if(detail::kLayouts.begin(), detail::kLayouts.end(),
                       [&](Layout layout) { return stream_text(layout) == name; });
}

}  // namespace

CLI::Option* LayerOptions::add_to(CLI::App& app, const char* file_option) {
  CLI::Option* file =
      app.add_option(file_option, file_, "File with the layer, of safetensors or torch.save")->type_name("FILE");
  app.add_option("--prefix", prefix_, "Where the layer lies in that file");
  one_of(app.add_option("--layout", layout_, "How the weights are named; default: detected"),
         layout_names());
  app.add_option("--heads", heads_, "Number of heads, unless the weight file says it")
      ->check(integer_from(1));
  return file;
}

MultiHeadAttention LayerOptions::load() const {
  WeightFileOptions where;
  where.prefix(prefix_);
  if (!layout_.empty()) where.layout(layout_named(layout_));
  MultiHeadAttention module(options_from_file(file_, heads_, where));
  mha::load(module, file_, where);
  module->eval();
  return module;
}

}  // namespace mha::cli
