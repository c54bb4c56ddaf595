#pragma once

#include <mha/multi_head_attention.h>

#include <cstdint>
#include <string>

#include "support/oracle.h"
#include "support/support.h"

namespace mha::test {

/// How the tensors of a call are laid out.
enum class InputLayout { batch_first, sequence_first, unbatched };

/// What the part of a mask that is not about padding is made of.
enum class AttentionMaskKind {
  none,
  add,          // (L, S)
  add_batch,    // (N, L, S)
  add_heads,    // (N * H, L, S)
  add_full,     // (N or 1, H or 1, L, S)
  block,        // (L, S)
  block_heads,  // (N * H, L, S)
  keep,         // (L, S)
  causal,
  window,
};

/// What the part of a mask that is about padding is made of.
enum class PaddingKind { none, block_keys, keep_keys, lengths };

/// One setting of the module and one call of it. N, L, S, H and D are pairwise different, so
/// that no two dimensions can be mistaken for each other unnoticed.
struct Configuration {
  uint64_t seed = 0;
  MultiHeadAttentionOptions options{1, 1};
  at::ScalarType dtype = at::kFloat;
  InputLayout layout = InputLayout::batch_first;
  int64_t N = 0, L = 0, S = 0, H = 0, D = 0;
  int64_t kdim = 0, vdim = 0;
  int64_t open_keys = 0;  // appended keys: 0, 1 or 2
  Weights weights = Weights::per_head;
  bool weights_by_option = false;  // the call leaves them to the module's option
  AttentionMaskKind attention_mask = AttentionMaskKind::none;
  PaddingKind padding = PaddingKind::none;
};

/// The configuration of this seed; float32 for even, float64 for odd seeds.
Configuration draw_configuration(uint64_t seed);

/// The tensors of the call, always batch first: (N, L, E), (N, S, kdim), (N, S, vdim).
struct CallData {
  at::Tensor query, key, value;
  /// `attention_terms & padding_terms`.
  Mask mask;
  Mask attention_terms, padding_terms;
  /// The leaf in `mask` that gradients flow into; undefined unless the mask adds.
  at::Tensor added;
  /// The upstream gradients: (N, L, E), and as the weights that the call returns (or
  /// undefined).
  at::Tensor grad_output, grad_weights;
  DenseMask dense;
};

/// Unit-scale data for the configuration. Upstream gradients are divided by 2 sqrt(N L), so
/// that a parameter's gradient, which sums over all queries, is of unit scale too.
CallData draw_call(const Configuration& configuration);

/// Normal values for all parameters, biases included. The standard deviation of weights is that
/// of torch.nn.Linear's initialisation, 1 / sqrt(3 fan in), so that projections of unit-scale
/// data are of unit scale.
void randomise_parameters(torch::nn::Module& module, uint64_t seed);

/// `tensor` (N, T, X), in the layout of the configuration; and back.
at::Tensor to_layout(const at::Tensor& tensor, InputLayout layout);
at::Tensor from_layout(const at::Tensor& tensor, InputLayout layout);

/// Everything that identifies the case, for failure messages.
std::string describe(const Configuration& configuration);

}  // namespace mha::test
