// The chunks of keys into which a backward over few heads is split. Included once per ISA (see
// vec.h).

// The keys of one chunk; the extra keys are the last one's.
template <typename Backward>
MHA_INLINE KeySpan chunk_keys(const Backward& args, int64_t chunk) {
  const int64_t blocks = ceil_div(args.mask.keys, key_block);
  const int64_t size = ceil_div(blocks, args.chunks) * key_block;
  const bool last = chunk == args.chunks - 1;
  return {min64(chunk * size, args.mask.keys),
          last ? args.keys : min64((chunk + 1) * size, args.mask.keys)};
}

// Of the heads of one sample only: gradients are the same in a batch of any size.
template <typename Backward>
static int64_t backward_chunks(const Backward& args) {
  constexpr int64_t heads_enough = 16, shortest = 512, most = 4;
  const int64_t wanted = min64(most, heads_enough / args.kv_heads);
  return max64(1, min64(wanted, args.mask.keys / shortest));
}
