#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/pow.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <mha/model_config.h>

#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "files/excerpt.h"
#include "files/input_file.h"
#include "files/json_text.h"
#include "files/tensor_source.h"
#include "module/module_checks.h"
#include "weights/architecture.h"
#include "weights/config_rotary.h"
#include "weights/config_value.h"
#include "weights/find_layers.h"
#include "weights/layer_kind.h"
#include "weights/load_as.h"
#include "weights/read_config.h"

namespace mha {
namespace {

using detail::ConfigValues;
using detail::excerpt;

constexpr int64_t kMaxConfigFile = int64_t{1} << 20, kMaxHeads = int64_t{1} << 20,
                  kMaxLayers = 4096;

std::string model_type_of(const std::string& path, const nlohmann::json& config) {
  const auto found = config.find("model_type");
  TORCH_CHECK(found != config.end() && found->is_string(), path,
              ": model_type: expected the name of an architecture, found ",
              found == config.end() ? "none" : found->type_name());
  return found->get<std::string>();
}

const nlohmann::json& known_architecture(const std::string& path,
                                         const std::string& model_type) {
  const nlohmann::json* entry = detail::find_architecture(model_type);
  TORCH_CHECK(entry != nullptr, path,
              ": model_type: expected an architecture that is known, found ",
              excerpt(model_type));
  return *entry;
}

std::vector<std::string> names_of_parts(const nlohmann::json& architecture) {
  std::vector<std::string> names;
  const auto parts = architecture.find("parts");
  if (parts == architecture.end()) return names;
  for (const auto& [name, entry] : parts->items()) names.push_back(name);
  return names;
}

// The architecture of the wanted part, and the configuration that it has. That of a section
// has a `usual_type`, if the section does not say its own.
std::pair<const nlohmann::json*, const nlohmann::json*> architecture_of(
    const std::string& path, const nlohmann::json& config, const std::string& part,
    std::string& model_type, const std::string& usual_type = {}) {
  const bool is_section = !usual_type.empty();
  model_type =
      is_section && !config.contains("model_type") ? usual_type : model_type_of(path, config);
  const nlohmann::json& entry = known_architecture(path, model_type);
  const auto parts = entry.find("parts");
  TORCH_CHECK(!is_section || parts == entry.end(), path,
              ": model_type of a section: expected one without parts, found ",
              excerpt(model_type));
  if (parts == entry.end()) {
    TORCH_CHECK(part.empty(), path, ": part: expected none, since ", model_type,
                " has one attention in a layer, found ", excerpt(part));
    return {&entry, &config};
  }
  const auto chosen = part.empty() && parts->size() == 1 ? parts->begin() : parts->find(part);
  TORCH_CHECK(chosen != parts->end(), path, ": part: expected one of ",
              c10::Join(", ", names_of_parts(entry)), ", found ", excerpt(part));
  const auto section = chosen->find("section");
  if (section == chosen->end()) return {&*chosen, &config};
  const auto inner = config.find(section->get<std::string>());
  TORCH_CHECK(inner != config.end() && inner->is_object(), path, ": ",
              section->get<std::string>(), ": expected an object, found ",
              inner == config.end() ? "none" : inner->type_name());
  return architecture_of(path, *inner, {}, model_type,
                         chosen->at("model_type").get<std::string>());
}

void check_is_computed(const ConfigValues& values, const std::string& model_type,
                       const nlohmann::json& architecture) {
  if (const auto reason = values.text("refuse")) {
    TORCH_CHECK(false, values.path(), ": model_type: the attention of ", model_type, " ",
                *reason, ", which this module does not compute");
  }
  const auto conditions = architecture.find("refuse_if");
  if (conditions == architecture.end()) return;
  for (const auto& item : *conditions) {
    TORCH_CHECK(!values.holds(item.at("if")), values.path(), ": the attention of ", model_type,
                " here ", item.at("why").get<std::string>(),
                ", which this module does not compute");
  }
}

int64_t layers_in(const ConfigValues& values) {
  const int64_t layers = values.needed_count("layers");
  TORCH_CHECK(layers <= kMaxLayers, values.path(), ": ", values.name_of("layers"),
              ": expected at most ", kMaxLayers, ", found ", layers);
  return layers;
}

// A number out of range is an error of the file that has it.
template <typename Check>
void check_for(const std::string& path, Check check) {
  try {
    check();
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, path, ": ", error.what_without_backtrace());
  }
}

// MPT's slopes: those of the power of two above, where heads are none every second one first.
at::Tensor mpt_slopes(int64_t num_heads, double bias_max) {
  int64_t power = 1;
  while (power < num_heads) power *= 2;
  const at::Tensor exponents =
      at::arange(1, power + 1, at::kFloat) * (bias_max / static_cast<double>(power));
  const at::Tensor slopes = at::pow(2, exponents).reciprocal();
  if (power == num_heads) return slopes;
  return at::cat({slopes.slice(0, 1, std::nullopt, 2), slopes.slice(0, 0, std::nullopt, 2)})
      .slice(0, 0, num_heads);
}

Mask mask_in(const ConfigValues& values, const detail::LayerKind& kind, int64_t num_heads) {
  const bool is_causal = values.text("mask") == "causal";
  Mask mask;
  if (kind.left) {
    mask = Mask::window(*kind.left, is_causal ? 0 : kind.right.value_or(-1));
  } else if (is_causal) {
    mask = Mask::causal();
  }
  const auto alibi = values.text("alibi");
  if (alibi == "press") mask = mask & Mask::alibi(alibi_slopes(num_heads));
  if (alibi == "mpt") {
    const auto bias_max = values.evaluated("$attn_config.alibi_bias_max|=8");
    mask = mask & Mask::alibi(mpt_slopes(
                      num_heads, values.number_of(bias_max, "attn_config.alibi_bias_max")));
  }
  return mask;
}

void norm_in(const ConfigValues& values, MultiHeadAttentionOptions& options) {
  options.qk_norm(*values.text("norm") == "layer" ? QKNorm::layer : QKNorm::rms);
  options.qk_norm_bias(values.flag("norm_bias").value_or(false));
  if (values.text("norm_scope") == "all_heads") options.qk_norm_scope(QKNormScope::all_heads);
  if (values.text("norm_order") == "after_rotary") {
    options.qk_norm_order(QKNormOrder::after_rotary);
  }
  if (const auto gain = values.text("norm_gain")) {
    options.qk_norm_gain(*gain == "per_head" ? QKNormGain::per_head : QKNormGain::none);
  }
  const auto eps = values.number("norm_eps");
  TORCH_CHECK(eps && *eps >= 0, values.path(),
              ": eps of the norm of queries and keys: expected a number of at least 0, found ",
              eps ? std::to_string(*eps) : "none");
  options.qk_norm_eps(*eps);
}

std::optional<TemperatureTuning> temperature_tuning_in(const ConfigValues& values) {
  const auto given = values.value("temperature_tuning");
  if (given.is_null()) return std::nullopt;
  const auto scale = values.evaluated(given.at("scale"));
  const auto name = [](const nlohmann::json& expression) {
    const auto text = expression.get<std::string>();
    return text.substr(1, text.find('|') - 1);
  };
  const double factor = values.number_of(scale, name(given.at("scale")));
  return TemperatureTuning(factor, values.count_of(values.evaluated(given.at("floor_scale")),
                                                   name(given.at("floor_scale"))))
      .offset(given.value("offset", 0));
}

MultiHeadAttentionOptions attention_in(const ConfigValues& values,
                                       const detail::LayerKind& kind) {
  const int64_t d_model = values.needed_count("d_model"), heads = values.needed_count("heads");
  TORCH_CHECK(heads <= kMaxHeads, values.path(), ": number of heads: expected at most ",
              kMaxHeads, ", found ", heads);
  MultiHeadAttentionOptions options(d_model, heads);
  const auto given_dim = values.count("head_dim");
  TORCH_CHECK(given_dim || d_model % heads == 0, values.path(),
              ": number of heads: expected a divisor of the width ", d_model, ", found ",
              heads);
  const int64_t head_dim = given_dim.value_or(d_model / heads);
  if (head_dim * heads != d_model) options.head_dim(head_dim);
  if (const auto v_head_dim = values.count("v_head_dim")) options.v_head_dim(*v_head_dim);
  options.value_scale(values.number("value_scale").value_or(1));
  const bool is_sliding = kind.name == "sliding_attention";
  auto kv_heads = values.count("kv_heads");
  if (kv_heads && is_sliding) {
    *kv_heads *= values.count("kv_heads_times_sliding").value_or(1);
  }
  if (kv_heads && *kv_heads != heads) {
    TORCH_CHECK(heads % *kv_heads == 0, values.path(),
                ": number of key and value heads: expected a divisor of ", heads, ", found ",
                *kv_heads);
    options.num_kv_heads(*kv_heads);
  }
  options.bias(values.flag("bias").value_or(false));
  if (const auto bias = values.flag("output_bias"); bias && *bias != options.bias()) {
    options.output_bias(*bias);
  }
  if (kind.is_rotated) {
    options.rotary(detail::rotary_in_config(values, kind.name, head_dim));
  }
  if (values.text("norm") && (kind.is_rotated || values.text("norm_on") != "rotated")) {
    norm_in(values, options);
  }
  if (values.text("temperature_on") != "not_rotated" || !kind.is_rotated) {
    options.temperature_tuning(temperature_tuning_in(values));
  }
  if (const auto of = values.number("scale_of")) {
    TORCH_CHECK(*of > 0, values.path(),
                ": query_pre_attn_scalar: expected a number above 0, found ", *of);
    options.scale(1 / std::sqrt(*of));
  }
  if (const auto scale = values.number("scale")) options.scale(*scale);
  if (const auto softcap = values.number("softcap")) {
    TORCH_CHECK(*softcap > 0, values.path(),
                ": attn_logit_softcapping: expected a number above 0, found ", *softcap);
    options.softcap(*softcap);
  }
  options.sinks(values.flag("sinks").value_or(false) &&
                (is_sliding || values.text("sinks_on") != "sliding"));
  if (values.text("gate") == "elementwise") options.output_gate(OutputGate::elementwise);
  return options;
}

std::string with_layer(const std::string& pattern, int64_t layer) {
  const size_t at = pattern.find("{}");
  return at == std::string::npos
             ? pattern
             : pattern.substr(0, at) + std::to_string(layer) + pattern.substr(at + 2);
}

// The one of the places where the layer may lie where it does.
std::string prefix_in(const detail::TensorSource& file, const ModelLayerOptions& options) {
  const auto layers = detail::find_layers(file, options.layout);
  for (const std::string& prefix : options.prefixes) {
    for (const detail::FoundLayer& layer : layers) {
      if (layer.prefix == prefix) return prefix;
    }
  }
  std::string places;
  for (const std::string& prefix : options.prefixes) {
    places += (places.empty() ? "" : " or ") + excerpt(prefix);
  }
  TORCH_CHECK(false, file.path(), ": expected the ", options.layout, " layer of a ",
              options.model_type, " at ", places, ", found none");
}

RelativePositionBias position_bias_in(detail::TensorSource& file,
                                      const ModelLayerOptions& options) {
  for (const std::string& name : options.position_bias_names) {
    const detail::TensorEntry* entry = file.find(name);
    if (entry == nullptr) continue;
    const auto& given = *options.position_bias;
    const std::vector<int64_t> expected = {given.num_buckets(), given.num_heads()};
    TORCH_CHECK(entry->shape == expected, file.path(), ": shape of ", excerpt(name),
                ": expected ", at::IntArrayRef(expected), ", found ",
                at::IntArrayRef(entry->shape));
    const at::Tensor table = file.read(name);
    TORCH_CHECK(at::isFloatingType(table.scalar_type()), file.path(), ": dtype of ",
                excerpt(name), ": expected a floating one, found ", table.scalar_type());
    RelativePositionBias bias(given);
    const c10::NoGradGuard no_grad;
    bias->to(table.scalar_type());
    bias->weight.copy_(table);
    return bias;
  }
  TORCH_CHECK(false, file.path(), ": expected a table of relative positions at ",
              excerpt(options.position_bias_names.front()), ", found none");
}

}  // namespace

