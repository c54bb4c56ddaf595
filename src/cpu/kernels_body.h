// The whole of one ISA's kernels. Each kernels_<isa>.cpp defines its MHA_ISA_* macro and
// includes this file once; everything has internal linkage but the entry function.

#include <stddef.h>
#include <stdint.h>

#include <type_traits>
#include <utility>
#if MHA_ISA_AVX512 || MHA_ISA_AVX2
#include <immintrin.h>
#endif

#include "kernels.h"

namespace mha::cpu {
namespace {

// Each builds on those before it.
// clang-format off
#include "vec.h"
#include "micro_kernel.h"
#include "transpose.h"
#include "pair_mask.h"
#include "key_walk.h"
#include "score_range.h"
#include "softcap.h"
#include "dropout.h"
#include "weight_strip.h"
#include "bfloat16_pairs.h"
#include "attention_forward.h"
#include "narrow.h"
#include "decode_products.h"
#include "decode.h"
#include "backward_passes.h"
#include "attention_backward.h"
#include "attention_map.h"
#include "linear.h"
#include "rotary.h"
#include "head_norm.h"
#include "finite.h"
// clang-format on

constexpr Kernels make_kernels(const char* name) {
  return {name,
          tile,
          key_block,
          pack_pairs,
          forward_scratch,
          forward,
          can_dot,
          value_pairs,
          pair_values,
          can_decode,
          decode_chunk,
          decode_scratch,
          decode_partials,
          decode,
          merge_decoded,
          backward_scratch,
          backward_chunks,
          backward,
          backward_added,
          packed_size,
          pack_weight,
          linear,
          rotary_tokens,
          rotate,
          norm_tokens,
          normalise,
          dropout_factors,
          all_finite,
          map_scratch,
          map_pool_scratch,
          map_rows,
          map_top,
          map_summary,
          map_pool};
}

}  // namespace
}  // namespace mha::cpu
