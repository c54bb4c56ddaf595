#include "attention/torch_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "attention/gradients.h"
#include "attention/plain_blocks.h"
#include "attention/plain_gradients.h"
#include "attention/saved_call.h"
#include "attention/unread_products.h"
#include "mask/dense_mask.h"
#include "runtime/finite.h"
#include "runtime/torch_compat.h"
#include "runtime/wants_gradient.h"

namespace mha::detail {
namespace {

using Pairs = TorchForm::Pairs;
using HeadTensors = std::vector<at::Tensor>;

bool keeps_finite_apart() {
  static const bool keeps = [] {
    const char* wanted = std::getenv("MHA_CHECK_FINITE");
    if (!wanted || !*wanted || std::strcmp(wanted, "1") == 0) return true;
    TORCH_CHECK(std::strcmp(wanted, "0") == 0, "MHA_CHECK_FINITE: expected 0 or 1, found '",
                wanted, "'");
    return false;
  }();
  return keeps;
}

// Rows of numbers side by side that do not overlap, which LibTorch's kernels take.
at::Tensor as_plain_rows(const at::Tensor& heads) {
  return heads.stride(3) == 1 && heads.stride(2) >= heads.size(3) ? heads : heads.contiguous();
}

// Heads of keys and values of one size, which those for the CPU want.
at::Tensor as_wide(const at::Tensor& heads, int64_t size) {
  return heads.size(3) == size ? as_plain_rows(heads)
                               : at::constant_pad_nd(heads, {0, size - heads.size(3)});
}

at::Tensor fused(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                 const at::Tensor& mask, bool causal, double scale) {
  const int64_t size = std::max(query.size(3), value.size(3));
  const auto output = torch_compat::fused_attention(as_wide(query, size), as_wide(key, size),
                                                    as_wide(value, size), mask, causal, scale);
  return output.narrow(3, 0, value.size(3));
}

at::Tensor zero_rows(const at::Tensor& like, int64_t count, int64_t size) {
  return at::zeros({like.size(0), like.size(1), count, size}, like.options());
}

at::Tensor causal_pairs(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        double scale, const TorchForm& form) {
  const int64_t seeing = query.size(2) - form.dead_queries;
  auto rows = query.narrow(2, form.dead_queries, seeing);
  if (form.padding > 0) {
    rows = at::cat({zero_rows(query, form.padding, query.size(3)), rows}, 2);
  }
  const auto k = key.narrow(2, 0, form.keys), v = value.narrow(2, 0, form.keys);
  const int64_t rest = rows.size(2) - form.keys;
  HeadTensors parts;
  if (form.dead_queries > 0) {
    parts.push_back(zero_rows(query, form.dead_queries, value.size(3)));
  }
  parts.push_back(fused(rows.narrow(2, 0, form.keys), k, v, {}, /*causal=*/true, scale)
                      .narrow(2, form.padding, form.keys - form.padding));
  if (rest > 0) {
    parts.push_back(fused(rows.narrow(2, form.keys, rest), k, v, {}, /*causal=*/false, scale));
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts, 2);
}

// The queries that see no key.
at::Tensor dead_rows(const at::Tensor& allowed) {
  return allowed.any(-1, /*keepdim=*/true).logical_not();
}

// `allowed` as the mask says, undefined: all.
at::Tensor masked_pairs(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const ResolvedMask& mask, const at::Tensor& allowed, double scale) {
  auto terms = added_pairs(mask, query.scalar_type());
  if (terms.defined()) terms = terms.detach();
  if (allowed.defined()) {
    // A row without keys sees all, which gives it defined gradients of 0 in the end.
    const auto blocked = allowed.logical_or(dead_rows(allowed)).logical_not();
    terms = terms.defined()
                ? terms.masked_fill(blocked, -infinity)
                : at::zeros(blocked.sizes(), query.options()).masked_fill_(blocked, -infinity);
  }
  // In one piece, as the kernels want a row of it, and not a number for all keys.
  terms = terms.expand({-1, -1, -1, key.size(2)}).contiguous();
  const auto output = fused(query, key, value, terms, /*causal=*/false, scale);
  return allowed.defined() ? output.masked_fill(dead_rows(allowed), 0) : output;
}

// `numbers` (N, Hk, S, X) summed over the keys that each query sees, (N, H, L, X).
at::Tensor seen_sums(const at::Tensor& numbers, const at::Tensor& query,
                     const TorchForm& form) {
  const int64_t l = query.size(2), s = numbers.size(2);
  auto last =
      at::arange(l, query.options().dtype(at::kLong)) + (form.padding - form.dead_queries);
  const auto sums = numbers.cumsum(2)
                        .index_select(2, last.clamp(0, s - 1))
                        .repeat_interleave(query.size(1) / numbers.size(1), 1);
  return sums.masked_fill(last.lt(0).view({1, 1, l, 1}), 0);
}

// 0 where a row is finite, else NaN. Without a gradient.
at::Tensor unknown_rows(const at::Tensor& tensor) {
  return (tensor.detach() * 0).sum(-1, /*keepdim=*/true);
}

at::Tensor pairs_of(const at::Tensor& query, const at::Tensor& stored_key,
                    const at::Tensor& stored_value, const ResolvedMask& mask, double scale,
                    const TorchForm& form) {
  // The precision is chosen by the caller; autocast must not lower it.
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto key = stored_key.to(query.scalar_type());
  const auto value = stored_value.to(query.scalar_type());
  const bool reads = query.device().is_cpu() || !keeps_finite_apart();
  switch (form.pairs) {
    case Pairs::all:
      return fused(query, key, value, {}, /*causal=*/false, scale);
    case Pairs::causal:
      return reads ? causal_pairs(query, key, value, scale, form)
                   : causal_without_reading(query, key, value, scale, form);
    case Pairs::masked:
      break;
  }
  return reads
             ? masked_pairs(query, key, value, mask, allowed_pairs(mask, query.device()), scale)
             : masked_without_reading(query, key, value, mask, scale);
}

double largest_of(const at::Tensor& tensor) {
  const auto [low, high] = at::aminmax(tensor.detach());
  const double below = low.item<double>(), above = high.item<double>();
  return std::isnan(below) ? below : std::max(std::abs(below), std::abs(above));
}

// Whether the sums that scores are made of may leave their dtype's range on their way: false
// for none that is not finite. LibTorch's kernels multiply by the scale in the end.
bool may_overflow(const at::Tensor& query, const at::Tensor& key, double scale) {
  const double sum = largest_of(query) * largest_of(key) * static_cast<double>(query.size(3));
  return !(sum * std::max(1.0, std::abs(scale)) < -lowest_of(query.scalar_type()));
}

// Whether something may come of the inputs that LibTorch's kernels do not keep apart.
// `records`: a backward will meet them again.
bool are_doubtful(const HeadTensors& inputs, double scale, const TorchForm& form,
                  bool records) {
  if (!inputs[0].device().is_cpu()) return false;  // that would wait for the device
  return may_overflow(inputs[0], inputs[1], scale) ||
         (records && form.pairs != Pairs::all && may_be_non_finite(inputs[2]));
}

// The same, as an output shows.
bool is_doubtful(const at::Tensor& output) {
  return output.device().is_cpu() && may_be_non_finite(output);
}

// An output with the graph of the LibTorch kernels that made it, apart from the caller's.
struct InnerGraph : torch::CustomClassHolder {
  HeadTensors inputs;  // query, key and value
  at::Tensor output;
};

class TorchAttention : public torch::autograd::Function<TorchAttention> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& query,
                            const at::Tensor& key, const at::Tensor& value,
                            const ResolvedMask& mask, const AttentionCall& call,
                            const c10::intrusive_ptr<InnerGraph>& graph) {
    save_call(context, {query, key, value}, mask, call);
    context->saved_data["graph"] = c10::IValue::make_capsule(graph);
    context->set_materialize_grads(false);
    return graph->output.detach();
  }

