#include "attention/mask_gradients.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "runtime/kernel_rows.h"
#include "runtime/run_tasks.h"
#include "runtime/wants_gradient.h"

namespace mha::detail {
namespace {

// The shape that terms have together.
std::vector<int64_t> shape_of_sum(const std::vector<at::Tensor>& terms) {
  auto sizes = terms[0].sizes().vec();
  for (const auto& term : terms) sizes = at::infer_size(sizes, term.sizes());
  return sizes;
}

// Stride 0 where samples or heads share the terms.
cpu::Rows<float> shared_rows(const at::Tensor& sum) {
  auto rows = kernel_rows<float>(sum);
  if (sum.size(0) == 1) rows.n = 0;
  if (sum.size(1) == 1) rows.h = 0;
  return rows;
}

int64_t tiles_of(const cpu::Kernels& kernels, const cpu::AttentionBackward& args) {
  return (args.queries + kernels.tile - 1) / kernels.tile;
}

// (N or 1, H or 1, L, S), also of terms in which one number stands for all queries or keys.
at::Tensor pair_gradient(const cpu::Kernels& kernels, cpu::AttentionBackward args,
                         const std::vector<at::Tensor>& terms) {
  auto sizes = shape_of_sum(terms);
  sizes[2] = args.queries;
  sizes[3] = args.mask.keys;
  const auto sum = at::zeros(sizes, at::kFloat);
  args.grad_added = shared_rows(sum);
  run_tasks(
      sum.size(0) * sum.size(1) * tiles_of(kernels, args), kernels.backward_scratch(args),
      [&](int64_t i, float* scratch) { kernels.backward_added(args, i, i + 1, scratch); });
  return sum;
}

// (N or 1, H or 1, 1, S), or (.., L + S - 1) of tables. The rows of one sum lie over each
// other, those of a table each one place before the one above, so that its tiles take turns. A
// few sums, as many whatever the number of threads, are formed side by side.
at::Tensor shared_gradient(const cpu::Kernels& kernels, cpu::AttentionBackward args,
                           const std::vector<at::Tensor>& terms, const MaskList& list) {
  const bool by_distance = list.has(Axis::distance);
  constexpr int64_t most = 8;
  const int64_t tiles = tiles_of(kernels, args), chunks = std::clamp<int64_t>(tiles, 1, most);
  auto sizes = shape_of_sum(terms);
  const int64_t planes = sizes[0] * sizes[1];
  sizes.insert(sizes.begin(), chunks);
  const auto sums = at::zeros(sizes, at::kFloat);
  if (tiles == 0 || sums.numel() == 0) return sums.sum(0);  // no place to point at
  run_tasks(planes * chunks, kernels.backward_scratch(args), [&](int64_t i, float* scratch) {
    const int64_t plane = i / chunks, chunk = i % chunks;
    auto part = args;
    part.grad_added = shared_rows(sums[chunk]);
    part.grad_added.data += by_distance ? args.queries - 1 : 0;
    part.grad_added.t = by_distance ? -1 : 0;
    kernels.backward_added(part, plane * tiles + chunk * tiles / chunks,
                           plane * tiles + (chunk + 1) * tiles / chunks, scratch);
  });
  return sums.sum(0);
}

}  // namespace

std::vector<at::Tensor> mask_gradients(const cpu::Kernels& kernels, cpu::AttentionBackward args,
                                       const ResolvedMask& mask) {
  std::vector<at::Tensor> gradients;
  for (const MaskList& list : mask_lists) {
    if (!list.is_added()) continue;
    const auto& terms = mask.*list.tensors;
    at::Tensor sum;
    if (any_requires_grad(terms)) {
      sum = list.has(Axis::query) ? pair_gradient(kernels, args, terms)
                                  : shared_gradient(kernels, args, terms, list);
    }
    for (const auto& term : terms) {
      gradients.push_back(term.requires_grad()
                              ? sum.sum_to_size(term.sizes()).to(term.scalar_type())
                              : at::Tensor());
    }
  }
  return gradients;
}

}  // namespace mha::detail
