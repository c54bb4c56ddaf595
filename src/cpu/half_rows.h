// Rows of a half type to floats and back. Included once per ISA (see vec.h).

template <typename Element>
static void widen_rows_of(const Element* rows, int64_t stride, int64_t count, int64_t columns,
                          float* to) {
  for (int64_t i = 0; i < count; ++i, rows += stride, to += columns) {
    int64_t c = 0;
    for (; c + lanes <= columns; c += lanes) store(to + c, load(rows + c));
    for (; c < columns; ++c) to[c] = to_float(rows[c]);
  }
}

static void widen_rows(Storage storage, const void* rows, int64_t stride, int64_t count,
                       int64_t columns, float* to) {
  if (storage == Storage::bfloat16) {
    widen_rows_of(static_cast<const BFloat16*>(rows), stride, count, columns, to);
  } else {
    widen_rows_of(static_cast<const Float16*>(rows), stride, count, columns, to);
  }
}

template <typename Element>
static void round_rows_to(const float* rows, int64_t count, int64_t columns, Element* to,
                          int64_t stride) {
  for (int64_t i = 0; i < count; ++i, rows += columns, to += stride) {
    int64_t c = 0;
    for (; c + lanes <= columns; c += lanes) store(to + c, load(rows + c));
    for (; c < columns; ++c) store_one(to + c, rows[c]);
  }
}

static void round_rows(Storage storage, const float* rows, int64_t count, int64_t columns,
                       void* to, int64_t stride) {
  if (storage == Storage::bfloat16) {
    round_rows_to(rows, count, columns, static_cast<BFloat16*>(to), stride);
  } else {
    round_rows_to(rows, count, columns, static_cast<Float16*>(to), stride);
  }
}
