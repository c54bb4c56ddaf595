// Products with panels of a row-major matrix, which the gradients of linear layers are sums of.
// Included once per ISA (see vec.h).
//
// A panel is `tile` columns of some rows, copied to [row][tile], since rows far apart in memory
// would fall out of the caches. It is the `b` side of `multiply_add`, or, read across its rows,
// the broadcast side of a product with the transposed matrix.

static void copy_panel(const float* from, int64_t stride, int64_t rows, int64_t columns,
                       float* panel) {
  for (int64_t r = 0; r < rows; ++r, from += stride, panel += tile) {
    if (columns == tile) {
#pragma GCC unroll 3
      for (int v = 0; v < tile_vectors; ++v) store(panel + v * lanes, load(from + v * lanes));
    } else {
      for (int64_t c = 0; c < columns; ++c) panel[c] = from[c];
      for (int64_t c = columns; c < tile; ++c) panel[c] = 0;
    }
  }
}

static void sum_panel(const float* panel, int64_t rows, int64_t columns, bool adds,
                      float* sums) {
  Vec sum[tile_vectors] = {};
  for (int64_t r = 0; r < rows; ++r, panel += tile) {
#pragma GCC unroll 3
    for (int v = 0; v < tile_vectors; ++v) sum[v] += load(panel + v * lanes);
  }
  for (int64_t c = 0; c < columns; ++c) {
    const float found = sum[c / lanes][c % lanes];
    sums[c] = adds ? sums[c] + found : found;
  }
}

template <int M, int V>
MHA_INLINE void multiply_panel_rows(const PanelProduct& p, int64_t first) {
  float* to = p.output + first * p.output_stride;
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) __builtin_prefetch(to + m * p.output_stride + v * lanes, 1);
  }
  Vec c[M][V] = {};
  multiply_add<M, V>(p.depth, p.a + first * p.a_m, p.a_m, p.a_k, p.panel, p.panel_stride, c);
  if (p.columns == V * lanes) {
    p.adds ? add_block(c, to, p.output_stride) : store_block(to, p.output_stride, c);
    return;
  }
  for (int m = 0; m < M; ++m, to += p.output_stride) {
    for (int64_t i = 0; i < p.columns; ++i) {
      const float sum = c[m][i / lanes][i % lanes];
      to[i] = p.adds ? to[i] + sum : sum;
    }
  }
}

template <int V>
static void multiply_panel_vectors(const PanelProduct& p) {
  for_each_rows(p.rows, [&](auto count, int64_t first) {
    multiply_panel_rows<decltype(count)::value, V>(p, first);
  });
}

static void multiply_panel(const PanelProduct& p) {
  switch (ceil_div(p.columns, lanes)) {
    case 1:
      return multiply_panel_vectors<1>(p);
    case 2:
      return multiply_panel_vectors<2>(p);
    case 3:
      return multiply_panel_vectors<3>(p);
  }
}
