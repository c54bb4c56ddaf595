#pragma once

// Products of whole matrices of bfloat16 on tiles: a part of the interface, as kernels.h.

#include <cstdint>

#include "kernels.h"

namespace mha::cpu {

/// A matrix whose rows may be tokens of samples, and whose columns may be heads.
template <typename T>
struct TileMatrix {
  T* data = nullptr;
  int64_t rows = 0, columns = 0;
  /// Row r starts at data + (r / rows_per_sample) * n + (r % rows_per_sample) * t.
  int64_t rows_per_sample = 0, n = 0, t = 0;
  /// Column c is at (c / group) * group_stride + c % group of its row. `group` is a multiple of
  /// 16, or all columns.
  int64_t group = 0, group_stride = 0;
};

/// How a matrix becomes one side of a product left * right, which sums over its depth.
struct TileSide {
  TileMatrix<const BFloat16> matrix;
  bool is_left = false;
  /// Whether the depth goes down the matrix's rows, or along them.
  bool depth_is_rows = false;
  /// Where it is a part of a deeper side: its first step of 32 in depth, and those of the
  /// whole. 0 steps: it is the whole.
  int64_t first_step = 0, steps = 0;
};

/// output[r][c] = sum over the depth, not 0, of left[r][.] * right[.][c], plus bias[c]: in
/// float32, rounded once.
struct TileProduct {
  int64_t depth = 0;
  /// The two sides, as `pack_side` left them.
  const BFloat16 *left = nullptr, *right = nullptr;
  const float* bias = nullptr;  // (columns); null: none
  TileMatrix<BFloat16> output;
};

/// Blocks of 32 x 32 of a product.
struct TileBlocks {
  int64_t row_begin, row_end, column_begin, column_end;
};

}  // namespace mha::cpu
