#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>

#include "attention/block_of_queries.h"
#include "attention/gradients.h"
#include "attention/plain_blocks.h"
#include "attention/recomputed.h"
#include "runtime/attention_path.h"

namespace mha::detail {
namespace {

using GradientList = std::vector<at::Tensor>;

// What gradients of terms and sinks are summed in.
at::ScalarType sum_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : dtype;
}

// The lists that a mask's added terms are in, one entry for each term.
std::vector<MaskList> lists_of_added(const ResolvedMask& mask) {
  std::vector<MaskList> lists;
  for (const MaskList& list : mask_lists) {
    if (list.is_added()) lists.insert(lists.end(), (mask.*list.tensors).size(), list);
  }
  return lists;
}

// Puts tensors in the place of a mask's terms and a call's sinks. Gives those behind them.
template <typename Iterator>
Iterator put_terms(Iterator next, ResolvedMask& mask, AttentionCall& call) {
  for (auto* list : added_lists(mask)) {
    for (auto& term : *list) term = *next++;
  }
  if (call.scoring.sinks.defined()) call.scoring.sinks = *next++;
  return next;
}

// By the graph of all queries at once.
GradientList composed_gradients(const GradientList& given, const GradientList& grad_results,
                                ResolvedMask mask, AttentionCall call) {
  const bool create_graph = at::GradMode::is_enabled();
  at::AutoGradMode enable_grad(true);
  const auto inputs = separate(given, create_graph);
  const auto dtype = inputs[0].scalar_type(), wide = plain_dtype(dtype);
  put_terms(inputs.begin() + 3, mask, call);
  const auto result =
      plain_attention(inputs[0].to(wide), inputs[1].to(wide), inputs[2].to(wide), mask, call);
  return gradients({result.output.to(dtype), result.weights}, grad_results, inputs,
                   create_graph);
}

// Sums of a backward without a graph, in the wide dtype, defined where a gradient arrived.
class GradientSums {
 public:
  GradientSums(const GradientList& wide, const ResolvedMask& mask)
      : wide_(wide), sums_(wide.size()), mask_(mask) {}

  // Of leaves as `BlockLeaves` has them.
  void add(const BlockOfQueries& block, const GradientList& grads) {
    for (size_t i = 0; i < grads.size(); ++i) {
      if (grads[i].defined() && !sums_[i].defined()) {
        sums_[i] = at::zeros(wide_[i].sizes(), wide_[i].options());
      }
    }
    if (grads[0].defined()) block.rows_of(sums_[0]).copy_(grads[0]);
    for (const size_t i : {1, 2}) {
      if (grads[i].defined()) block.keys_of(sums_[i]).add_(grads[i]);
    }
    // The parts of the sums are those of the terms.
    auto sums = mask_;
    size_t i = 3;
    for (auto* list : added_lists(sums)) {
      for (auto& term : *list) {
        if (sums_[i].defined()) term = sums_[i];
        ++i;
      }
    }
    i = 3;
    for (const auto& sum : added_terms(block.part_of(sums))) {
      if (grads[i].defined()) sum.add_(grads[i]);
      ++i;
    }
    if (i < grads.size() && grads[i].defined()) sums_[i].add_(grads[i]);
  }

  const GradientList& sums() const { return sums_; }

