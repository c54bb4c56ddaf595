#pragma once

#include <mha/kv_cache.h>
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
  /// The cache that the projected keys and values of this call are appended to, before its
  /// queries attend to all that it then holds: S counts the cached keys and the new ones, for
  /// the mask, the weights and the map. In a batch of different lengths `Mask::causal()` and
  /// `Mask::window` go by each sample's own, and what lies behind a sample's end is blocked.
  /// A cache with a window blocks what lies before it, and S counts at most window - 1 cached
  /// keys. Default: none.
  TORCH_ARG(std::optional<KVCache>, cache);
  /// With a cache: how many of the L new tokens each sample really has, (N) integers from 0 to
  /// L. The others are padding; their outputs mean nothing. Default: all.
  TORCH_ARG(at::Tensor, new_lengths);
  /// Keys and values from `MultiHeadAttention::project_keys`, in place of key and value: those
  /// of an encoder's output, which each step of a decoder attends to. The call only reads. In a
  /// cache of different lengths what lies behind a sample's end is blocked, as by
  /// `Mask::lengths`, and each sample's last query stands at its own last key.
  TORCH_ARG(std::optional<KVCache>, memory);
  /// Positions of the queries, for `rotary` and `temperature_tuning`, (L) or (N, L) integers, batch first; in self-attention of
  /// the keys too. Default: 0, 1, ..., with a cache from its `next_positions()` on; where keys
  /// are other tokens and their number differs, these stand from 0 on and the last query where
  /// the last key does, as in `Mask::causal()`; with a memory the last query of each sample
  /// stands where its last key did in the whole text. A decoder that calls a memory step by
  /// step wants to give them.
  TORCH_ARG(at::Tensor, positions);
  /// Those of the keys, (S) or (N, S), where keys are other tokens than the queries. Either
  /// both are given or none.
  TORCH_ARG(at::Tensor, key_positions);
  /// Multiplies each head's output, (H) or (N, H) floating; gradients flow into it. 0 switches
  /// a head off, NaN that it computed too, as `prune_heads` does for good, and of what of it is
  /// not finite no gradient comes. Returned weights and maps are those before it.
  TORCH_ARG(at::Tensor, head_mask);
};

}  // namespace mha
