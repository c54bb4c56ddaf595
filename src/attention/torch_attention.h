#pragma once

#include "attention/torch_form.h"

namespace mha::detail {

/// `attention` by `at::scaled_dot_product_attention`, asked as `form` says, with the promises
/// of the other paths, and gradients of every order.
///
/// What is not finite must neither come out of a blocked place nor be lost, and scores are held
/// within their range. On the CPU inputs and output are looked at, and where something is not
/// finite, or might have been on its way, the composition of ATen calls computes the call. On
/// other devices a look would wait for the device, so none is taken: where pairs are blocked,
/// rows that are not finite are replaced before and their effect is put back after. There an
/// infinite key makes NaN of the rows that see it, scores that leave the range are as LibTorch
/// has them, and a gradient that is not finite, or whose product with a blocked value is not,
/// may reach keys and queries that do not see each other. `MHA_CHECK_FINITE=0` in the
/// environment says that all numbers are finite and saves the passes.
AttentionResult torch_attention(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const ResolvedMask& mask,
                                const AttentionCall& call, const TorchForm& form);

/// What the forms give where no number may be looked at: NaN and infinity reach the rows that
/// see them and no others.
at::Tensor causal_without_reading(const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, double scale, const TorchForm& form);
at::Tensor masked_without_reading(const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, const ResolvedMask& mask,
                                  double scale);

}  // namespace mha::detail
