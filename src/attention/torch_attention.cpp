#include "attention/torch_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/amax.h>
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
    const auto blocked = allowed.logical_not();
    terms = terms.defined()
                ? terms.masked_fill(blocked, -infinity)
                : at::zeros(blocked.sizes(), query.options()).masked_fill_(blocked, -infinity);
  }
  // In one piece, as the kernels want a row of it, and not a number for all keys.
  terms = terms.expand({-1, -1, -1, key.size(2)}).contiguous();
  if (allowed.defined()) {
    // A row without keys sees one, which gives it defined gradients of 0 in the end.
    terms.narrow(3, 0, 1).masked_fill_(dead_rows(allowed), 0);
  }
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

// What the sums of products of rows may come to on their way, NaN if a number is.
double largest_sum(const at::Tensor& left, const at::Tensor& right) {
  return largest_of(left) * largest_of(right) * static_cast<double>(left.size(3));
}

bool is_in_range(double number, at::ScalarType dtype) {
  // Rounded, so that the lowest number and a score are.
  return std::isfinite(dtype == at::kDouble ? number : static_cast<float>(number));
}

// The largest of what the mask adds to the best key of each row.
double largest_best_term(const at::Tensor& terms, const at::Tensor& allowed) {
  if (!allowed.defined()) return largest_of(terms.amax(-1));
  const auto best = terms.masked_fill(allowed.logical_not(), -infinity).amax(-1, true);
  return largest_of(best.masked_fill(dead_rows(allowed), 0));
}

// Whether scores, or with the mask's terms, may leave their dtype's range, which is held here
// and not by LibTorch's kernels; and, if a backward forms the weights again from the logarithm
// of their sum, whether a score is so large that this is lost beside it.
bool leaves_range(const at::Tensor& query, const at::Tensor& key, const ResolvedMask& mask,
                  double scale, const TorchForm& form, bool records) {
  const auto dtype = query.scalar_type();
  const double sum = largest_sum(query, key), score = sum * std::abs(scale);
  if (!is_in_range(std::max(sum, score), dtype)) return true;
  double best = score;
  const auto terms = form.pairs == Pairs::masked ? added_pairs(mask, dtype) : at::Tensor();
  if (terms.defined()) {
    if (!is_in_range(score + largest_of(terms), dtype)) return true;
    best += largest_best_term(terms.detach(), allowed_pairs(mask, query.device()));
  }
  const double rounding = dtype == at::kDouble ? 0x1p-52 : 0x1p-23;
  return records && best * rounding > 0x1p-10;
}

// Whether something may come of query, key and value that LibTorch's kernels do not keep apart.
// `records`: a backward will meet them again.
bool are_doubtful(const HeadTensors& heads, const ResolvedMask& mask, double scale,
                  const TorchForm& form, bool records) {
  const auto& query = heads[0];
  if (!query.device().is_cpu()) return false;  // that would wait for the device
  const bool causal = form.pairs == Pairs::causal;
  const auto part = [&](const at::Tensor& keys) {
    return causal ? keys.narrow(2, 0, form.keys) : keys;
  };
  const auto rows = query.narrow(2, form.dead_queries, query.size(2) - form.dead_queries);
  return leaves_range(rows, part(heads[1]), mask, scale, form, records) ||
         (records && form.pairs != Pairs::all && may_be_non_finite(part(heads[2])));
}

// With zeros in place of keys that no query sees, and of queries that see none.
HeadTensors without_unseen(const HeadTensors& heads, const ResolvedMask& mask,
                           const TorchForm& form) {
  if (form.pairs != Pairs::masked) return heads;
  const auto allowed = allowed_pairs(mask, heads[0].device());
  if (!allowed.defined()) return heads;
  const auto unseen = unseen_keys(allowed, heads[1].size(1));
  return {heads[0].masked_fill(dead_rows(allowed), 0), heads[1].masked_fill(unseen, 0),
          heads[2].masked_fill(unseen, 0)};
}

// The same, as an output shows.
bool is_doubtful(const at::Tensor& output) {
  return output.device().is_cpu() && may_be_non_finite(output);
}

// An output and the query, key and value that it was made of, in a graph of LibTorch's kernels
// apart from the caller's.
struct InnerGraph : torch::CustomClassHolder {
  HeadTensors inputs;
  at::Tensor output;
};

class TorchAttention : public torch::autograd::Function<TorchAttention> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& query,
                            const at::Tensor& key, const at::Tensor& value,
                            const ResolvedMask& mask, const AttentionCall& call,
                            const c10::intrusive_ptr<InnerGraph>& graph) {
    const auto& inputs = graph->inputs;
    save_call(context, {query, key, value, inputs[0], inputs[1], inputs[2], graph->output},
              mask, call);
    context->set_materialize_grads(false);
    return graph->output.detach();
  }

  static HeadTensors backward(torch::autograd::AutogradContext* context,
                              const HeadTensors& grad_outputs) {
    const auto saved = saved_call(context);
    const auto& tensors = saved.tensors;
    const auto &grad = grad_outputs[0], &value = tensors[2];
    HeadTensors grads(6);
    if (!grad.defined()) return grads;
    // LibTorch's kernels multiply blocked values, too, and 0 times what leaves the range is
    // NaN.
    const bool is_plain =
        at::GradMode::is_enabled() || grad._is_zerotensor() ||
        (grad.device().is_cpu() && !is_in_range(largest_sum(grad, value), value.scalar_type()));
    if (is_plain) {
      const auto sizes = plain_block_sizes(saved.mask, value.size(1), grad.scalar_type(),
                                           value.device(), saved.call.weights);
      grads = plain_gradients(saved.inputs(), {grad}, saved.mask, saved.call, sizes);
    } else {
      grads = gradients({tensors[6]}, {as_plain_rows(grad)},
                        {tensors[3], tensors[4], tensors[5]}, Graph::kept);
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
  const HeadTensors given{query, key, value};
  auto graph = c10::make_intrusive<InnerGraph>();
  graph->inputs = records ? separate(given, /*create_graph=*/false) : given;
  auto heads = graph->inputs;
  bool doubtful = are_doubtful(heads, mask, scale, form, records);
  if (doubtful) {
    heads = without_unseen(heads, mask, form);
    doubtful = are_doubtful(heads, mask, scale, form, records);
  }
  if (!doubtful) {
    graph->output = pairs_of(heads[0], heads[1], heads[2], mask, scale, form);
    doubtful = is_doubtful(graph->output);
  }
  if (doubtful) return plain_attention_in_blocks(query, key, value, mask, call);
  return {records ? TorchAttention::apply(query, key, value, mask, call, graph) : graph->output,
          {},
          {}};
}

}  // namespace mha::detail
