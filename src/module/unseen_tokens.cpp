#include "module/unseen_tokens.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <tuple>

#include "mask/dense_mask.h"
#include "mask/kernel_mask.h"
#include "runtime/finite.h"

namespace mha::detail {
namespace {

// Of ids: queries see the keys that have theirs.
bool is_of_documents(const MaskList& list) {
  return list.meaning == Meaning::query_document || list.meaning == Meaning::key_document;
}

// Of the places that a query sees, from the first to the last.
bool is_of_spans(const MaskList& list) {
  return list.meaning == Meaning::low_edge || list.meaning == Meaning::high_edge ||
         list.meaning == Meaning::length;
}

// Of single keys, whatever the query.
bool is_of_keys(const MaskList& list) {
  const bool is_flag = list.meaning == Meaning::keep || list.meaning == Meaning::block ||
                       list.meaning == Meaning::add;
  return is_flag && list.has(Axis::key) && !list.has(Axis::query);
}

// Of pairs, or in a way that is not known here.
bool is_of_pairs(const MaskList& list) {
  return list.meaning != Meaning::add_finite && !is_of_documents(list) && !is_of_spans(list) &&
         !is_of_keys(list);
}

template <typename Predicate>
bool any_list(const ResolvedMask& mask, const Predicate& predicate) {
  return std::any_of(std::begin(mask_lists), std::end(mask_lists), [&](const MaskList& list) {
    return !(mask.*list.tensors).empty() && predicate(list);
  });
}

bool documents_are_shared(const ResolvedMask& mask) {
  for (size_t i = 0; i < mask.key_documents.size(); ++i) {
    if (!mask.query_documents[i].is_same(mask.key_documents[i])) return false;
  }
  return true;
}

// Whether what is seen is decided by one band and the documents of self-attention alone, and
// every token sees another or itself: known without reading a number.
bool all_are_seen(const ResolvedMask& mask) {
  const bool by_others = any_list(mask, [](const MaskList& list) {
    return is_of_pairs(list) || is_of_keys(list) || is_of_spans(list);
  });
  if (by_others) return false;
  const auto [low, high] = mask.band;
  if (!mask.key_documents.empty()) {
    return mask.queries == mask.keys && low <= 0 && high >= 0 && documents_are_shared(mask);
  }
  const int64_t ahead = mask.keys - mask.queries;
  return mask.keys > 0 && mask.queries > 0 && low <= std::min<int64_t>(0, ahead) &&
         high >= std::max<int64_t>(0, ahead);
}

// Of a mask that is L x S itself.
UnseenTokens unseen_in_pairs(ResolvedMask mask, at::Device device) {
  mask.extra_keys = 0;
  const auto seen = allowed_pairs(mask, device).any(1).expand({-1, mask.queries, mask.keys});
  return {seen.any(1).logical_not(), seen.any(2).logical_not()};
}

// (N or 1, S) keys that are no padding to any head; undefined: all.
at::Tensor open_keys(const ResolvedMask& mask) {
  at::Tensor open;  // (N or 1, H or 1, 1, S or 1)
  for (const MaskList& list : mask_lists) {
    if (!is_of_keys(list)) continue;
    for (size_t i = 0; i < (mask.*list.tensors).size(); ++i) {
      const auto keys = open_pairs(mask, list, i);
      open = open.defined() ? open.logical_and(keys) : keys;
    }
  }
  return open.defined() ? open.any(1).flatten(1).expand({-1, mask.keys}) : open;
}

// The places that a token sees, from the first to the last: (N or 1, T) each.
struct Span {
  at::Tensor from, to;
};

// Of `count` tokens, which see the places from `low` to `high` beyond their own.
Span span_of(int64_t count, const at::Tensor& low, const at::Tensor& high, int64_t places) {
  const auto place = at::arange(count, low.options()).unsqueeze(0);
  return {(place + low).clamp(0, places), (place + high).clamp(-1, places - 1)};
}

// Whether a span has an open place in it. `open` is (N or 1, places); undefined: all are.
at::Tensor reaches(const Span& span, const at::Tensor& open, int64_t batch) {
  if (!open.defined()) return span.from.le(span.to);
  const auto counts = at::constant_pad_nd(open.cumsum(1), {1, 0});
  const auto open_before = [&](const at::Tensor& place) {
    return counts.expand({batch, -1}).gather(1, place.expand({batch, -1}));
  };
  return open_before(span.to + 1).gt(open_before(span.from));
}

// The same of the places that have the token's own document: `own` (N or 1, T), `others`
// (N or 1, places). Places are looked up in the order of their documents.
at::Tensor reaches_in_document(const Span& span, const at::Tensor& own,
                               const at::Tensor& others, const at::Tensor& open,
                               int64_t batch) {
  constexpr int64_t none = std::numeric_limits<int64_t>::max();
  const int64_t places = others.size(1);
  auto codes = others * places + at::arange(places, others.options());
  if (open.defined()) codes = at::where(open, codes, at::full({1, 1}, none, codes.options()));
  const auto sorted = at::constant_pad_nd(std::get<0>(codes.sort(1)), {0, 1}, none)
                          .expand({batch, -1})
                          .contiguous();
  const auto start = own * places;
  const auto first = (start + span.from).expand({batch, -1}).contiguous();
  return sorted.gather(1, at::searchsorted(sorted, first)).le(start + span.to);
}

bool holds_non_finite(const Tokens& tokens, bool holds_keys) {
  const auto &query = tokens.query, &key = tokens.key, &value = tokens.value;
  return may_be_non_finite(query) ||
         (holds_keys && !key.is_same(query) && may_be_non_finite(key)) ||
         (holds_keys && !value.is_same(key) && may_be_non_finite(value));
}

// Whether numbers are so large that what is formed of them may overflow where it does not of
// the numbers that a model computes with, or are NaN.
bool may_be_large(const at::Tensor& tensor) {
  constexpr double large = 1024;
  if (tensor.numel() == 0) return false;
  if (!may_branch_on_numbers(tensor)) return true;
  const auto [least, most] = at::aminmax(tensor.detach());
  return !(least.item<double>() >= -large && most.item<double>() <= large);
}

bool holds_large(const Tokens& tokens, bool holds_keys) {
  const auto &query = tokens.query, &key = tokens.key, &value = tokens.value;
  return may_be_large(query) || (holds_keys && !key.is_same(query) && may_be_large(key)) ||
         (holds_keys && !value.is_same(key) && may_be_large(value));
}

}  // namespace

UnseenTokens unseen_tokens(const ResolvedMask& mask, at::Device device) {
  if (all_are_seen(mask)) return {};
  if (any_list(mask, is_of_pairs)) return unseen_in_pairs(mask, device);
  const auto options = at::TensorOptions().dtype(at::kLong).device(device);
  auto low = at::full({1, 1}, mask.band.low, options),
       high = at::full({1, 1}, mask.band.high, options);
  for (const auto& edge : mask.lows) low = at::maximum(low, edge.unsqueeze(1));
  for (const auto& edge : mask.highs) high = at::minimum(high, edge.unsqueeze(1));
  const auto open = open_keys(mask);
  const auto key_place = at::arange(mask.keys, options).unsqueeze(0);
  auto keys_of_query = span_of(mask.queries, low, high, mask.keys);
  const auto queries_of_key = span_of(mask.keys, high.neg(), low.neg(), mask.queries);
  const auto numbers = number_documents(mask);
  at::Tensor seen, sees;
  for (const auto& lengths : mask.lengths) {
    keys_of_query.to = at::minimum(keys_of_query.to, lengths.unsqueeze(1) - 1);
  }
  if (numbers.defined()) {
    const auto own = numbers.narrow(1, 0, mask.queries),
               others = numbers.narrow(1, mask.queries, mask.keys);
    sees = reaches_in_document(keys_of_query, own, others, open, mask.batch);
    seen = reaches_in_document(queries_of_key, others, own, {}, mask.batch);
  } else {
    sees = reaches(keys_of_query, open, mask.batch);
    seen = reaches(queries_of_key, {}, mask.batch);
  }
  for (const auto& lengths : mask.lengths) {
    seen = seen.logical_and(key_place.lt(lengths.unsqueeze(1)));
  }
  if (open.defined()) seen = seen.logical_and(open);
  return {seen.logical_not(), sees.logical_not()};
}

void drop_unseen_tokens(const MultiHeadAttentionImpl& module, const KeySource& source,
                        const ResolvedMask& mask, Tokens& tokens) {
  if (tokens.query.is_meta()) return;
  if (all_are_seen(mask) && !source.real_queries.defined()) return;
  const auto& options = module.options;
  const bool holds_keys = !source.cache;  // what a cache takes, later calls may see
  // A gate multiplies the 0 of a query that sees nothing, and the gradient of a norm that of
  // any such token, by what huge numbers overflow to.
  const bool may_overflow = options.output_gate() != OutputGate::none ||
                            (options.qk_norm() != QKNorm::none && at::GradMode::is_enabled());
  if (!may_overflow && !holds_non_finite(tokens, holds_keys)) return;
  // A mask of pairs costs several passes over it.
  if (any_list(mask, is_of_pairs) && !holds_large(tokens, holds_keys)) return;
  auto &query = tokens.query, &key = tokens.key, &value = tokens.value;
  const auto unseen = unseen_tokens(mask, query.device());
  if (holds_keys && may_have_marks(unseen.keys)) {
    const auto places = unseen.keys.unsqueeze(-1);
    const bool shared = value.is_same(key);
    key = key.masked_fill(places, 0);
    value = shared ? key : value.masked_fill(places, 0);
  }
  if (mask.extra_keys == 0 && may_have_marks(unseen.queries)) {
    query = query.masked_fill(unseen.queries.unsqueeze(-1), 0);
  }
  if (source.real_queries.defined()) {
    const auto place = at::arange(mask.queries, source.real_queries.options());
    const auto padding = place.ge(source.real_queries.unsqueeze(1));
    query = query.masked_fill(padding.unsqueeze(-1), 0);
  }
}

}  // namespace mha::detail
