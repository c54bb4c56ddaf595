#include "attention/plain_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

#include "attention/unread_products.h"
#include "mask/dense_mask.h"
#include "runtime/attention_path.h"
#include "runtime/cpu_kernels.h"
#include "runtime/finite.h"
#include "runtime/uncomputed.h"

namespace mha::detail {
namespace {

// scale * query . key in a wider range than the dtype's, held within the dtype's.
at::Tensor held_in_wider_range(const at::Tensor& query, const at::Tensor& key, double scale) {
  const double highest = -lowest_of(query.scalar_type());
  if (query.scalar_type() != at::kDouble) {
    const auto scores =
        grouped_matmul(query.to(at::kDouble), key.to(at::kDouble).transpose(-2, -1)) * scale;
    return scores.clamp(-highest, highest).to(query.scalar_type());
  }
  constexpr double down = 0x1p-520;
  const auto scores = grouped_matmul(query * down, (key * down).transpose(-2, -1)) * scale;
  const double limit = highest * down * down;
  return scores.clamp(-limit, limit) / down / down;
}

// scale * query . key, held within the dtype's range whatever the sum came to on its way: what
// is infinite or NaN is formed again.
at::Tensor held_scores(const at::Tensor& query, const at::Tensor& key, double scale) {
  const auto scores = grouped_matmul(query * scale, key.transpose(-2, -1));
  if (!may_branch_on_numbers(scores)) {
    const double highest = -lowest_of(scores.scalar_type());
    return scores.clamp(-highest, highest);
  }
  if (!may_be_non_finite(scores)) return scores;
  return at::where(at::isfinite(scores), scores, held_in_wider_range(query, key, scale));
}

// weights . value. An infinite value makes what it is added to infinite, though its weight may
// have underflowed to 0.
at::Tensor weighted_sum(const at::Tensor& weights, const at::Tensor& value) {
  const auto sum = grouped_matmul(weights, value);
  if (!may_branch_on_numbers(value) || !may_be_non_finite(value)) return sum;
  const auto finite = at::isfinite(value.detach());
  const auto given = value.detach().masked_fill(finite, 0).sum(2, /*keepdim=*/true);
  const auto added = expand_heads(given, weights.size(1));
  const auto with = grouped_matmul(weights, value.masked_fill(finite.logical_not(), 0)) + added;
  return at::where(at::isfinite(added), sum, with);
}

// The two products where some pairs are blocked and numbers may be asked for. Zeroes the
// queries that see nothing and the keys and values that nobody sees.
//
// 0 * NaN is NaN, so a blocked pair must be left out of the two products rather than get weight
// 0. The products run on tensors in which every non-finite row is replaced by zeros; what those
// rows give to the pairs that are allowed is then computed pair by pair. In practice these are
// few: padding is blocked for every query and needs only the zeros.
class GuardedProducts {
 public:
  GuardedProducts(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const at::Tensor& allowed, double scale)
      : scale_(scale),
        allowed_(allowed.expand({query.size(0), query.size(1), query.size(2), key.size(2)})) {
    const int64_t n = key.size(0), kv_heads = key.size(1), s = key.size(2);
    const auto row_sees = allowed_.any(-1);
    const auto key_seen =
        allowed_.any(2).view({n, kv_heads, query.size(1) / kv_heads, s}).any(2);
    query_ = query.masked_fill(row_sees.logical_not().unsqueeze(-1), 0);
    key_ = key.masked_fill(key_seen.logical_not().unsqueeze(-1), 0);
    value_ = value.masked_fill(key_seen.logical_not().unsqueeze(-1), 0);
    poison_queries_ = row_is_finite(query_).logical_not();
    poison_keys_ = expand_heads(row_is_finite(key_).logical_not(), query.size(1));
    poison_values_ = expand_heads(row_is_finite(value_).logical_not(), query.size(1));
  }

  at::Tensor scores() const {
    const int64_t heads = query_.size(1);
    auto scores = held_scores(finite_rows(query_), finite_rows(key_), scale_);
    for (const int64_t j : marked_rows(poison_keys_)) {
      const auto open = allowed_.select(3, j).unsqueeze(-1);
      const auto key = expand_heads(key_.narrow(2, j, 1), heads);
      const auto pairs = pick(open, query_) * pick(open, key);
      const auto here = poison_keys_.select(2, j).unsqueeze(-1);
      scores = replace(scores, 3, j, at::where(here, sum_of(pairs), scores.select(3, j)));
    }
    for (const int64_t i : marked_rows(poison_queries_)) {
      const auto open = allowed_.select(2, i).unsqueeze(-1);
      const auto pairs =
          pick(open, query_.narrow(2, i, 1)) * pick(open, expand_heads(key_, heads));
      const auto here = poison_queries_.select(2, i).unsqueeze(-1);
      scores = replace(scores, 2, i, at::where(here, sum_of(pairs), scores.select(2, i)));
    }
    return scores;
  }

