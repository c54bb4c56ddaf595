#pragma once

#include "mask/resolved_mask.h"

namespace mha::detail {

/// A tensor in which what it repeats by a stride of 0, in the dimensions from `first` on, is
/// there once: a size of 1 then stands for all. A gradient flows into every number of the
/// tensor that was given, so that one that asks for it stays as it is.
at::Tensor without_repeats(at::Tensor tensor, int64_t first = 0);

// A mask's tensors in the shape of a call's pairs, keys or queries, without repeats. Each
// throws `c10::Error` naming the constructor, the shapes it accepts and the one found.

/// (N or 1, H or 1, L or 1, S or 1)
at::Tensor pair_view(const char* constructor, const at::Tensor& tensor,
                     const AttentionSizes& sizes);

/// (N or 1, 1, 1, S), of a tensor (N, S) or (S).
at::Tensor key_view(const char* constructor, const at::Tensor& tensor,
                    const AttentionSizes& sizes);

/// The same, of a tensor (N, S), (S) or (N or 1, 1, 1, S).
at::Tensor added_key_view(const char* constructor, const at::Tensor& tensor,
                          const AttentionSizes& sizes);

/// (N or 1, T) of a tensor (N, T) or (T) about the T queries or keys; `places` is T's letter.
at::Tensor place_view(const char* constructor, const char* argument, const char* places,
                      const at::Tensor& tensor, int64_t batch, int64_t count);

/// (N) integers from 0 to `most`, of which `places` is the letter.
at::Tensor checked_lengths(const char* constructor, const char* places,
                           const at::Tensor& lengths, int64_t batch, int64_t most);

}  // namespace mha::detail
