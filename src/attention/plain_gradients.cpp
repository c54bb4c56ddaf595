#include "attention/plain_gradients.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>

#include "attention/block_of_queries.h"
#include "attention/gradients.h"
#include "attention/mask_constants.h"
#include "attention/recomputed.h"
#include "attention/tensor_parts.h"
#include "runtime/attention_path.h"

namespace mha::detail {
namespace {

using GradientList = std::vector<at::Tensor>;

// What gradients of terms and sinks are summed in.
at::ScalarType sum_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : dtype;
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
                   create_graph ? Graph::recorded : Graph::freed);
}

// The part of each given tensor in a block, as a view. `whole` is the call's mask.
GradientList parts_in_block(const GradientList& given, const BlockOfQueries& block,
                            ResolvedMask mask, AttentionCall call) {
  put_terms(given.begin() + 3, mask, call);
  GradientList parts{block.part_of_query(given[0]), block.part_of_key(given[1]),
                     block.part_of_key(given[2])};
  for (const auto& term : added_terms(block.part_of_mask(mask))) parts.push_back(term);
  if (call.scoring.sinks.defined()) {
    parts.push_back(block.part_of_sinks(call.scoring.sinks));
  }
  return parts;
}

// Given tensors in the dtypes that their gradients are summed in, keys and values contiguous.
GradientList in_wide_dtypes(const GradientList& given) {
  const auto dtype = plain_dtype(given[0].scalar_type());
  GradientList wide;
  for (const auto& tensor : given) wide.push_back(tensor.to(sum_dtype(tensor, dtype)));
  for (const size_t i : {1, 2}) wide[i] = wide[i].contiguous();
  if (at::GradMode::is_enabled()) return wide;
  // A copy that nobody records says what was wanted of its original.
  for (size_t i = 0; i < wide.size(); ++i) {
    wide[i] = wide[i].detach().requires_grad_(given[i].requires_grad());
  }
  return wide;
}

// Output and weights of a block, whose constants are what its mask is made of beside the terms.
Recomputable results_of_block(const ResolvedMask& mask, const AttentionCall& call,
                              const PlainPart& of_call) {
  return [=](const GradientList& inputs, const GradientList& constants) {
    auto part = with_constants(mask, constants);
    auto own = call;
    put_terms(inputs.begin() + 3, part, own);
    auto now = of_call;  // with a generator that has drawn nothing
    if (now.generator.defined()) now.generator = now.generator.clone();
    const auto result =
        plain_part(inputs[0].contiguous(), inputs[1], inputs[2], part, own, now);
    return GradientList{result.output, result.weights};
  };
}

// What a backward of one block takes beside the inputs: gradients in the wide dtype.
GradientList grads_in_block(const GradientList& grad_results, const BlockOfQueries& block,
                            at::ScalarType dtype) {
  GradientList grads(2);
  if (grad_results[0].defined()) grads[0] = block.part_of_query(grad_results[0]).to(dtype);
  if (grad_results[1].defined()) grads[1] = block.part_of_weights(grad_results[1]).to(dtype);
  return grads;
}

GradientList gradients_in_blocks(const GradientList& wide, const GradientList& grad_results,
                                 const ResolvedMask& mask, const AttentionCall& call,
                                 const BlockSizes& sizes) {
  // A gradient of NaN must not reach keys that nobody sees either.
  const bool finite = is_all_finite(wide[0], wide[1], wide[2], call.scoring.scale) &&
                      is_known_finite(grad_results[0]) && is_known_finite(grad_results[1]);
  GradientList sums(wide.size());
  for (const auto& block :
       blocks_of_queries(mask, wide[1].size(1), sizes, KeysOfBlocks::in_band)) {
    const auto part = block.part_of_mask(mask);
    auto inputs = parts_in_block(wide, block, mask, call);
    for (size_t i = 0; i < inputs.size(); ++i) {
      inputs[i] = inputs[i].detach().requires_grad_(wide[i].requires_grad());
    }
    const auto found = recomputed_gradients(
        results_of_block(part, call, part_of_call(block, mask, call, wide[0].device(), finite)),
        inputs, grads_in_block(grad_results, block, wide[0].scalar_type()), constants_of(part));
    // Tensors that get no gradient stand in for their sums.
    auto places = wide;
    for (size_t i = 0; i < found.size(); ++i) {
      if (!found[i].defined()) continue;
      if (!sums[i].defined()) sums[i] = at::zeros(wide[i].sizes(), wide[i].options());
      places[i] = sums[i];
    }
    places = parts_in_block(places, block, mask, call);
    for (size_t i = 0; i < found.size(); ++i) {
      if (found[i].defined()) places[i].add_(found[i]);
    }
  }
  return sums;
}

