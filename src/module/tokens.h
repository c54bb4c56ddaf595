#pragma once

#include <ATen/core/Tensor.h>

namespace mha::detail {

/// Rotary positions, (T) or (N, T) each; undefined in a module without them.
struct HeadPositions {
  at::Tensor query, key;
  at::Tensor rotated = {};  ///< the last ones of keys that are rotated already, of a memory
};

/// What a call projects, (N, T, width) each. Undefined: nothing, as the key and value of a call
/// whose memory has them projected, or the query of `project_keys`.
struct Tokens {
  at::Tensor query, key, value;
  HeadPositions positions;
  at::Tensor off = {};  // as `heads_off`; of them gradients are 0 whatever they hold
};

/// Projected and split into heads: (N, H, L, D), and (N, Hk, S, D) twice. Undefined likewise.
struct Heads {
  at::Tensor query, key, value;
};

}  // namespace mha::detail
