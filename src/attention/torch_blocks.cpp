#include "attention/torch_blocks.h"

#include <ATen/ops/cat.h>

#include <vector>

#include "attention/block_of_queries.h"
#include "attention/mask_constants.h"
#include "attention/recomputed.h"
#include "attention/tensor_parts.h"
#include "attention/torch_attention.h"
#include "runtime/attention_path.h"
#include "runtime/wants_gradient.h"

namespace mha::detail {
namespace {

// Output of a block, whose keys and values may be of a wider dtype.
Recomputable output_of_block(const ResolvedMask& mask, const AttentionCall& call) {
  return [=](const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& constants) {
    const auto part = with_constants(mask, constants);
    const auto& query = inputs[0];
    const auto key = inputs[1].to(query.scalar_type()),
               value = inputs[2].to(query.scalar_type());
    const auto form = torch_form(query, key, value, part, call);
    const auto result = form.refusal || form.block_queries > 0
                            ? plain_attention_in_blocks(query, key, value, part, call)
                            : torch_attention(query, key, value, part, call, form);
    return std::vector<at::Tensor>{result.output};
  };
}

}  // namespace

AttentionResult torch_attention_in_blocks(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const ResolvedMask& mask,
                                          const AttentionCall& call, const TorchForm& form) {
  const auto blocks = blocks_of_queries(
      mask, key.size(1), {mask.batch, key.size(1), form.block_queries}, KeysOfBlocks::in_band);
  const auto keys_of = [&](const at::Tensor& tensor) {
    // Gradients of keys and values are sums over the blocks.
    const auto given = tensor.scalar_type();
    return parts_of(
        tensor.to(wants_gradient(tensor) ? plain_dtype(given) : given), blocks.size(),
        [blocks](const at::Tensor& whole, size_t b) { return blocks[b].part_of_key(whole); });
  };
  const auto keys = keys_of(key), values = keys_of(value);
  const auto queries = parts_of(query, blocks.size(), [blocks](const auto& whole, size_t b) {
    return blocks[b].part_of_query(whole);
  });
  std::vector<at::Tensor> outputs;
  for (size_t b = 0; b < blocks.size(); ++b) {
    const auto part = blocks[b].part_of_mask(mask);
    outputs.push_back(recomputed(output_of_block(part, call), {queries[b], keys[b], values[b]},
                                 constants_of(part))[0]);
  }
  return {at::cat(outputs, 2), {}, {}};
}

}  // namespace mha::detail
