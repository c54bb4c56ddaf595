#pragma once

#include <ATen/core/Tensor.h>
#include <mha/scaled_dot_product_attention.h>

#include <cmath>
#include <string>
#include <vector>

#include "support/oracle.h"
#include "support/support.h"

// Calls of scaled_dot_product_attention with gradients, by the library, the oracle and torch.
namespace mha::test {

/// Output, weights and gradients of sum(output * grad_output) by input; what is not computed is
/// undefined.
struct Results {
  at::Tensor output, weights;
  at::Tensor query, key, value, added;
};

/// One call: query (N, H, L, D), key and value (N, Hk, S, .), leaves of autograd.
struct Call {
  at::Tensor query, key, value;
  Mask mask;
  at::Tensor added;  // the leaf in `mask`, or undefined
  at::Tensor grad_output;
  std::string name;

  DenseMask dense() const {
    return dense_mask(mask, query.size(0), query.size(1), query.size(2), key.size(2));
  }
  double scale() const { return 1 / std::sqrt(static_cast<double>(query.size(3))); }
};

enum class MaskKind { none, add, keep, causal, padding, window_and_add };
inline const std::vector<MaskKind> masked{MaskKind::add, MaskKind::keep, MaskKind::causal,
                                          MaskKind::padding, MaskKind::window_and_add};

struct Sizes {
  int64_t N, H, Hk, L, S, D, Dv;
};

/// Every query may attend to the first key at least, so that torch's answer is not NaN.
Call draw(Random& random, Sizes z, MaskKind kind, at::ScalarType dtype, double spread = 1);

/// Sizes on either side of vector widths and block sizes, in random combinations that the loops
/// of the oracle get through in milliseconds.
Sizes draw_sizes(Random& random);

Results run_library(const Call& call, Weights weights = Weights::per_head);
Results run_oracle(const Call& call);
/// matmul, softmax, matmul in the dtype of the call.
Results run_torch_composition(const Call& call);
/// at::scaled_dot_product_attention.
Results run_torch_fused(const Call& call);

}  // namespace mha::test
