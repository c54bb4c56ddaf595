#include "module/off_heads.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linear.h>

#include "runtime/finite.h"

namespace mha::detail {
namespace {

// (rows or columns of a weight): of heads that are off in every sample.
at::Tensor places_off(const at::Tensor& off, int64_t places) {
  return off.all(0).repeat_interleave(places / off.size(1));
}

}  // namespace

at::Tensor heads_off(const at::Tensor& head_mask, at::Device device) {
  if (!head_mask.defined()) return {};
  const auto off = head_mask.detach().eq(0);
  if (!may_have_marks(off)) return {};
  return (off.dim() == 1 ? off.unsqueeze(0) : off).to(device);
}

at::Tensor kv_heads_off(const at::Tensor& off, int64_t kv_heads) {
  if (!off.defined() || off.size(1) == kv_heads) return off;
  const auto shared = off.unflatten(1, {kv_heads, off.size(1) / kv_heads}).all(2);
  return may_have_marks(shared) ? shared : at::Tensor();
}

at::Tensor without_off_heads(const at::Tensor& heads, const at::Tensor& off) {
  // Norms square them.
  const auto dtype = heads.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto squares = heads.detach().to(dtype).square();
  const auto bad = row_is_finite(squares).logical_not().logical_and(off.unsqueeze(1));
  return may_have_marks(bad) ? heads.masked_fill(bad.unsqueeze(-1), 0) : heads;
}

at::Tensor project_without_off_heads(torch::nn::LinearImpl& layer, const at::Tensor& tokens,
                                     const at::Tensor& off) {
  auto finite = row_is_finite(layer.weight);
  if (layer.bias.defined()) finite = finite.logical_and(at::isfinite(layer.bias.detach()));
  const auto bad = places_off(off, layer.weight.size(0)).logical_and(finite.logical_not());
  if (!may_have_marks(bad)) return {};
  return at::linear(tokens, layer.weight.masked_fill(bad.unsqueeze(1), 0),
                    layer.bias.defined() ? layer.bias.masked_fill(bad, 0) : layer.bias);
}

at::Tensor merge_without_off_heads(torch::nn::LinearImpl& layer, const at::Tensor& merged,
                                   const at::Tensor& off) {
  const auto finite = at::isfinite(layer.weight.detach()).all(0);
  const auto bad = places_off(off, layer.weight.size(1)).logical_and(finite.logical_not());
  if (!may_have_marks(bad)) return {};
  return at::linear(merged.to(layer.weight.scalar_type()), layer.weight.masked_fill(bad, 0),
                    layer.bias);
}

}  // namespace mha::detail
