#pragma once

#include <mha/scaled_dot_product_attention.h>

#include <cstdint>

#include "mask/resolved_mask.h"
#include "runtime/attention_path.h"
#include "runtime/recycled.h"

namespace mha::detail {

/// Whether a number is a soft cap, and which ones are: within float32's range with room, since
/// scores are divided by it and multiplied by it.
inline bool is_softcap(double softcap) {
  return softcap == 0 || (softcap >= 1e-30 && softcap <= 1e30);
}
constexpr const char* softcap_range = "0 or a number from 1e-30 to 1e30";

/// What scores are made with, beside the mask.
struct Scoring {
  double scale;
  double softcap = 0;     // 0: none
  at::Tensor sinks = {};  // one a head, floating; undefined: none
};

/// 1 / sqrt(D), for options that name no scale.
double default_scale(int64_t head_dim);

/// What the options of heads of this size say of scores.
Scoring scoring_of(const AttentionOptions& options, int64_t head_dim);

/// Whether a call leaves `RowStatistics` beside its results.
enum class Statistics {
  unwanted,
  if_formed,  ///< where the forward forms them anyway
  needed,     ///< by a backward, which repeats the sums of this forward
};

/// The options of one call with every default resolved, and what its caller does with the
/// results.
struct AttentionCall {
  Scoring scoring;
  Weights weights = Weights::none;
  bool weights_after_dropout = false;
  double dropout = 0;
  /// Of the CPU's counter-based generator; other devices draw their own.
  uint64_t dropout_seed = 0;
  Lifetime output = Lifetime::kept;
  Statistics statistics = Statistics::unwanted;
};

/// The call that `options` ask for with this query (N, H, L, D). Draws the random seed.
AttentionCall call_of(const AttentionOptions& options, const at::Tensor& query);

/// What a forward knows of each row, (N, H, L) float32 each:
/// weight = 4^(score * log4(e) - maximum) * factor, with a factor of 0 where nothing is seen.
struct RowStatistics {
  at::Tensor maximum, factor;
};

struct AttentionResult {
  at::Tensor output;         ///< (N, H, L, Dv)
  at::Tensor weights;        ///< (N, H, L, S) or (N, L, S); undefined: unwanted
  RowStatistics statistics;  ///< undefined: unwanted, or not formed
};

/// How a call is computed: by the CPU kernels, by LibTorch's own fused attention or by the
/// composition of ATen calls, and why. Arguments as those of `attention`.
PathChoice attention_path(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, const ResolvedMask& mask,
                          const AttentionCall& call);

/// Attention by its path.
///
/// query (N, H, L, D), key (N, Hk, S, D), value (N, Hk, S, Dv), S including the mask's extra
/// keys. All checked by the caller.
AttentionResult attention(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, const ResolvedMask& mask,
                          const AttentionCall& call);

}  // namespace mha::detail
