// The whole of one ISA's kernels. Each kernels_<isa>.cpp includes its vec_<isa>.h and says
// which `Isa` it is, then includes this file once; everything has internal linkage but its
// entry function.

// Each builds on those before it.
// clang-format off
#include "micro_kernel.h"
#include "transpose.h"
#include "pair_mask.h"
#include "key_walk.h"
#include "score_range.h"
#include "softcap.h"
#include "dropout.h"
#include "weight_strip.h"
#include "bfloat16_pairs.h"
#include "running_softmax.h"
#include "attention_forward.h"
#include "decode_products.h"
#include "decode.h"
#include "key_chunks.h"
#include "backward_passes.h"
#include "attention_backward.h"
#include "attention_map.h"
#include "linear.h"
#include "panel_product.h"
#include "rotary.h"
#include "head_norm.h"
#include "half_rows.h"
#include "finite.h"
// clang-format on

// By name: two of them may have one type.
constexpr Kernels make_kernels() {
  Kernels kernels{};
  kernels.tile = tile;
  kernels.key_block = key_block;
  kernels.pack_pairs = pack_pairs;
  kernels.forward_scratch = forward_scratch;
  kernels.forward = forward;
  kernels.can_dot = can_dot;
  kernels.value_pairs = value_pairs;
  kernels.pair_values = pair_values;
  kernels.can_decode = can_decode;
  kernels.decode_chunk = decode_chunk;
  kernels.decode_scratch = decode_scratch;
  kernels.decode_partials = decode_partials;
  kernels.decode = decode;
  kernels.merge_decoded = merge_decoded;
  kernels.backward_scratch = backward_scratch;
  kernels.backward_chunks = backward_chunks;
  kernels.backward = backward;
  kernels.backward_added = backward_added;
  kernels.packed_size = packed_size;
  kernels.pack_weight = pack_weight;
  kernels.linear = linear;
  kernels.copy_panel = copy_panel;
  kernels.sum_panel = sum_panel;
  kernels.multiply_panel = multiply_panel;
  kernels.rotary_tokens = rotary_tokens;
  kernels.rotate = rotate;
  kernels.norm_tokens = norm_tokens;
  kernels.normalise = normalise;
  kernels.widen_rows = widen_rows;
  kernels.round_rows = round_rows;
  kernels.dropout_factors = dropout_factors;
  kernels.all_finite = all_finite;
  kernels.map_scratch = map_scratch;
  kernels.map_pool_scratch = map_pool_scratch;
  kernels.map_rows = map_rows;
  kernels.map_top = map_top;
  kernels.map_summary = map_summary;
  kernels.map_sums = map_sums;
  kernels.map_pool = map_pool;
  return kernels;
}