  at::Tensor output(const at::Tensor& weights) const {
    auto output = grouped_matmul(weights, finite_rows(value_));
    for (const int64_t j : marked_rows(poison_values_)) {
      const auto here = poison_values_.select(2, j).unsqueeze(-1);
      const auto open = allowed_.select(3, j).logical_and(here).unsqueeze(-1);
      const auto value = pick(open, expand_heads(value_.narrow(2, j, 1), query_.size(1)));
      const auto weight = weights.narrow(3, j, 1);
      // An infinite value is seen, though its weight may have underflowed.
      const auto drowned = weight.eq(0).logical_and(value.isinf());
      output = output + weight * value.masked_fill(drowned, 0) +
               value.detach().masked_fill(drowned.logical_not(), 0);
    }
    return output;
  }

 private:
  at::Tensor sum_of(const at::Tensor& products) const {
    const double highest = -lowest_of(products.scalar_type());
    return (products.sum(-1) * scale_).clamp(-highest, highest);
  }
  // `tensor` where open, 0 elsewhere, without a gradient there.
  static at::Tensor pick(const at::Tensor& open, const at::Tensor& tensor) {
    return tensor.masked_fill(open.logical_not(), 0);
  }
  static at::Tensor replace(const at::Tensor& tensor, int64_t dim, int64_t index,
                            const at::Tensor& slice) {
    auto copy = tensor.clone();
    copy.select(dim, index).copy_(slice);
    return copy;
  }