  static HeadTensors backward(torch::autograd::AutogradContext* context,
                              const HeadTensors& grad_outputs) {
    const auto saved = saved_call(context);
    const auto& grad = grad_outputs[0];
    HeadTensors grads(6);
    if (!grad.defined()) return grads;
    const bool is_plain = at::GradMode::is_enabled() || grad._is_zerotensor() ||
                          (grad.device().is_cpu() && may_be_non_finite(grad));
    if (is_plain) {
      const auto& key = saved.tensors[1];
      grads = plain_gradients(saved.inputs(), {grad}, saved.mask, saved.call,
                              plain_block_sizes(saved.mask, key.size(1), key.scalar_type(),
                                                key.device(), saved.call.weights));
    } else {
      const auto graph = c10::static_intrusive_pointer_cast<InnerGraph>(
          context->saved_data["graph"].toCapsule());
      grads = gradients({graph->output}, {as_plain_rows(grad)}, graph->inputs, Graph::kept);
    }
    grads.resize(6);
    return grads;
  }
};

}  // namespace

at::Tensor causal_without_reading(const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, double scale,
                                  const TorchForm& form) {
  const auto finite = at::isfinite(value.detach());
  const auto given = value.detach().masked_fill(finite, 0);
  const auto output = causal_pairs(finite_rows(query), finite_rows(key),
                                   value.masked_fill(finite.logical_not(), 0), scale, form);
  const auto unknown =
      unknown_rows(query).narrow(2, form.dead_queries, query.size(2) - form.dead_queries);
  return output + seen_sums(given + unknown_rows(key), query, form) +
         at::constant_pad_nd(unknown, {0, 0, form.dead_queries, 0});
}

at::Tensor masked_without_reading(const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, const ResolvedMask& mask,
                                  double scale) {
  const auto allowed = allowed_pairs(mask, query.device());
  if (!allowed.defined()) return masked_pairs(query, key, value, mask, allowed, scale);
  const auto finite = at::isfinite(value.detach());
  const auto output =
      masked_pairs(finite_rows(query), finite_rows(key),
                   value.masked_fill(finite.logical_not(), 0), mask, allowed, scale);
  const auto given = value.detach() + unknown_rows(key);
  return (with_unread_values(output, given, allowed) + unknown_rows(query))
      .masked_fill(dead_rows(allowed), 0);
}

AttentionResult torch_attention(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const ResolvedMask& mask,
                                const AttentionCall& call, const TorchForm& form) {
  const double scale = call.scoring.scale;
  const bool records = wants_gradient(query, key, value);
  const auto composed = [&] {
    return plain_attention_in_blocks(query, key, value, mask, call);
  };
  if (are_doubtful({query, key, value}, scale, form, records)) return composed();
  if (!records) {
    const auto output = pairs_of(query, key, value, mask, scale, form);
    return is_doubtful(output) ? composed() : AttentionResult{output, {}, {}};
  }
  auto graph = c10::make_intrusive<InnerGraph>();
  graph->inputs = separate({query, key, value}, /*create_graph=*/false);
  const auto &q = graph->inputs[0], &k = graph->inputs[1], &v = graph->inputs[2];
  graph->output = pairs_of(q, k, v, mask, scale, form);
  if (is_doubtful(graph->output)) return composed();
  return {TorchAttention::apply(query, key, value, mask, call, graph), {}, {}};
}

}  // namespace mha::detail
