#include "attention/plain_blocks.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "attention/block_of_queries.h"
#include "attention/plain_gradients.h"
#include "attention/saved_call.h"
#include "runtime/attention_path.h"
#include "runtime/torch_compat.h"
#include "runtime/uncomputed.h"
#include "runtime/wants_gradient.h"

namespace mha::detail {
namespace {

using BlockTensors = std::vector<at::Tensor>;

// How many tensors of all pairs in a block the composition holds at once, as measured: 3 in a
// backward without options, 4 with a mask, and up to 8 with all options.
constexpr double tensors_at_once = 8;

std::optional<int64_t> bytes_in_environment() {
  static const auto bytes = []() -> std::optional<int64_t> {
    const char* wanted = std::getenv("MHA_BLOCK_BYTES");
    if (!wanted || !*wanted) return std::nullopt;
    int64_t number = 0;
    const char* end = wanted + std::strlen(wanted);
    const auto [stop, problem] = std::from_chars(wanted, end, number);
    TORCH_CHECK(problem == std::errc() && stop == end && number > 0,
                "MHA_BLOCK_BYTES: expected a positive integer, found '", wanted, "'");
    return number;
  }();
  return bytes;
}

// Dropout's generator elsewhere must be one that a block can have its own of.
bool fits_in_blocks(const at::Device& device, double dropout) {
  if (device.is_meta()) return false;  // no numbers, so no memory
  return dropout == 0 || torch_compat::has_default_generator(device);
}

// Output and weights (undefined if unwanted) to write blocks into.
AttentionResult empty_result(const at::Tensor& query, const at::Tensor& value,
                             const ResolvedMask& mask, const AttentionCall& call) {
  const int64_t n = query.size(0), h = query.size(1), l = query.size(2);
  const int64_t keys = mask.keys + mask.extra_keys;
  AttentionResult result{uncomputed({n, h, l, value.size(3)}, query.options()), {}, {}};
  if (call.weights == Weights::per_head) {
    result.weights = uncomputed({n, h, l, keys}, query.options());
  } else if (call.weights == Weights::averaged) {
    result.weights = uncomputed({n, l, keys}, query.options());
  }
  return result;
}

AttentionCall part_call(const AttentionCall& call, const BlockOfQueries& block) {
  AttentionCall part = call;
  auto& sinks = part.scoring.sinks;
  if (sinks.defined()) sinks = block.part_of_sinks(sinks);
  return part;
}

// Without a graph.
AttentionResult forward_in_blocks(const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, const ResolvedMask& mask,
                                  const AttentionCall& call, const BlockSizes& sizes) {
  const auto dtype = plain_dtype(query.scalar_type());
  const auto k = key.to(dtype).contiguous(), v = value.to(dtype).contiguous();
  const bool finite = is_all_finite(query, k, v, call.scoring.scale);
  const auto result = empty_result(query, value, mask, call);
  for (const auto& block : blocks_of_queries(mask, key.size(1), sizes, KeysOfBlocks::in_band)) {
    const auto part =
        plain_part(block.part_of_query(query).to(dtype).contiguous(), block.part_of_key(k),
                   block.part_of_key(v), block.part_of_mask(mask), part_call(call, block),
                   part_of_call(block, mask, call, query.device(), finite));
    block.part_of_query(result.output).copy_(part.output);
    if (!result.weights.defined()) continue;
    if (block.keys.count < k.size(2)) block.rows_of_weights(result.weights).zero_();
    block.part_of_weights(result.weights).copy_(part.weights);
  }
  return result;
}

class BlockedAttention : public torch::autograd::Function<BlockedAttention> {
 public:
  // Gives output, and weights if wanted. `added` are the mask's terms, and `sinks` the call's,
  // if any, since only arguments get gradients.
  static BlockTensors forward(torch::autograd::AutogradContext* context,
                              const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, at::TensorList added,
                              at::TensorList sinks, const ResolvedMask& mask,
                              const AttentionCall& call, const BlockSizes& sizes) {
    const auto result = forward_in_blocks(query, key, value, mask, call, sizes);
    save_call(context, {query, key, value}, mask, call);
    context->saved_data["sizes"] =
        std::vector<int64_t>{sizes.samples, sizes.kv_heads, sizes.queries};
    context->set_materialize_grads(false);
    const bool is_of_weights = query.requires_grad() || key.requires_grad() ||
                               any_requires_grad(added) || any_requires_grad(sinks);
    if (result.weights.defined() && !is_of_weights) {
      context->mark_non_differentiable({result.weights});
    }
    BlockTensors results{result.output};
    if (result.weights.defined()) results.push_back(result.weights);
    return results;
  }

