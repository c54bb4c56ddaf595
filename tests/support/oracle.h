#pragma once

#include <ATen/core/Tensor.h>
#include <mha/multi_head_attention.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>

/// Multi-head attention by plain loops in double, written from the contract and independent of
/// the library: no matmul, no softmax, no autograd. The tests measure the library against it.
/// Tensors of any floating dtype and strides go in, float64 tensors come out.
namespace mha::test {

/// The numbers of a tensor as the loops read them: contiguous, without gradients.
at::Tensor as_double(const at::Tensor& tensor);

/// What a mask says about every query and key.
struct DenseMask {
  at::Tensor
      allowed;       ///< (N, H, L, S) float64: 1 where the query may attend to the key, else 0
  at::Tensor added;  ///< (N, H, L, S) float64: the term added to the scaled score
};

/// Evaluates the terms of `mask` over S given keys, then appends `open_keys` keys that every
/// query may attend to, as `add_bias_kv` and `add_zero_attn` do.
DenseMask dense_mask(const Mask& mask, int64_t N, int64_t H, int64_t L, int64_t S,
                     int64_t open_keys = 0);

/// The number of (n, h, i) that may attend to nothing.
int64_t count_dead_rows(const DenseMask& mask);

/// `gradient` of the dense added term, (N, H, L, >= S), summed to the shape of `mask`, a tensor
/// that was given to `Mask::add`. Columns after the mask's S are those of appended keys.
at::Tensor sum_to_mask_shape(const at::Tensor& gradient, const at::Tensor& mask);

/// What scores are made with, beside the mask. A number is a scale alone.
struct OracleScoring {
  OracleScoring(double scale_, double softcap_ = 0, at::Tensor sinks_ = {})
      : scale(scale_), softcap(softcap_), sinks(std::move(sinks_)) {}
  double scale, softcap;  // softcap 0: none
  at::Tensor sinks;       // (H); undefined: none
};

/// Attention of query (N, H, L, D) over key (N, Hk, S, D) and value (N, Hk, S, Dv): output
/// (N, H, L, Dv) and weights (N, H, L, S). Query head h reads key/value head h / (H / Hk).
/// Blocked keys and values are never read; a row without an allowed key is 0.
AttentionOutput oracle_attention(const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value, const DenseMask& mask,
                                 const OracleScoring& scoring);
/// The same with the mask of a call and the default scale 1 / sqrt(D).
AttentionOutput oracle_attention(const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value, const Mask& mask = {});

/// Gradients of sum(output * grad_output) + sum(weights * grad_weights).
struct OracleGradients {
  at::Tensor query, key, value;  ///< as the inputs
  at::Tensor added;              ///< (N, H, L, S), 0 where blocked
  at::Tensor sinks;              ///< (H); undefined without sinks
};
/// `grad_weights` may be undefined, for 0.
OracleGradients oracle_attention_backward(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const DenseMask& mask,
                                          const OracleScoring& scoring,
                                          const at::Tensor& grad_output,
                                          const at::Tensor& grad_weights);

/// input W^T + b of a (N, T, in) input: (N, T, out).
at::Tensor oracle_linear(const torch::nn::Linear& linear, const at::Tensor& input);

/// The same in heads, feature h * D + d belonging to head h: (N, heads, T, D).
at::Tensor oracle_heads(const torch::nn::Linear& linear, const at::Tensor& input,
                        int64_t heads);

/// The whole module on batch-first inputs (N, L, E), (N, S, kdim), (N, S, vdim), whatever its
/// option `batch_first` says. Reads the module's parameters and options, not its code. Without
/// dropout. Weights are per head, with a column for each appended key.
AttentionOutput oracle_module(const MultiHeadAttention& module, const at::Tensor& query,
                              const at::Tensor& key, const at::Tensor& value,
                              const Mask& mask = {});

/// Gradients of sum(output * grad_output) + sum(weights * grad_weights), weights per head.
struct OracleModuleGradients {
  at::Tensor query, key, value;                  ///< as the inputs
  at::Tensor added;                              ///< (N, H, L, S + appended keys)
  std::map<std::string, at::Tensor> parameters;  ///< by the names of `named_parameters()`
};
/// `grad_weights` may be undefined, for 0.
OracleModuleGradients oracle_module_backward(const MultiHeadAttention& module,
                                             const at::Tensor& query, const at::Tensor& key,
                                             const at::Tensor& value, const Mask& mask,
                                             const at::Tensor& grad_output,
                                             const at::Tensor& grad_weights);

}  // namespace mha::test
