#pragma once

#include <mha/mask.h>
#include <mha/model_config.h>
#include <mha/multi_head_attention.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "input_tensors.h"
#include "mask_options.h"

namespace mha::cli {

/// What a layer is called with: the tensors of an input file, and the mask of the arguments.
struct LayerCall {
  /// Names of tensors in the file; `key` and `value` may be empty, for self-attention.
  struct Names {
    std::string query, key, value;
  };

  Names names;
  at::Tensor query, key, value;  // key and value may be undefined
  Mask mask;
};

/// Reads them: `query` with or without `key` and `value`, or `x`, or the file's only tensor
/// that the mask has no use for. They must have the dtype of the layer's weights.
/// The mask is that of the arguments and, of a model's layer, its own.
LayerCall read_call(InputTensors& input, const MaskOptions& mask, const ModelLayer& layer);

/// How many samples a call has, and how many weights one head has in one sample; 0 for inputs
/// that are no sequences.
struct MapSize {
  int64_t samples = 0;
  double weights = 0;
};
MapSize map_size(const MultiHeadAttention& module, const LayerCall& call);

/// What the weights that a call returns take in memory.
double weights_bytes(const MultiHeadAttention& module, const LayerCall& call, Weights weights);

/// Name, shape and dtype of each sequence, for a report.
nlohmann::ordered_json described(const LayerCall& call);
nlohmann::ordered_json described(const at::Tensor& tensor);

/// "(2, 5, 12) float32", of a described tensor.
std::string tensor_text(const nlohmann::ordered_json& described);

}  // namespace mha::cli