  static BlockTensors backward(torch::autograd::AutogradContext* context,
                               const BlockTensors& grad_results) {
    const auto saved = saved_call(context);
    const auto sizes = context->saved_data["sizes"].toIntVector();
    const auto inputs = saved.inputs();
    auto grads = plain_gradients(inputs, grad_results, saved.mask, saved.call,
                                 {sizes[0], sizes[1], sizes[2]});
    grads.resize(inputs.size() + 3);  // none for the mask, the call and the sizes
    return grads;
  }
};

}  // namespace

int64_t plain_block_bytes(at::Device device) {
  constexpr int64_t mib = 1 << 20;
  return bytes_in_environment().value_or((device.is_cpu() ? 32 : 256) * mib);
}

BlockSizes plain_block_sizes(const ResolvedMask& mask, int64_t kv_heads, at::ScalarType dtype,
                             at::Device device, Weights weights) {
  const int64_t bytes = plain_block_bytes(device);
  const auto number = static_cast<double>(c10::elementSize(plain_dtype(dtype)));
  const double pairs = static_cast<double>(bytes) / tensors_at_once / number;
  // As many as fit of what takes `each` pairs, at least 1.
  const auto fitting = [&](int64_t count, double each) {
    const double fit = pairs / std::max(each, 1.0);
    return fit >= static_cast<double>(count) ? std::max<int64_t>(count, 1)
                                             : std::max<int64_t>(static_cast<int64_t>(fit), 1);
  };
  const bool averages = weights == Weights::averaged;
  const int64_t all_heads = std::max<int64_t>(kv_heads, 1);
  const double group = static_cast<double>(mask.heads) / static_cast<double>(all_heads);
  const double of_query = group * static_cast<double>(mask.keys + mask.extra_keys);
  const double of_head = of_query * static_cast<double>(mask.queries);
  BlockSizes sizes{fitting(mask.batch, of_head * static_cast<double>(all_heads)), all_heads,
                   mask.queries};
  if (!averages) sizes.kv_heads = fitting(all_heads, of_head);
  sizes.queries =
      fitting(mask.queries, of_query * static_cast<double>(averages ? all_heads : 1));
  constexpr int64_t tile = 8;  // of which products leave no rest
  if (sizes.queries < mask.queries && sizes.queries > tile)
    sizes.queries -= sizes.queries % tile;
  return sizes;
}

bool is_one_block(const BlockSizes& sizes, const ResolvedMask& mask, int64_t kv_heads) {
  const bool is_empty = mask.batch == 0 || kv_heads == 0 || mask.queries == 0;
  return is_empty || (sizes.samples >= mask.batch && sizes.kv_heads >= kv_heads &&
                      sizes.queries >= mask.queries);
}

AttentionResult plain_attention_in_blocks(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const ResolvedMask& mask,
                                          const AttentionCall& call, const BlockSizes& sizes) {
  const auto added = added_terms(mask);
  auto followed = added;
  followed.insert(followed.end(), {query, key, value, call.scoring.sinks});
  if (is_one_block(sizes, mask, key.size(1)) || is_followed(followed) ||
      !fits_in_blocks(query.device(), call.dropout)) {
    return plain_attention(query, key, value, mask, call);
  }
  AttentionCall seeded = call;
  if (call.dropout > 0 && !query.device().is_cpu()) {
    const auto seed = at::empty({1}, query.options().dtype(at::kLong)).random_();
    seeded.dropout_seed = static_cast<uint64_t>(seed.item<int64_t>());
  }
  if (!at::GradMode::is_enabled() || !any_requires_grad(followed)) {
    return forward_in_blocks(query, key, value, mask, seeded, sizes);
  }
  BlockTensors sinks;
  if (call.scoring.sinks.defined()) sinks.push_back(call.scoring.sinks);
  const auto results = BlockedAttention::apply(query, key, value, at::TensorList(added),
                                               at::TensorList(sinks), mask, seeded, sizes);
  return {results[0], results.size() > 1 ? results[1] : at::Tensor(), {}};
}

AttentionResult plain_attention_in_blocks(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const ResolvedMask& mask,
                                          const AttentionCall& call) {
  const auto sizes =
      plain_block_sizes(mask, key.size(1), query.scalar_type(), query.device(), call.weights);
  return plain_attention_in_blocks(query, key, value, mask, call, sizes);
}

}  // namespace mha::detail
