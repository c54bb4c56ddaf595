#pragma once

#include <mha/mask.h>
#include <mha/multi_head_attention.h>

#include <nlohmann/json_fwd.hpp>

#include "layer_input.h"
#include "mask_options.h"

namespace mha::cli {

/// What a layer is called with: the tensors of an input file, and the mask of the arguments.
struct LayerCall {
  LayerInput::Sequences names;
  at::Tensor query, key, value;  // key and value may be undefined
  Mask mask;
};

/// Reads them; the sequences must have the dtype of the weights.
LayerCall read_call(LayerInput& input, const MaskOptions& mask, at::ScalarType dtype);

/// What the call's weights, per head, take in memory. 0 for inputs that are no sequences.
double map_bytes(const MultiHeadAttention& module, const LayerCall& call);

/// Name, shape and dtype of each sequence, for a report.
nlohmann::ordered_json described(const LayerCall& call);
nlohmann::ordered_json described(const at::Tensor& tensor);

/// "(2, 5, 12) float32", of a described tensor.
std::string tensor_text(const nlohmann::ordered_json& described);

}  // namespace mha::cli
