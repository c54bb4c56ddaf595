#pragma once

#include <mha/layout.h>
#include <mha/multi_head_attention.h>

#include <optional>
#include <string>
#include <vector>

namespace mha {

/// Options of `load`, `save` and `options_from_file`.
struct WeightFileOptions {
  /// Where the layer lies in the file: `encoder.layer.0.attention` stands before a dot and the
  /// layout's names. Empty: the names stand alone.
  TORCH_ARG(std::string, prefix);
  /// How its tensors are named and shaped. Default: for reading found from the names in the
  /// file, for `save` native.
  TORCH_ARG(std::optional<Layout>, layout);
  /// For reading: let a file of another floating dtype than the module's be converted, each
  /// number rounded to the nearest. Default: it is refused.
  TORCH_ARG(bool, convert_dtype) = false;
  /// For reading: names behind the prefix that are taken not to be in the file, such as
  /// `rotary_emb.cos_cached` of a writer who stores what others compute; with a `*` at its end,
  /// all that begin so. Default: a name that the layer has no use for is an error.
  TORCH_ARG(std::vector<std::string>, ignored);
  /// For reading: take a file of `torch.save` that was written without checksums, by
  /// `torch.serialization.set_crc32_options(False)`: one that is 0 is not compared, any other
  /// is. Default: such a file is refused as damaged.
  TORCH_ARG(bool, missing_checksums) = false;
};

/// Copies the weights of one layer from a file into `module`.
///
/// The file's content, not its name, tells the format:
///
/// | format       | written by                                                              |
/// | ------------ | ----------------------------------------------------------------------- |
/// | safetensors  | `save`, and Python's `safetensors`                                      |
/// | index        | Hugging Face, for models in several files of the other formats:         |
/// |              | `model.safetensors.index.json`; it may name files in its own folder     |
/// |              | only, of which those with the layer's tensors must be there             |
/// | `torch.save` | Python: `torch.save(module.state_dict(), path)`, PyTorch 1.6 or later; |
/// |              | C++: `torch::save(module, path)`, of this module, of torch's, or of a   |
/// |              | model that holds one                                                    |
///
/// In a file of `torch.save`, a tensor in a dictionary inside of another has the keys of both
/// in its name: in the checkpoint `{"epoch": 3, "model": module.state_dict()}` the layer's
/// prefix is `model`. Objects of classes that are not known are passed over, without being built.
/// Pickled modules, TorchScript and the form before PyTorch 1.6 are refused.
///
/// Strict, and all or nothing: missing and unexpected tensors, shapes and dtypes that differ
/// are all listed in one `c10::Error`, and the module is left as it was. Tensors outside the
/// prefix are ignored, and so is what other models keep beside their attention: in the bert
/// layout `output.LayerNorm`, in gpt2 `bias` and `masked_bias` (its causal mask), in llama
/// `rotary_emb.inv_freq`. No other writer's file says how heads are rotated: set
/// `MultiHeadAttentionOptions::rotary` from the model's configuration, or let `load_layer`
/// (`model_config.h`) do so. Gains are multiplied as they stand; where a model multiplies by
/// 1 + gain (Gemma 3), name the layout that adds it. The dtype of the file must be that of the
/// module, unless `convert_dtype` is set; the device may differ. Numbers of heads that `save`
/// left in the file must be the module's, and so must the pairs that it says are rotated
/// (`pairing`, `rotary_dim`); base and scaling may be others. Which parameters require
/// gradients does not change.
///
/// The file is data and may be hostile: nothing in it is executed (LibTorch's unpickler is not
/// used), every size and offset is checked before it is used, and only the layer's own tensors
/// are read. A safetensors header may have 16 MiB and some 40,000 tensors, an index
/// 32 MiB and some 200,000, a file of `torch.save` some 10,000.
/// Source of the first format: https://github.com/huggingface/safetensors
void load(MultiHeadAttention& module, const std::string& path,
          const WeightFileOptions& options = {});

/// The module that one layer of a file holds, on the CPU and in training mode: its options are
/// those of `options_from_file`, its weights those of the file. Draws no random numbers.
/// Throws what these two throw.
MultiHeadAttention load(const std::string& path,
                        std::optional<int64_t> num_heads = std::nullopt,
                        const WeightFileOptions& options = {});

/// Writes the weights of `module` to a safetensors file that Python's `safetensors` reads. The
/// file appears whole or not at all, with the mode of one that it replaces. Options that
/// the shapes do not tell go into the file's metadata (`mha.num_heads`, `mha.dropout`, ...).
/// So `load(path)` gives an equal module from any layout, and saving that gives an equal file.
/// Throws `c10::Error` if the layout cannot express the module (see `Layout`), or the file
/// cannot be written.
void save(const MultiHeadAttention& module, const std::string& path,
          const WeightFileOptions& options = {});

/// The options of the module that one layer of a file belongs to, so that
///
///     MultiHeadAttention module(options_from_file(path, 12, where));
///     load(module, path, where);
///
/// needs no sizes. d_model, kdim, vdim, head_dim, num_kv_heads, bias, output_bias, add_bias_kv,
/// sinks and dtype follow from the names, shapes and dtypes of the tensors, and so do `qk_norm`
/// (where the file has gains: layer if it has biases beside them, else rms) and `output_gate`;
/// the rest from the metadata that `save` writes. Other writers leave none, and then options
/// keep their defaults. No shape tells `num_heads`: without the argument it comes from the
/// metadata too. Reads only what comes before the numbers. With `convert_dtype`, the dtypes may
/// differ, and the one to which those of the projections' weights promote counts.
///
/// Throws `c10::Error`, as strictly as `load` does, if the file holds no complete layer there,
/// or if `num_heads` is unknown, does not divide the width of the projections, or differs from
/// the metadata.
MultiHeadAttentionOptions options_from_file(const std::string& path,
                                            std::optional<int64_t> num_heads = std::nullopt,
                                            const WeightFileOptions& options = {});

}  // namespace mha
