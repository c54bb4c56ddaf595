#include "map_source.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <mha/attention_map.h>

#include <algorithm>
#include <filesystem>
#include <functional>

#include "input_tensors.h"
#include "layer_call.h"
#include "memory.h"
#include "output_file.h"
#include "text.h"
#include "validators.h"

namespace mha::cli {
namespace {

std::string file_name(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

/// (L, S) of one sample. `rows(from, to)` gives those queries of all samples, so that no more
/// than a part of the others is in memory with it.
at::Tensor of_sample(const AttentionMap& map, int64_t sample, int64_t samples,
                     const std::function<at::Tensor(int64_t, int64_t)>& rows) {
  const int64_t queries = map.num_queries(), step = std::max<int64_t>(queries / samples, 1);
  const auto dtype = map.query().scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor weights =
      at::empty({queries, map.num_keys()}, map.query().options().dtype(dtype));
  for (int64_t from = 0; from < queries; from += step) {
    const int64_t to = std::min(from + step, queries);
    const at::Tensor part = rows(from, to).reshape({samples, to - from, map.num_keys()});
    weights.slice(0, from, to).copy_(part[sample]);
  }
  return weights;
}

}  // namespace

void MapSource::add_to(CLI::App& app) {
  constexpr const char *stored = "Stored maps", *choice = "Sample and heads";
  app.add_option("--maps", file_, "File with attention weights, as `mha run` writes it")
      ->check(not_empty())
      ->type_name("FILE")
      ->group(stored);
  app.add_option("--tensor", tensor_,
                 "Which of its tensors; default: `weights` or the only 4-D one")
      ->check(not_empty())
      ->type_name("TENSOR")
      ->group(stored);
  CLI::Option* model = layer_.add_to(app);
  app.add_option("--input", input_, "File with the layer's input, as for `mha run`")
      ->check(not_empty())
      ->needs(model)
      ->type_name("FILE")
      ->group("Layer");
  mask_.add_to(app);
  app.add_option("--sample", sample_, "Sample of the batch; default: 0")
      ->check(integer_from(0))
      ->group(choice);
  app.add_option("--head", heads_, "Only this head; may be repeated")
      ->check(integer_from(0))
      ->allow_extra_args(false)
      ->group(choice);
  app.add_flag("--mean", mean_, "The mean of all heads")->group(choice);
}

void MapSource::check() const {
  const bool has_model = !layer_.file().empty();
  TORCH_CHECK(is_stored() != has_model,
              "expected --maps (stored maps) or --model (a layer to compute them), found ",
              has_model ? "both" : "neither");
  TORCH_CHECK(!has_model || !input_.empty(), "--input is required with --model");
  TORCH_CHECK(is_stored() || tensor_.empty(),
              "--tensor: expected with --maps, found with --model");
  TORCH_CHECK(!is_stored() || !mask_.has_others(),
              "expected no mask but --causal for stored maps; others need --model, where they "
              "act before the softmax");
  TORCH_CHECK(!mean_ || heads_.empty(), "expected --head or --mean, found both");
}

std::vector<std::string> MapSource::files() const {
  std::vector<std::string> all = layer_.files();
  for (const std::string& read : {file_, input_}) {
    const auto files = files_of(read);
    all.insert(all.end(), files.begin(), files.end());
  }
  return all;
}

draw::Maps MapSource::maps() const {
  return is_stored() ? stored() : computed();
}

draw::Maps MapSource::stored() const {
  InputTensors file(file_);
  std::string name = tensor_;
  if (name.empty() && file.has("weights")) name = "weights";
  if (name.empty()) {
    name = file.only_one(
        [](const std::string& /*name*/, const detail::TensorEntry& entry) {
          return entry.shape.size() == 4;
        },
        "a tensor 'weights' or a single one of shape (N, H, L, S), which --tensor can name");
  }
  at::Tensor weights = file.tensor(name, "--tensor");
  const int64_t dimensions = weights.dim();
  TORCH_CHECK(dimensions >= 2 && dimensions <= 4, file.path(), ": ", name,
              ": expected (N, H, L, S), (H, L, S), with --sample (N, L, S), or (L, S), found ",
              shape_text(weights));
  const bool has_samples = dimensions == 4 || (dimensions == 3 && sample_);
  const int64_t samples = has_samples ? weights.size(0) : 1, sample = chosen_sample(samples);
  if (has_samples) weights = weights[sample];
  if (weights.dim() == 2) weights = weights.unsqueeze(0);
  const int64_t heads = weights.size(0);
  check_heads(heads);
  TORCH_CHECK(!mean_ || (heads > 0 && weights.is_floating_point()),
              "--mean: expected floating weights of one head or more, found ",
              weights.scalar_type(), " of ", heads, " heads in ", file.path());
  TORCH_CHECK(!mask_.is_top_left() || weights.size(1) == weights.size(2),
              "--causal: expected bottom-right for stored maps with another number of keys "
              "than of queries, found top-left and ",
              shape_text(weights));
  const auto wide = weights.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  draw::Maps maps;
  maps.weights = mean_            ? weights.to(wide).mean(0, /*keepdim=*/true)
                 : heads_.empty() ? weights
                                  : weights.index_select(0, at::tensor(heads_));
  maps.names = names(heads);
  maps.title = title(file_name(file_), samples);
  return maps;
}

draw::Maps MapSource::computed() const {
  const ModelLayer layer = layer_.load();
  MultiHeadAttention module = layer.attention;
  InputTensors input(input_);
  const LayerCall call = read_call(input, mask_, layer);
  // Without a choice of heads no more than the cells of the picture are formed.
  if (mean_ || !heads_.empty()) {
    const auto formed = static_cast<double>(mean_ ? 1 : heads_.size());
    check_memory(mean_ ? "--mean" : "--head",
                 (formed + 1) * map_size(module, call).weights *
                     (module->W_q->weight.scalar_type() == at::kDouble ? 8 : 4));
  }
  const AttentionMap map = module->trace(call.query, call.key, call.value, call.mask).map;
  const int64_t samples = map.query().dim() == 4 ? map.query().size(0) : 1;
  const int64_t sample = chosen_sample(samples);
  check_heads(map.num_heads());
  draw::Maps maps;
  if (mean_) {
    maps.weights = of_sample(map, sample, samples,
                             [&](int64_t from, int64_t to) { return map.mean(from, to); });
  } else if (heads_.empty()) {
    maps.map = map;
    maps.sample = sample;
  } else {
    std::vector<at::Tensor> chosen;
    for (const int64_t head : heads_) {
      chosen.push_back(of_sample(map, sample, samples, [&](int64_t from, int64_t to) {
        return map.block(head, {from, to}, {0, map.num_keys()});
      }));
    }
    maps.weights = chosen.size() == 1 ? chosen.front().unsqueeze(0) : at::stack(chosen);
  }
  maps.names = names(map.num_heads());
  const std::string& prefix = layer.options.prefixes.front();
  maps.title = title(prefix.empty() ? file_name(layer_.file()) : prefix, samples);
  return maps;
}

int64_t MapSource::chosen_sample(int64_t samples) const {
  const int64_t sample = sample_.value_or(0);
  TORCH_CHECK(sample < samples, "--sample: expected below ", samples,
              ", the number of samples, found ", sample);
  return sample;
}

void MapSource::check_heads(int64_t heads) const {
  for (const int64_t head : heads_) {
    TORCH_CHECK(head < heads, "--head: expected below ", heads, ", the number of heads, found ",
                head);
  }
}

std::vector<std::string> MapSource::names(int64_t heads) const {
  if (mean_) return {fmt::format("mean of {} heads", heads)};
  std::vector<std::string> names;
  for (const int64_t head : heads_) names.push_back(fmt::format("head {}", head));
  return names;
}

std::string MapSource::title(const std::string& source, int64_t samples) const {
  if (samples <= 1) return source;
  return fmt::format("{}, sample {}", source, sample_.value_or(0));
}

}  // namespace mha::cli