 private:
  GradientList wide_, sums_;
  ResolvedMask mask_;
};

// Given tensors in the dtypes that their gradients are summed in, keys and values contiguous.
GradientList in_wide_dtypes(const GradientList& given) {
  const auto dtype = plain_dtype(given[0].scalar_type());
  GradientList wide;
  for (const auto& tensor : given) wide.push_back(tensor.to(sum_dtype(tensor, dtype)));
  for (const size_t i : {1, 2}) wide[i] = wide[i].contiguous();
  return wide;
}

GradientList block_gradients(const BlockOfQueries& block, const GradientList& wide,
                             const std::vector<bool>& wanted, const GradientList& grad_results,
                             const ResolvedMask& mask, AttentionCall call,
                             const PlainPart& of_call) {
  at::AutoGradMode enable_grad(true);
  auto part = block.part_of(mask);
  GradientList leaves{block.rows_of(wide[0]).contiguous(), block.keys_of(wide[1]),
                      block.keys_of(wide[2])};
  for (const auto& term : added_terms(part)) leaves.push_back(term);
  if (call.scoring.sinks.defined()) leaves.push_back(wide.back());
  for (size_t i = 0; i < leaves.size(); ++i) {
    leaves[i] = leaves[i].detach().requires_grad_(wanted[i]);
  }
  put_terms(leaves.begin() + 3, part, call);
  const auto result = plain_part(leaves[0], leaves[1], leaves[2], part, call, of_call);
  const auto dtype = leaves[0].scalar_type();
  GradientList grads(2);
  if (grad_results[0].defined()) grads[0] = block.rows_of(grad_results[0]).to(dtype);
  if (grad_results[1].defined()) grads[1] = block.pairs_of(grad_results[1]).to(dtype);
  return gradients({result.output, result.weights}, grads, leaves, /*create_graph=*/false);
}

GradientList gradients_in_blocks(const GradientList& given, const GradientList& grad_results,
                                 const ResolvedMask& mask, const AttentionCall& call,
                                 int64_t rows) {
  const auto wide = in_wide_dtypes(given);
  std::vector<bool> wanted;
  for (const auto& tensor : given) wanted.push_back(tensor.requires_grad());
  auto of_sums = mask;
  auto in_wide = call;
  put_terms(wide.begin() + 3, of_sums, in_wide);
  // A gradient of NaN must not reach keys that nobody sees either.
  const bool finite = is_all_finite(wide[0], wide[1], wide[2], call.scoring.scale) &&
                      is_known_finite(grad_results[0]) && is_known_finite(grad_results[1]);
  GradientSums sums(wide, of_sums);
  for (const auto& block : blocks_of_queries(mask, rows, KeysOfBlocks::in_band)) {
    const auto part = part_of_call(block, mask, call, wide[0].device(), finite);
    sums.add(block, block_gradients(block, wide, wanted, grad_results, of_sums, in_wide, part));
  }
  return sums.sums();
}

// A tensor's rows in each block, as views of which autograd has one node.
GradientList split_rows(const at::Tensor& tensor, int64_t rows, int64_t dim, size_t blocks) {
  return tensor.defined() ? tensor.split(rows, dim) : GradientList(blocks);
}

// A term's part in each block, with all keys.
GradientList split_term(const at::Tensor& term, const MaskList& list, const ResolvedMask& mask,
                        const std::vector<BlockOfQueries>& blocks) {
  if (list.has(Axis::query) && term.size(2) == mask.queries) {
    return split_rows(term, blocks[0].rows, 2, blocks.size());
  }
  if (!list.has(Axis::distance)) return GradientList(blocks.size(), term);
  GradientList parts;
  for (const auto& block : blocks) {
    parts.push_back(term.narrow(3, mask.queries - block.from - block.rows,
                                count_distances(block.rows, mask.keys)));
  }
  return parts;
}

// What `split_term` took apart.
at::Tensor joined_term(const GradientList& parts, const at::Tensor& term, const MaskList& list,
                       const ResolvedMask& mask, const std::vector<BlockOfQueries>& blocks) {
  if (!parts[0].defined()) return {};
  if (list.has(Axis::query) && term.size(2) == mask.queries) return at::cat(parts, 2);
  at::Tensor sum;
  for (size_t i = 0; i < parts.size(); ++i) {
    auto part = parts[i];
    if (list.has(Axis::distance)) {
      part = at::constant_pad_nd(
          part, {mask.queries - blocks[i].from - blocks[i].rows, blocks[i].from});
    }
    sum = sum.defined() ? sum + part : part;
  }
  return sum;
}

at::Tensor sum_of_blocks(const GradientList& parts) {
  at::Tensor sum = parts[0];
  for (size_t i = 1; i < parts.size() && sum.defined(); ++i) sum = sum + parts[i];
  return sum;
}

// Output and weights of a block, whose constants are what its mask is made of beside the terms.
Recomputable results_of_block(ResolvedMask mask, AttentionCall call, BlockOfQueries block,
                              ResolvedMask whole) {
  return [=](const GradientList& inputs, const GradientList& constants) {
    auto part = mask;
    auto own = call;
    auto next = constants.begin();
    for (auto* list : tensor_lists(part)) {
      for (auto& tensor : *list) tensor = *next++;
    }
    put_terms(inputs.begin() + 3, part, own);
    const auto result =
        plain_part(inputs[0].contiguous(), inputs[1], inputs[2], part, own,
                   part_of_call(block, whole, call, inputs[0].device(), /*finite=*/false));
    return GradientList{result.output, result.weights};
  };
}

// With a graph of nodes that keep what they were given, and no more.
GradientList recorded_gradients(const GradientList& given, const GradientList& grad_results,
                                const ResolvedMask& mask, const AttentionCall& call,
                                int64_t rows) {
  const auto wide = in_wide_dtypes(given);
  const auto blocks = blocks_of_queries(mask, rows, KeysOfBlocks::all);
  const auto lists = lists_of_added(mask);
  std::vector<GradientList> inputs{split_rows(wide[0], rows, 2, blocks.size()),
                                   GradientList(blocks.size(), wide[1]),
                                   GradientList(blocks.size(), wide[2])};
  for (size_t i = 0; i < lists.size(); ++i) {
    inputs.push_back(split_term(wide[3 + i], lists[i], mask, blocks));
  }
  if (call.scoring.sinks.defined()) inputs.emplace_back(blocks.size(), wide.back());
  const auto grad_rows = split_rows(grad_results[0], rows, -2, blocks.size());
  const auto grad_weights = split_rows(grad_results[1], rows, -2, blocks.size());

  std::vector<GradientList> parts(inputs.size());  // of each input, of each block
  for (size_t b = 0; b < blocks.size(); ++b) {
    GradientList of_block, constants, grads{grad_rows[b], grad_weights[b]};
    for (const auto& input : inputs) of_block.push_back(input[b]);
    for (auto& grad : grads) {
      if (grad.defined()) grad = grad.to(wide[0].scalar_type());
    }
    const auto part = blocks[b].part_of(mask);
    for (auto* list : tensor_lists(part)) {
      for (const auto& tensor : *list) constants.push_back(tensor.detach());
    }
    const auto found = recomputed_gradients(results_of_block(part, call, blocks[b], mask),
                                            of_block, grads, constants);
    for (size_t i = 0; i < parts.size(); ++i) parts[i].push_back(found[i]);
  }
  GradientList sums{parts[0][0].defined() ? at::cat(parts[0], 2) : at::Tensor(),
                    sum_of_blocks(parts[1]), sum_of_blocks(parts[2])};
  for (size_t i = 0; i < lists.size(); ++i) {
    sums.push_back(joined_term(parts[3 + i], wide[3 + i], lists[i], mask, blocks));
  }
  if (call.scoring.sinks.defined()) sums.push_back(sum_of_blocks(parts.back()));
  return sums;
}

}  // namespace

GradientList plain_gradients(const GradientList& given, const GradientList& grad_results,
                             const ResolvedMask& mask, const AttentionCall& call,
                             int64_t rows) {
  GradientList grads{grad_results[0], grad_results.size() > 1 ? grad_results[1] : at::Tensor()};
  if (!grads[0].defined() && !grads[1].defined()) return GradientList(given.size());
  if (rows >= mask.queries || is_followed(grads)) {
    return composed_gradients(given, grads, mask, call);
  }
  for (auto& grad : grads) {
    if (grad.defined() && grad._is_zerotensor()) grad = at::zeros(grad.sizes(), grad.options());
  }
  auto found = at::GradMode::is_enabled() ? recorded_gradients(given, grads, mask, call, rows)
                                          : gradients_in_blocks(given, grads, mask, call, rows);
  for (size_t i = 0; i < given.size(); ++i) {
    if (found[i].defined()) found[i] = found[i].to(given[i].scalar_type());
  }
  return found;
}

}  // namespace mha::detail