Mask ModelLayer::mask(int64_t queries, int64_t keys) const {
  Mask mask = options.mask;
  if (options.chunk) {
    const auto chunks = [&](int64_t from) {
      return at::arange(from, keys).div(*options.chunk, "floor");
    };
    mask = mask & Mask::documents(chunks(keys - queries), chunks(0));
  }
  return position_bias.is_empty() ? mask : mask & position_bias->forward(queries, keys);
}

nlohmann::json detail::read_config(const std::string& path) {
  detail::InputFile file(path);
  TORCH_CHECK(file.size() <= kMaxConfigFile, path,
              ": expected a model's configuration of at most ", kMaxConfigFile,
              " bytes, found ", file.size());
  return detail::parse_json(path, file.read(0, file.size(), "configuration"));
}

ModelLayerOptions options_from_config(const std::string& config_path, int64_t layer,
                                      const std::string& part) {
  return detail::options_in_config(config_path, detail::read_config(config_path), layer, part);
}

ModelLayerOptions detail::options_in_config(const std::string& config_path,
                                            const nlohmann::json& file, int64_t layer,
                                            const std::string& part) {
  std::string model_type;
  const auto [architecture, config] = architecture_of(config_path, file, part, model_type);
  const ConfigValues values(config_path, *architecture, *config);
  check_is_computed(values, model_type, *architecture);
  const int64_t layers = layers_in(values);
  TORCH_CHECK(layer >= 0 && layer < layers, config_path, ": layer: expected one from 0 to ",
              layers - 1, ", found ", layer);
  const detail::LayerKind kind = detail::layer_kind(values, layer);
  MultiHeadAttentionOptions attention = attention_in(values, kind);
  check_for(config_path, [&] { detail::check_options(attention); });
  const int64_t heads = attention.num_heads();
  ModelLayerOptions found{model_type,
                          layers,
                          kind.name,
                          std::move(attention),
                          Layout::named(*values.text("layout")),
                          {},
                          mask_in(values, kind, heads),
                          std::nullopt,
                          {},
                          kind.chunk};
  int64_t number = layer;
  if (const auto groups = values.count("groups")) {
    TORCH_CHECK(*groups <= layers, config_path,
                ": num_hidden_groups: expected at most one a layer, found ", *groups);
    number = layer * *groups / layers;
  }
  for (const auto& prefix : values.value("prefixes")) {
    found.prefixes.push_back(with_layer(prefix.get<std::string>(), number));
  }
  if (const auto bias = values.value("position_bias"); !bias.is_null()) {
    RelativePositionBiasOptions options(heads);
    options
        .num_buckets(values.count_of(values.evaluated(bias.at("buckets")),
                                     "relative_attention_num_buckets"))
        .max_distance(values.count_of(values.evaluated(bias.at("max_distance")),
                                      "relative_attention_max_distance"))
        .bidirectional(bias.at("bidirectional").get<bool>());
    check_for(config_path, [&] { detail::check_bias_options(options); });
    found.position_bias = options;
    for (const auto& name : bias.at("names")) {
      found.position_bias_names.push_back(with_layer(name.get<std::string>(), layer));
    }
  }
  return found;
}