  double scale_;
  at::Tensor allowed_, query_, key_, value_;
  at::Tensor poison_queries_, poison_keys_, poison_values_;  // (N, H, T): rows not finite
};

// softmax over scores and a sink in each row, without the sink's own weight. Rows without keys,
// if `dead_rows` are defined, have one of 0, which gets no gradient.
at::Tensor softmax_with_sinks(const at::Tensor& scores, const at::Tensor& sinks,
                              const at::Tensor& dead_rows) {
  auto sizes = scores.sizes().vec();
  sizes.back() = 1;
  // One of -inf alone in its row would have weight NaN. One of NaN keeps its gradient, which
  // clamp would drop.
  const double lowest = lowest_of(scores.scalar_type());
  const auto given = sinks.to(scores.scalar_type());
  const auto held =
      given.is_meta() ? given : at::where(given.isnan(), given, given.clamp(lowest, -lowest));
  auto column = held.reshape({1, scores.size(1), 1, 1}).expand(sizes);
  if (dead_rows.defined()) column = column.masked_fill(dead_rows, 0);
  return at::softmax(at::cat({scores, column}, -1), -1).narrow(-1, 0, scores.size(-1));
}

// softmax over the allowed keys; exactly 0 at blocked ones, and so in rows without any.
at::Tensor masked_softmax(const at::Tensor& scores, const at::Tensor& allowed,
                          const at::Tensor& sinks) {
  if (!allowed.defined()) {
    return sinks.defined() ? softmax_with_sinks(scores, sinks, {}) : at::softmax(scores, -1);
  }
  const auto blocked = allowed.logical_not();
  const auto dead_rows = blocked.all(-1, /*keepdim=*/true);
  if (sinks.defined()) {
    return softmax_with_sinks(scores.masked_fill(blocked, -infinity), sinks, dead_rows)
        .masked_fill(blocked, 0);
  }
  const auto filled = scores.masked_fill(blocked, -infinity).masked_fill(dead_rows, 0);
  return at::softmax(filled, -1).masked_fill(blocked, 0);
}

// What dropout multiplies the weights (N, H, L, S) by. On the CPU the factors are those of the
// kernels, so that the paths agree for a seed.
at::Tensor dropout_factors(const at::Tensor& weights, const AttentionCall& call,
                           const PlainPart& part) {
  if (call.dropout == 1.0) return at::zeros_like(weights.detach());
  if (!weights.device().is_cpu() || is_tracing()) {
    const auto kept = at::empty_like(weights.detach());
    if (part.generator.defined()) {
      kept.bernoulli_(1 - call.dropout, part.generator);
    } else {
      kept.bernoulli_(1 - call.dropout);
    }
    return kept.div_(1 - call.dropout);
  }
  const int64_t heads = weights.size(1), rows = weights.size(2);
  const int64_t keys = part.first_key + weights.size(3);  // a row's factors start at key 0
  const auto kept = uncomputed({weights.size(0), heads, rows, keys}, at::kFloat);
  const int64_t planes = kept.numel() > 0 ? weights.size(0) * heads : 0;
  for (int64_t i = 0; i < planes; ++i) {
    const int64_t plane =
        (part.first_sample + i / heads) * part.heads + part.first_head + i % heads;
    cpu_kernels().dropout_factors(call.dropout_seed, plane * part.queries + part.first_query,
                                  rows, keys, dropout_threshold(call.dropout), 1.0f,
                                  kept.data_ptr<float>() + i * rows * keys);
  }
  return kept.narrow(3, part.first_key, weights.size(3))
      .to(weights.scalar_type(), /*non_blocking=*/false, /*copy=*/true,
          at::MemoryFormat::Contiguous)
      .div_(1 - call.dropout);
}

// The scores before the softmax, and what they were made with.
struct MaskedScores {
  at::Tensor scores, allowed;  // blocked pairs hold any number; allowed undefined: all are
  std::optional<GuardedProducts> guarded;
  // weights . value, past what is blocked
  at::Tensor output(const at::Tensor& weights, const at::Tensor& value, bool finite) const {
    if (guarded) return guarded->output(weights);
    if (finite) return grouped_matmul(weights, value);
    return allowed.defined() ? unread_output(weights, value, allowed)
                             : weighted_sum(weights, value);
  }
};

// Inputs are of one dtype, contiguous, since the products' rounding may depend on the strides.
// The products are guarded whether or not a number is NaN, since the rounding may not depend on
// that either, unless it is known of all of the call.
MaskedScores masked_scores(const at::Tensor& query, const at::Tensor& key,
                           const at::Tensor& value, const ResolvedMask& mask,
                           const Scoring& scoring, bool finite) {
  const bool has_numbers = !query.is_meta();  // shapes do not depend on a mask
  const auto allowed = has_numbers ? allowed_pairs(mask, query.device()) : at::Tensor();
  const auto added = has_numbers ? added_pairs(mask, query.scalar_type()) : at::Tensor();
  MaskedScores result{{}, allowed, {}};
  const bool guards = allowed.defined() && !finite, reads = may_branch_on_numbers(query);
  if (guards && reads) result.guarded.emplace(query, key, value, allowed, scoring.scale);
  auto& scores = result.scores;
  scores = result.guarded ? result.guarded->scores()
           : guards       ? unread_scores(query, key, scoring.scale)
                          : held_scores(query, key, scoring.scale);
  if (scoring.softcap > 0 && allowed.defined()) {
    // The slope of a blocked score that overflowed to NaN is NaN, and 0 times it too.
    scores = scores.masked_fill(allowed.logical_not(), 0);
  }
  if (scoring.softcap > 0) scores = at::tanh(scores / scoring.softcap) * scoring.softcap;
  if (added.defined()) {
    // Held, since the sum of two large finite terms must neither become a block nor NaN.
    // No gradient flows through one that is.
    const double lowest = lowest_of(query.scalar_type());
    const auto sums = scores + added;
    const auto held = sums.detach().clamp(lowest, -lowest);
    scores = at::where(held.abs().eq(-lowest), held, sums);
  }
  return result;
}

}  // namespace

AttentionResult plain_attention(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const ResolvedMask& mask,
                                const AttentionCall& call) {
  // The precision is chosen here; autocast must not lower it again.
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto result_dtype = query.scalar_type();
  const auto dtype = plain_dtype(result_dtype);
  PlainPart all;
  all.heads = query.size(1);
  all.queries = query.size(2);
  const auto result = plain_part(query.to(dtype).contiguous(), key.to(dtype).contiguous(),
                                 value.to(dtype).contiguous(), mask, call, all);
  return {result.output.to(result_dtype),
          result.weights.defined() ? result.weights.to(result_dtype) : at::Tensor(),
          {}};
}

AttentionResult plain_part(const at::Tensor& query, const at::Tensor& key,
                           const at::Tensor& value, const ResolvedMask& mask,
                           const AttentionCall& call, const PlainPart& part) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto masked = masked_scores(query, key, value, mask, call.scoring, part.finite);
  const auto weights = masked_softmax(masked.scores, masked.allowed, call.scoring.sinks);
  const auto used = call.dropout > 0 ? weights * dropout_factors(weights, call, part) : weights;
  const auto output = masked.output(used, value, part.finite);

  const auto& returned = call.weights_after_dropout ? used : weights;
  switch (call.weights) {
    case Weights::none:
      return {output, {}, {}};
    case Weights::averaged:
      return {output, returned.mean(1), {}};
    case Weights::per_head:
      break;
  }
  return {output, returned, {}};
}

at::Tensor plain_scores(const at::Tensor& query, const at::Tensor& key,
                        const ResolvedMask& mask, const Scoring& scoring) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto k = key.contiguous();
  const auto result = masked_scores(query.contiguous(), k, k, mask, scoring, /*finite=*/false);
  if (!result.allowed.defined()) return result.scores;
  return result.scores.masked_fill(result.allowed.logical_not(), -infinity);
}

}  // namespace mha::detail
