// Linear layers on packed weights. Included once per ISA (see vec.h).
//
// The weight (columns, inner) lies packed as [columns / tile][inner][tile], so that a panel is
// the `b` side of `multiply_add` as it stands, and the input's rows are the broadcast side. A
// panel (inner * tile floats) stays in the second-level cache while all rows pass by it.

static int64_t packed_size(int64_t inner, int64_t columns) {
  return ceil_div(columns, tile) * inner * tile;
}

static void pack_weight(const float* weight, int64_t stride, int64_t inner, int64_t columns,
                        float* packed) {
  for (int64_t first = 0; first < columns; first += tile, packed += inner * tile) {
    const int64_t count = min64(tile, columns - first);
    transpose(weight + first * stride, stride, count, inner, packed, tile);
    if (count == tile) continue;
    for (int64_t k = 0; k < inner; ++k) {
      for (int64_t c = count; c < tile; ++c) packed[k * tile + c] = 0;
    }
  }
}

// Where a panel's columns go, and what is added to them.
struct Panel {
  const float* packed;
  Vec bias[tile_vectors];
  int64_t offset[tile_vectors];  // of a vector's first column in an output row
  int64_t last_lanes;            // valid lanes of the last vector
};

template <int M, int V>
MHA_INLINE void linear_rows(const LinearArgs& args, const Panel& panel, int64_t first_row) {
  float* out[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const int64_t row = first_row + m, n = row / args.rows_per_sample;
    out[m] = args.output + n * args.output_n + (row - n * args.rows_per_sample) * args.output_t;
    for (int v = 0; v < V; ++v) __builtin_prefetch(out[m] + panel.offset[v], 1);
  }
  Vec c[M][V] = {};
  multiply_add<M, V>(args.inner, args.input + first_row * args.input_stride, args.input_stride,
                     1, panel.packed, tile, c);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const Vec sum = c[m][v] + panel.bias[v];
      float* to = out[m] + panel.offset[v];
      if (v < V - 1 || panel.last_lanes == lanes) {
        store(to, sum);
      } else {
        for (int64_t i = 0; i < panel.last_lanes; ++i) to[i] = sum[i];
      }
    }
  }
}

template <int V>
static void linear_panel(const LinearArgs& args, const Panel& panel, int64_t begin,
                         int64_t end) {
  int64_t row = begin;
  for (; row + micro_rows <= end; row += micro_rows)
    linear_rows<micro_rows, V>(args, panel, row);
  if constexpr (micro_rows > 4) {
    for (; row + 4 <= end; row += 4) linear_rows<4, V>(args, panel, row);
  }
  for (; row + 2 <= end; row += 2) linear_rows<2, V>(args, panel, row);
  for (; row < end; ++row) linear_rows<1, V>(args, panel, row);
}

static void linear(const LinearArgs& args, const float* packed, int64_t index,
                   int64_t row_begin, int64_t row_end) {
  const int64_t first = index * tile, count = min64(tile, args.columns - first);
  const int64_t vectors = ceil_div(count, lanes);
  Panel panel;
  panel.packed = packed;
  panel.last_lanes = count - (vectors - 1) * lanes;
  for (int v = 0; v < tile_vectors; ++v) {
    const int64_t column = first + v * lanes;
    panel.offset[v] = column / args.group * args.output_group + column % args.group;
    panel.bias[v] = Vec{};
    if (!args.bias) continue;
    for (int i = 0; i < lanes; ++i) {
      if (column + i < args.columns) panel.bias[v][i] = args.bias[column + i];
    }
  }
  switch (vectors) {
    case 1:
      return linear_panel<1>(args, panel, row_begin, row_end);
    case 2:
      return linear_panel<2>(args, panel, row_begin, row_end);
    case 3:
      return linear_panel<3>(args, panel, row_begin, row_end);
  }
}