// With a graph of nodes that keep what they were given, and no more.
GradientList recorded_gradients(const GradientList& wide, const GradientList& grad_results,
                                const ResolvedMask& mask, const AttentionCall& call,
                                const BlockSizes& sizes) {
  const auto blocks = blocks_of_queries(mask, wide[1].size(1), sizes, KeysOfBlocks::all);
  GradientList places;
  for (const auto& tensor : wide) places.push_back(tensor.detach());
  const auto all = [&](size_t i) {
    return [=](const at::Tensor& tensor, size_t b) {
      auto whole = places;
      whole[i] = tensor;
      return parts_in_block(whole, blocks[b], mask, call)[i];
    };
  };
  const auto of_grads = [&](size_t i) {
    return [=](const at::Tensor& tensor, size_t b) {
      return i == 0 ? blocks[b].part_of_query(tensor) : blocks[b].part_of_weights(tensor);
    };
  };
  const auto dtype = wide[0].scalar_type();
  std::vector<GradientList> inputs, grads, found(wide.size());  // of each tensor, in each block
  for (size_t i = 0; i < wide.size(); ++i) {
    inputs.push_back(parts_of(wide[i], blocks.size(), all(i)));
  }
  for (size_t i = 0; i < grad_results.size(); ++i) {
    const auto& grad = grad_results[i];
    grads.push_back(grad.defined() ? parts_of(grad.to(dtype), blocks.size(), of_grads(i))
                                   : GradientList(blocks.size()));
  }
  for (size_t b = 0; b < blocks.size(); ++b) {
    GradientList of_block;
    for (const auto& input : inputs) of_block.push_back(input[b]);
    const auto part = blocks[b].part_of_mask(mask);
    // What gradients of gradients will be is not known to be finite.
    const auto of_call =
        part_of_call(blocks[b], mask, call, wide[0].device(), /*finite=*/false);
    const auto of_inputs = recomputed_gradients(results_of_block(part, call, of_call), of_block,
                                                {grads[0][b], grads[1][b]}, constants_of(part));
    for (size_t i = 0; i < found.size(); ++i) found[i].push_back(of_inputs[i]);
  }
  GradientList sums(wide.size());
  for (size_t i = 0; i < sums.size(); ++i) {
    if (found[i][0].defined()) sums[i] = sum_of_parts(found[i], wide[i].sizes(), all(i));
  }
  return sums;
}

}  // namespace

GradientList plain_gradients(const GradientList& given, const GradientList& grad_results,
                             const ResolvedMask& mask, const AttentionCall& call,
                             const BlockSizes& sizes) {
  GradientList grads{grad_results[0], grad_results.size() > 1 ? grad_results[1] : at::Tensor()};
  if (!grads[0].defined() && !grads[1].defined()) return GradientList(given.size());
  if (is_one_block(sizes, mask, given[1].size(1)) || is_followed(grads)) {
    return composed_gradients(given, grads, mask, call);
  }
  for (auto& grad : grads) {
    if (grad.defined() && grad._is_zerotensor()) grad = at::zeros(grad.sizes(), grad.options());
  }
  const auto wide = in_wide_dtypes(given);
  auto found = at::GradMode::is_enabled() ? recorded_gradients(wide, grads, mask, call, sizes)
                                          : gradients_in_blocks(wide, grads, mask, call, sizes);
  for (size_t i = 0; i < given.size(); ++i) {
    if (found[i].defined()) found[i] = found[i].to(given[i].scalar_type());
  }
  return found;
}

}  // namespace mha::detail
