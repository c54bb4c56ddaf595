#pragma once

// The interface of the kernels that multiply bfloat16 on matrix tiles (AMX), beside that of
// kernels.h: pointers, sizes and strides, no Torch.

#include "kernels.h"
#include "tile_product.h"

namespace mha::cpu {

/// Attention forward over bfloat16. Products are exact, sums and the softmax float32; weights
/// are rounded to bfloat16 before they multiply values.
struct TileForward : ScoreArgs {
  int64_t value_dim = 0;
  /// (heads): one more score of each row, which takes weight and has no value. Null: none.
  const float* sinks = nullptr;
  StoredRows query, key, value;
  /// As `pack_keys` left them.
  float* packed = nullptr;
  Rows<BFloat16> output;
  /// Becomes 1 if a number of the output is infinite or NaN; else it stays.
  int32_t* not_finite = nullptr;
  /// As in `AttentionForward`. Null: not wanted.
  float *row_maximum = nullptr, *row_factor = nullptr;
  KernelDropout dropout;
};

/// Gradients of attention over bfloat16, summed in float32 and rounded once.
struct TileBackward : ScoreArgs {
  int64_t value_dim = 0;
  StoredRows query, key, value, output, grad_output;
  /// As `backward_pack_keys` left them.
  float* packed = nullptr;
  const float *row_maximum = nullptr, *row_factor = nullptr;  // as the forward left them
  Rows<BFloat16> grad_query, grad_key, grad_value;
  /// As in `AttentionBackward`: more than one leave shares of grad_query, in float32.
  int64_t chunks = 1;
  float* query_shares = nullptr;
  KernelDropout dropout;
};

/// The kernels on tiles; none of the members is 0 or null.
struct TileKernels : PairBlocks {
  /// Floats that `pack_keys` writes, and what writes them for key/value heads [begin, end) of
  /// batch * kv_heads: keys and values in the order in which tiles read them.
  int64_t (*packed_keys)(const TileForward&);
  void (*pack_keys)(const TileForward&, int64_t begin, int64_t end);
  /// Floats of scratch that a thread needs for `forward`, 64-byte aligned.
  int64_t (*forward_scratch)(const TileForward&);
  /// Computes tiles [begin, end) of batch * heads * ceil(queries / tile), tile index fastest.
  void (*forward)(const TileForward&, int64_t begin, int64_t end, float* scratch);
  /// The same for the backward.
  int64_t (*backward_packed_keys)(const TileBackward&);
  void (*backward_pack_keys)(const TileBackward&, int64_t begin, int64_t end);
  int64_t (*backward_scratch)(const TileBackward&);
  /// As in `Kernels`.
  int64_t (*backward_chunks)(const TileBackward&);
  /// Computes tasks [begin, end) of batch * kv_heads * chunks.
  void (*backward)(const TileBackward&, int64_t begin, int64_t end, float* scratch);
  /// Numbers of a packed side of a product; `count` is its rows on the left, its columns on the
  /// right. 64-byte aligned.
  int64_t (*side_size)(int64_t count, int64_t depth);
  /// Packs one block of 32 rows of a left side, or of 32 columns of a right one.
  void (*pack_side)(const TileSide&, int64_t block, BFloat16* packed);
  /// Floats of scratch for `multiply_sides`, and what computes some blocks of a product: the
  /// same bits however they are split.
  int64_t (*product_scratch)(int64_t depth, const TileBlocks&);
  void (*multiply_sides)(const TileProduct&, const TileBlocks&, float* scratch);
  /// The sums of one block of 32 columns over all rows, rounded once, into sums[column].
  void (*sum_columns)(const TileMatrix<const BFloat16>&, int64_t block, BFloat16* sums);
};

// Their entries. Only a CPU that can run a set may call its own; the emulation needs AVX-512.
const TileKernels* amx_tile_kernels();
const TileKernels* amx_emulated_tile_kernels();

}  // namespace mha::cpu
