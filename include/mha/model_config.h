#pragma once

#include <mha/layout.h>
#include <mha/mask.h>
#include <mha/multi_head_attention.h>
#include <mha/relative_position_bias.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace mha {

/// What a model's `config.json` says of the attention of one layer.
struct ModelLayerOptions {
  /// The architecture, `model_type`: "llama".
  std::string model_type;
  /// How many layers of this kind of model there are.
  int64_t num_layers = 0;
  /// "full_attention", "sliding_attention" or "chunked_attention".
  std::string kind;
  /// Sizes, biases, rotary positions, norm, scale, soft cap, sinks and gate. Not dropout, which
  /// stays 0, and not the dtype, which the weights tell.
  MultiHeadAttentionOptions attention;
  /// How its tensors are named, and the places where they may lie, by the class of the model
  /// that was saved; once it is loaded, the one where it lies.
  Layout layout;
  std::vector<std::string> prefixes;
  /// What the layer wants of every call: causal, a window, distances (ALiBi).
  Mask mask;
  /// T5's learned bias, and where its table may lie.
  std::optional<RelativePositionBiasOptions> position_bias;
  std::vector<std::string> position_bias_names;
  /// Of a layer that attends in chunks (Llama 4): how many tokens make one, from position 0 on.
  std::optional<int64_t> chunk = std::nullopt;
};

/// One layer of a model.
struct ModelLayer {
  ModelLayerOptions options;
  MultiHeadAttention attention{nullptr};
  /// Empty unless `options.position_bias`.
  RelativePositionBias position_bias{nullptr};

  /// What the layer wants of a call with so many queries and keys (with a cache, all that it
  /// then holds from the first token on, the same number for each sample), beside what a call has of its own, such as `Mask::keep_keys`:
  ///
  ///     layer.attention->forward(x, x, x, layer.mask(L, L) & mha::Mask::keep_keys(real));
  Mask mask(int64_t queries, int64_t keys) const;
};

/// Options of `load_layer`.
struct ModelLayerLoadOptions {
  /// Which attention, of a model that has several: "encoder", "decoder" or "cross" (of the
  /// decoder to the encoder's output); "text" or "vision". Default: the only one.
  TORCH_ARG(std::string, part);
  /// dtype of the parameters, to which the file's are rounded. Default: that of the file.
  TORCH_ARG(std::optional<at::ScalarType>, dtype);
  /// As in `WeightFileOptions`.
  TORCH_ARG(std::vector<std::string>, ignored);
  TORCH_ARG(bool, missing_checksums) = false;
};

/// The attention of one layer, counted from 0, of a model whose configuration is a JSON file as
/// transformers writes it. All of it is read; nothing is guessed. Throws `c10::Error` that
/// starts with the path and names the member of the file, what was expected and what was found:
///
/// - a `model_type` that is not in the table of architectures (`known_architectures`), or whose
///   attention is of a kind that this module does not compute, with its name;
/// - a type of rotary positions that is not known, or a number for them that is not;
/// - sizes and numbers that are missing, of another type, or out of range.
///
/// The file is data and may be hostile: it has at most 1 MiB, and tells of at most 4096 layers.
ModelLayerOptions options_from_config(const std::string& config_path, int64_t layer,
                                      const std::string& part = {});

/// How many layers such a model has, or a part of it, whether or not each is computed: of some
/// models only some layers are attention. Throws as `options_from_config` does.
int64_t num_layers_from_config(const std::string& config_path, const std::string& part = {});

/// The parts that such a model has, by name; none if it has one attention in a layer. Throws as
/// `options_from_config` does.
std::vector<std::string> parts_from_config(const std::string& config_path);

/// One layer of a model in a folder, as transformers' `save_pretrained` leaves it:
/// `config.json` beside `model.safetensors`, `pytorch_model.bin`, or the index of either. In
/// evaluation mode. Throws what `options_from_config` and `load` throw, and where the weights
/// are not those that the configuration tells of. Where a model multiplies by 1 + gain
/// (Gemma 3), the parameter is that sum, which a half dtype rounds; load it with
/// `dtype(at::kFloat)` to keep it whole.
ModelLayer load_layer(const std::string& model_folder, int64_t layer,
                      const ModelLayerLoadOptions& options = {});

/// The file with the weights of the model in a folder, or their index. Throws `c10::Error` if
/// there is none.
std::string weights_of_model(const std::string& model_folder);

/// An architecture in the table.
struct KnownArchitecture {
  std::string model_type;
  /// Which attentions it has, if several.
  std::vector<std::string> parts;
  /// Why it is refused; empty: it is not.
  std::string refused;
};
/// All of them, by name.
std::vector<KnownArchitecture> known_architectures();

}  // namespace mha
