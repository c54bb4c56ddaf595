#pragma once

#include <mha/scaled_dot_product_attention.h>

#include <cstdint>

#include "mask/resolved_mask.h"

namespace mha::detail {

/// What a forward knows of each row, (N, H, L) float32 each:
/// weight = 4^(score * log4(e) - maximum) * factor, with a factor of 0 where nothing is seen.
struct RowStatistics {
  at::Tensor maximum, factor;
};

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

/// The options of one call with every default resolved and the random seed drawn.
struct AttentionCall {
  Scoring scoring;
  double dropout;
  uint64_t dropout_seed;  // of the CPU's counter-based generator; other devices draw their own
  Weights weights;
  bool weights_after_dropout;
  bool query_is_bfloat16 = false;           // before it was widened to float32
  bool output_is_passing = false;           // the caller drops the output before it returns
  RowStatistics* row_statistics = nullptr;  // filled in by kernels that form them anyway
};

/// The one place that chooses how attention is computed.
///
/// query (N, H, L, D), key (N, Hk, S, D), value (N, Hk, S, Dv), S including the mask's extra
/// keys; output (N, H, L, Dv), weights as `options` says. All checked by the caller, who says
/// whether the output ends before its own call does. `row_statistics`, if given, is filled in
/// where the computation forms them anyway.
AttentionOutput attention(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, const ResolvedMask& mask,
                          const AttentionOptions& options, bool output_is_passing = false,
                          RowStatistics* row_statistics = nullptr);

}  // namespace mha::detail