int64_t num_layers_from_config(const std::string& config_path, const std::string& part) {
  return detail::num_layers_in_config(config_path, detail::read_config(config_path), part);
}

int64_t detail::num_layers_in_config(const std::string& config_path, const nlohmann::json& file,
                                     const std::string& part) {
  std::string model_type;
  const auto [architecture, config] = architecture_of(config_path, file, part, model_type);
  const ConfigValues values(config_path, *architecture, *config);
  check_is_computed(values, model_type, *architecture);
  return layers_in(values);
}

std::vector<std::string> parts_from_config(const std::string& config_path) {
  return detail::parts_in_config(config_path, detail::read_config(config_path));
}

std::vector<std::string> detail::parts_in_config(const std::string& config_path,
                                                 const nlohmann::json& config) {
  const nlohmann::json& entry =
      known_architecture(config_path, model_type_of(config_path, config));
  return names_of_parts(entry);
}

ModelLayer load_layer(const std::string& model_folder, int64_t layer,
                      const ModelLayerLoadOptions& options) {
  const std::string config = (std::filesystem::path(model_folder) / "config.json").string();
  ModelLayer loaded{options_from_config(config, layer, options.part())};
  const std::string path = weights_of_model(model_folder);
  auto where = WeightFileOptions()
                   .layout(loaded.options.layout)
                   .convert_dtype(options.dtype().has_value())
                   .ignored(options.ignored())
                   .missing_checksums(options.missing_checksums());
  const auto file = detail::open_weights(path, where);
  loaded.options.prefixes = {prefix_in(*file, loaded.options)};
  where.prefix(loaded.options.prefixes[0]);
  loaded.attention =
      detail::load_as(path, loaded.options.attention.dtype(options.dtype()), where);
  loaded.attention->eval();
  loaded.options.attention = loaded.attention->options;
  if (loaded.options.position_bias) {
    loaded.position_bias = position_bias_in(*file, loaded.options);
    if (options.dtype()) loaded.position_bias->to(*options.dtype());
  }
  return loaded;
}

std::string weights_of_model(const std::string& model_folder) {
  const std::filesystem::path root(model_folder);
  std::string names;
  for (const char* name : {"model.safetensors", "model.safetensors.index.json",
                           "pytorch_model.bin", "pytorch_model.bin.index.json"}) {
    std::error_code error;
    if (std::filesystem::exists(root / name, error)) return (root / name).string();
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  TORCH_CHECK(false, model_folder, ": expected a model's weights in one of ", names,
              ", found none");
}

std::vector<KnownArchitecture> known_architectures() {
  std::vector<KnownArchitecture> all;
  for (const std::string& name : detail::architecture_names()) {
    const nlohmann::json& entry = *detail::find_architecture(name);
    all.push_back({name, names_of_parts(entry), entry.value("refuse", "")});
  }
  return all;
}

}  // namespace mha
