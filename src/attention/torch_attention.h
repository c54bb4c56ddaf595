#pragma once

#include "attention/torch_form.h"

namespace mha::detail {

/// `attention` by `at::scaled_dot_product_attention`, asked as `form` says, with the promises
/// of the other paths, and gradients of every order.
///
/// What is not finite must neither come out of a blocked place nor be lost. On the CPU the
/// output is looked at, and where it is not finite the composition of ATen calls computes the
/// call. On other devices a look would wait for the device: it is taken where a tensor says
/// what is blocked; nothing is looked at where all pairs are open, nor for a causal mask, where
/// rows that are not finite are replaced before and their effect is added after. There an
/// infinite key, and scores beyond the dtype's range, make NaN of the rows that see them.
/// `MHA_CHECK_FINITE=0` in the environment says that all numbers are finite and saves both.
AttentionResult torch_attention(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const ResolvedMask& mask,
                                const AttentionCall& call, const TorchForm& form);

/// What the causal form gives where no number may be looked at: NaN and infinity reach the rows
/// that see them and no others.
at::Tensor causal_without_reading(const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, double scale, const TorchForm& form);

}  // namespace mha::detail
