#pragma once

#include <mha/mask.h>
#include <mha/scaled_dot_product_attention.h>

#include <optional>
#include <utility>

namespace mha {

/// What one call of a `MultiHeadAttention` may be given beside its inputs. A `Mask` alone will
/// do where nothing else is wanted.
struct CallOptions {
  CallOptions() = default;
  CallOptions(Mask mask) : mask_(std::move(mask)) {}

  /// Which keys each query may attend to, and what is added to its scores.
  TORCH_ARG(Mask, mask);
  /// The weights to return. Default: the module's option of that name.
  TORCH_ARG(std::optional<Weights>, weights);
};

}  // namespace mha
