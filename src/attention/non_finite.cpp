#include "attention/non_finite.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones.h>

namespace mha::detail {

at::Tensor row_is_finite(const at::Tensor& tensor) {
  return at::isfinite(tensor.detach()).all(-1);
}

at::Tensor finite_rows(const at::Tensor& tensor) {
  return tensor.masked_fill(row_is_finite(tensor).logical_not().unsqueeze(-1), 0);
}

std::vector<int64_t> marked_rows(const at::Tensor& marks) {
  const auto indices = marks.flatten(0, -2).any(0).nonzero().flatten().to(at::kCPU);
  return {indices.data_ptr<int64_t>(), indices.data_ptr<int64_t>() + indices.numel()};
}

namespace {

// (N or 1, H or 1, L or 1): what a tensor says of key j; a size of 1 stands for all keys.
at::Tensor column(const at::Tensor& tensor, int64_t j) {
  return tensor.select(3, tensor.size(3) == 1 ? 0 : j);
}

}  // namespace

at::Tensor open_column(const ResolvedMask& mask, int64_t j, at::Device device) {
  auto open = at::ones({1, 1, 1}, at::TensorOptions().dtype(at::kBool).device(device));
  if (j >= mask.keys) return open;  // an extra key
  if (!mask.band.is_open() || !mask.lows.empty() || !mask.highs.empty()) {
    const auto query =
        at::arange(mask.queries, at::TensorOptions().dtype(at::kLong).device(device));
    const auto distance = j - query;
    open =
        open.logical_and(distance.ge(mask.band.low).logical_and(distance.le(mask.band.high)));
    for (const auto& low : mask.lows) {
      open = open.logical_and(distance.ge(low.view({-1, 1, 1})));
    }
    for (const auto& high : mask.highs) {
      open = open.logical_and(distance.le(high.view({-1, 1, 1})));
    }
  }
  for (const auto& lengths : mask.lengths) {
    open = open.logical_and(lengths.gt(j).unsqueeze(-1).unsqueeze(-1));
  }
  for (const auto& keep : mask.keep_keys) open = open.logical_and(keep.select(3, j).ne(0));
  for (const auto& block : mask.block_keys) {
    open = open.logical_and(block.select(3, j).logical_not());
  }
  for (const auto& keep : mask.keep) open = open.logical_and(column(keep, j).ne(0));
  for (const auto& block : mask.block) {
    open = open.logical_and(column(block, j).logical_not());
  }
  for (size_t i = 0; i < mask.key_documents.size(); ++i) {
    const auto document = mask.key_documents[i].narrow(1, j, 1);
    open = open.logical_and(mask.query_documents[i].eq(document).unsqueeze(1));
  }
  for (const auto* list : {&mask.add, &mask.add_keys}) {
    for (const auto& term : *list) {
      open = open.logical_and(column(term.detach(), j).ne(-infinity));
    }
  }
  return open;
}

}  // namespace mha::detail
