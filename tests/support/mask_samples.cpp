#include "support/mask_samples.h"

namespace mha::test {

using detail::MaskLists;

std::vector<MaskSample> mask_samples(const Sizes& sizes) {
  const auto [n, h, l, s] = sizes;
  Random random(91);
  // Beside what is drawn, nobody sees key 1, and query 0 sees nothing.
  const auto blocks = [&, l = l](at::IntArrayRef shape) {
    auto drawn = random.coins(shape, 0.3);
    drawn.select(-1, 1).fill_(true);
    drawn.select(-1, 2).fill_(false);
    if (drawn.size(-2) == l) drawn.select(-2, 0).fill_(true);
    return drawn;
  };
  const auto keys = [&, s = s](int64_t samples) { return blocks({samples, 1, s}).squeeze(1); };
  const auto terms = [&](const at::Tensor& blocked) {
    return random.normal(blocked.sizes(), at::kDouble).masked_fill(blocked, -infinity);
  };
  const auto offsets = torch::tensor({s - l - 1, int64_t{-1}});
  const auto queries = at::arange(n * l).view({n, l}) % 3;
  const auto documents = Mask::documents(queries, at::arange(s) % 2);
  return {
      {"a lower edge of each sample", &MaskLists::lows, Mask::window(1, -1, offsets)},
      {"an upper edge of each sample", &MaskLists::highs, Mask::causal(offsets)},
      {"lengths", &MaskLists::lengths, Mask::lengths(torch::tensor({s - 2, int64_t{1}}))},
      {"kept keys", &MaskLists::keep_keys, Mask::keep_keys(keys(n).logical_not())},
      {"blocked keys of all samples", &MaskLists::block_keys, Mask::block_keys(keys(1)[0])},
      {"kept pairs", &MaskLists::keep, Mask::keep(blocks({n, h, l, s}).logical_not())},
      {"blocked pairs of all heads", &MaskLists::block, Mask::block(blocks({n, l, s}))},
      {"kept pairs of each query and head", &MaskLists::keep,
       Mask::keep(random.coins({1, h, l, 1}, 0.5)
                      .index_fill(2, torch::tensor({0}), false)
                      .expand({n, h, l, s}))},
      {"documents of queries", &MaskLists::query_documents, documents},
      {"documents of keys", &MaskLists::key_documents, documents},
      {"terms of pairs", &MaskLists::add, Mask::add(terms(blocks({n, h, l, s})))},
      {"terms of pairs of all samples", &MaskLists::add, Mask::add(terms(blocks({l, s})))},
      {"terms of keys", &MaskLists::add_keys, Mask::add_keys(terms(keys(n)))},
      {"terms of the keys of each head", &MaskLists::add_keys,
       Mask::add(terms(blocks({1, h, 1, s})).expand({n, h, l, s}))},
      {"a table of each head", &MaskLists::relative,
       Mask::relative(random.normal({h, l + s - 1}, at::kDouble))},
      {"a table of all heads", &MaskLists::relative,
       Mask::relative(random.normal({1, l + s - 1}, at::kDouble))},
  };
}

detail::ResolvedMask resolve(const Mask& mask, const Sizes& sizes) {
  return detail::resolve(mask, {{}, sizes.n, sizes.h, sizes.l, sizes.s}, at::kCPU);
}

}  // namespace mha::test
