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
#include "runtime/attention_path.h"
#include "runtime/uncomputed.h"
#include "runtime/wants_gradient.h"

namespace mha::detail {
namespace {

using BlockTensors = std::vector<at::Tensor>;

// How many (N, H, rows, S) tensors of its dtype the composition holds at once: 6 in a backward
// with a mask, up to 8 with dropout, a soft cap, added terms or sinks.
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
  return dropout == 0 || device.is_cpu() || device.is_cuda() || device.is_mps();
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

// Without a graph.
AttentionResult forward_in_blocks(const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, const ResolvedMask& mask,
                                  const AttentionCall& call, int64_t rows) {
  const auto dtype = plain_dtype(query.scalar_type());
  const auto k = key.to(dtype).contiguous(), v = value.to(dtype).contiguous();
  const bool finite = is_all_finite(query, k, v, call.scoring.scale);
  const auto result = empty_result(query, value, mask, call);
  for (const auto& block : blocks_of_queries(mask, rows, KeysOfBlocks::in_band)) {
    const auto part = plain_part(block.rows_of(query).to(dtype).contiguous(), block.keys_of(k),
                                 block.keys_of(v), block.part_of(mask), call,
                                 part_of_call(block, mask, call, query.device(), finite));
    block.rows_of(result.output).copy_(part.output);
    if (!result.weights.defined()) continue;
    if (block.keys < k.size(2)) result.weights.narrow(-2, block.from, block.rows).zero_();
    block.pairs_of(result.weights).copy_(part.weights);
  }
  return result;
}

// What a backward needs beyond tensors.
struct BlockSettings : torch::CustomClassHolder {
  ResolvedMask mask;  // its tensors are kept by save_for_backward, which notices changes
  AttentionCall call;
  int64_t rows = 0;
};

class BlockedAttention : public torch::autograd::Function<BlockedAttention> {
 public:
  // Gives output, and weights if wanted. `added` are the mask's terms, and `sinks` the call's,
  // if any, since only arguments get gradients.
  static BlockTensors forward(torch::autograd::AutogradContext* context,
                              const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, at::TensorList added,
                              at::TensorList sinks, const ResolvedMask& mask,
                              const AttentionCall& call, int64_t rows) {
    const auto result = forward_in_blocks(query, key, value, mask, call, rows);
    auto settings = c10::make_intrusive<BlockSettings>();
    settings->mask = mask;
    settings->call = call;
    settings->rows = rows;
    BlockTensors saved{query, key, value};
    for (auto* list : tensor_lists(settings->mask)) {
      saved.insert(saved.end(), list->begin(), list->end());
    }
    saved.insert(saved.end(), sinks.begin(), sinks.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["settings"] = c10::IValue::make_capsule(std::move(settings));
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
    const auto saved = context->get_saved_variables();
    const auto settings = c10::static_intrusive_pointer_cast<BlockSettings>(
        context->saved_data["settings"].toCapsule());
    ResolvedMask mask = settings->mask;
    AttentionCall call = settings->call;
    auto next = saved.begin() + 3;
    for (auto* list : tensor_lists(mask)) {
      for (auto& tensor : *list) tensor = *next++;
    }
    BlockTensors given{saved[0], saved[1], saved[2]};
    for (const auto& term : added_terms(mask)) given.push_back(term);
    if (call.scoring.sinks.defined()) given.push_back(call.scoring.sinks = *next++);
    auto grads = plain_gradients(given, grad_results, mask, call, settings->rows);
    grads.resize(given.size() + 3);  // none for the mask, the call and the rows
    return grads;
  }
};

}  // namespace

int64_t plain_block_rows(int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                         at::ScalarType dtype, at::Device device) {
  constexpr int64_t mib = 1 << 20;
  const int64_t bytes = bytes_in_environment().value_or((device.is_cpu() ? 64 : 256) * mib);
  const double row =
      static_cast<double>(batch) * static_cast<double>(heads) * static_cast<double>(keys) *
      static_cast<double>(c10::elementSize(plain_dtype(dtype))) * tensors_at_once;
  const double fitting = static_cast<double>(bytes) / std::max(row, 1.0);
  if (fitting >= static_cast<double>(queries)) return std::max<int64_t>(queries, 1);
  const auto rows = std::max<int64_t>(static_cast<int64_t>(fitting), 1);
  constexpr int64_t tile = 8;  // of which products leave no rest
  return rows < tile ? rows : rows / tile * tile;
}

AttentionResult plain_attention_in_blocks(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const ResolvedMask& mask,
                                          const AttentionCall& call, int64_t rows) {
  const auto added = added_terms(mask);
  auto followed = added;
  followed.insert(followed.end(), {query, key, value, call.scoring.sinks});
  if (rows >= query.size(2) || is_followed(followed) ||
      !fits_in_blocks(query.device(), call.dropout)) {
    return plain_attention(query, key, value, mask, call);
  }
  AttentionCall seeded = call;
  if (call.dropout > 0 && !query.device().is_cpu()) {
    const auto seed = at::empty({1}, query.options().dtype(at::kLong)).random_();
    seeded.dropout_seed = static_cast<uint64_t>(seed.item<int64_t>());
  }
  if (!at::GradMode::is_enabled() || !any_requires_grad(followed)) {
    return forward_in_blocks(query, key, value, mask, seeded, rows);
  }
  BlockTensors sinks;
  if (call.scoring.sinks.defined()) sinks.push_back(call.scoring.sinks);
  const auto results = BlockedAttention::apply(query, key, value, at::TensorList(added),
                                               at::TensorList(sinks), mask, seeded, rows);
  return {results[0], results.size() > 1 ? results[1] : at::Tensor(), {}};
}

AttentionResult plain_attention_in_blocks(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const ResolvedMask& mask,
                                          const AttentionCall& call) {
  const int64_t rows = plain_block_rows(query.size(0), query.size(1), query.size(2),
                                        key.size(2), query.scalar_type(), query.device());
  return plain_attention_in_blocks(query, key, value, mask, call, rows);
}

}  // namespace mha::detail
