// Guards what must hold of every list of a resolved mask: it means on each path what the
// oracle's loops say, for whole masks, their parts and single keys, with NaN behind it, and its
// gradients are those of the plain path in double. What blocks is exact; results in float32
// differ from those in double by a few roundings of numbers of order 1.
#include <mha/scaled_dot_product_attention.h>

#include <cmath>

#include "attention/kernel_attention.h"
#include "attention/plain_attention.h"
#include "mask/dense_mask.h"
#include "mask/kernel_mask.h"
#include "mask/mask_parts.h"
#include "runtime/cpu_kernels.h"
#include "support/mask_samples.h"
#include "support/oracle.h"

namespace mha {
namespace {

using detail::MaskList;
using detail::ResolvedMask;
using test::is_close;
using test::mask_samples;
using test::nan;
using test::Sizes;

constexpr int64_t head_dim = 8;

// What a mask says of all pairs, (N, H, L, S + extra).
struct Pairs {
  explicit Pairs(const ResolvedMask& mask)
      : allowed(detail::allowed_pairs(mask, at::kCPU)),
        added(detail::added_pairs(mask, at::kDouble)) {
    const std::vector<int64_t> sizes{mask.batch, mask.heads, mask.queries,
                                     mask.keys + mask.extra_keys};
    allowed = (allowed.defined() ? allowed : at::ones({1, 1, 1, 1}, at::kBool)).expand(sizes);
    added = (added.defined() ? added : at::zeros({1, 1, 1, 1}, at::kDouble)).expand(sizes);
  }

  Pairs narrow(int64_t dim, int64_t from, int64_t count) const {
    Pairs part = *this;
    part.allowed = allowed.narrow(dim, from, count);
    part.added = added.narrow(dim, from, count);
    return part;
  }

  bool operator==(const Pairs& other) const {
    return at::equal(allowed, other.allowed) && at::equal(added, other.added);
  }

  at::Tensor allowed, added;
};

struct Inputs {
  at::Tensor query, key, value;
};

Inputs draw_inputs(const Sizes& sizes) {
  test::Random random(92);
  const auto [n, h, l, s] = sizes;
  return {random.normal({n, h, l, head_dim}), random.normal({n, h, s, head_dim}),
          random.normal({n, h, s, head_dim})};
}

detail::AttentionCall call_without_weights() {
  return {{1 / std::sqrt(static_cast<double>(head_dim))}};
}

TEST(MaskPartsTest, EveryListHasASampleThatHoldsItAlone) {
  const Sizes sizes{2, 2, 4, 6};
  const auto samples = mask_samples(sizes);
  for (const MaskList& list : detail::mask_lists) {
    bool found = false;
    for (const auto& sample : samples) found |= sample.list == list.tensors;
    EXPECT_TRUE(found) << "row " << &list - detail::mask_lists << " of mask_lists";
  }
  for (const auto& sample : samples) {
    const auto mask = test::resolve(sample.mask, sizes);
    const auto expected = sample.mask.terms()[0].kind == Mask::Term::Kind::documents ? 2 : 1;
    int lists = 0;
    for (const auto* list : tensor_lists(mask)) lists += list->empty() ? 0 : 1;
    EXPECT_EQ(lists, expected) << sample.name;
    EXPECT_TRUE(mask.band.is_open()) << sample.name;
    EXPECT_FALSE((mask.*sample.list).empty()) << sample.name;
    const auto allowed = test::dense_mask(sample.mask, 2, 2, 4, 6).allowed;
    EXPECT_EQ(allowed.eq(0).any().item<bool>(), sample.list != &detail::MaskLists::relative)
        << sample.name;
    EXPECT_TRUE(allowed.ne(0).any().item<bool>()) << sample.name;
  }
}

TEST(MaskPartsTest, EveryListMeansWhatTheLoopsSay) {
  const Sizes sizes{2, 2, 4, 6};
  for (const auto& sample : mask_samples(sizes)) {
    for (const int64_t extra : {0, 2}) {
      auto mask = test::resolve(sample.mask, sizes);
      mask.extra_keys = extra;
      const auto expected = test::dense_mask(sample.mask, 2, 2, 4, 6, extra);
      const Pairs pairs(mask);
      EXPECT_TRUE(at::equal(pairs.allowed, expected.allowed.ne(0))) << sample.name;
      EXPECT_TRUE(at::equal(pairs.added, expected.added)) << sample.name;
    }
  }
}

TEST(MaskPartsTest, AHeadRowsOrKeysOfAMaskAreThoseOfTheWhole) {
  const Sizes sizes{2, 2, 4, 6};
  for (const auto& sample : mask_samples(sizes)) {
    SCOPED_TRACE(sample.name);
    auto mask = test::resolve(sample.mask & Mask::window(3, 2), sizes);
    mask.extra_keys = 2;
    const Pairs whole(mask);
    for (int64_t head = 0; head < 2; ++head) {
      const auto of_head = select_head(mask, head);
      EXPECT_TRUE(Pairs(of_head) == whole.narrow(1, head, 1)) << head;
      for (int64_t from = 0; from <= 4; ++from) {
        for (int64_t to = from; to <= 4; ++to) {
          const auto rows = select_rows(of_head, from, to);
          const auto of_rows = whole.narrow(1, head, 1).narrow(2, from, to - from);
          EXPECT_TRUE(Pairs(rows) == of_rows) << head << ' ' << from << ' ' << to;
          for (int64_t begin = 0; begin <= 8; ++begin) {
            for (int64_t end = begin; end <= 8; ++end) {
              EXPECT_TRUE(Pairs(select_keys(rows, begin, end)) ==
                          of_rows.narrow(3, begin, end - begin))
                  << head << " rows " << from << ' ' << to << " keys " << begin << ' ' << end;
            }
          }
        }
      }
    }
  }
}

TEST(MaskPartsTest, AKeyIsOpenToTheQueriesThatMayAttendToItAndTakesMemoryForItAlone) {
  const Sizes sizes{2, 2, 4, 6};
  for (const auto& sample : mask_samples(sizes)) {
    auto mask = test::resolve(sample.mask & Mask::window(3, 2), sizes);
    mask.extra_keys = 2;
    const Pairs whole(mask);
    for (int64_t j = 0; j < 8; ++j) {
      const auto open = open_column(mask, j, at::kCPU);
      EXPECT_TRUE(at::equal(open.expand({2, 2, 4}), whole.allowed.select(3, j)))
          << sample.name << ' ' << j;
      EXPECT_LE(open.numel(), 2 * 2 * 4) << sample.name;
    }
  }
}

// Some tiles and blocks of keys, and few queries over several chunks of keys.
const std::vector<Sizes> path_sizes{{2, 2, 4, 6}, {2, 2, 70, 130}, {2, 2, 2, 700}};

TEST(MaskPartsTest, ThePathsGiveWhatTheLoopsSay) {
  for (const auto& sizes : path_sizes) {
    const auto [q, k, v] = draw_inputs(sizes);
    auto call = call_without_weights();
    for (const auto& sample : mask_samples(sizes)) {
      SCOPED_TRACE(testing::Message() << sample.name << ", L " << sizes.l);
      const auto mask = test::resolve(sample.mask, sizes);
      const auto expected = test::oracle_attention(q, k, v, sample.mask).output;
      EXPECT_TRUE(is_close(plain_attention(q, k, v, mask, call).output, expected, 3e-6));
      for (const auto statistics : {detail::Statistics::unwanted, detail::Statistics::needed}) {
        call.statistics = statistics;
        const auto result = kernel_attention(q, k, v, mask, call);
        EXPECT_TRUE(is_close(result.output, expected, 3e-6))
            << "statistics " << static_cast<int>(statistics);
      }
    }
  }
}

TEST(MaskPartsTest, NaNReachesTheQueriesThatMaySeeItAloneInResultsAndGradients) {
  const Sizes sizes{2, 2, 4, 6};
  for (const auto& sample : mask_samples(sizes)) {
    const auto allowed = test::dense_mask(sample.mask, 2, 2, 4, 6).allowed.ne(0);
    for (int64_t j = 0; j < sizes.s; ++j) {
      SCOPED_TRACE(testing::Message() << sample.name << ", key " << j);
      const auto reached = allowed.select(3, j).unsqueeze(-1).expand({2, 2, 4, head_dim});
      for (const auto dtype : {at::kFloat, at::kDouble}) {  // by the kernels, and plain
        const auto [q, k, v] = draw_inputs(sizes);
        const auto query = test::leaf(q.to(dtype)), key = k.to(dtype), value = v.to(dtype);
        const auto bad = [&](const at::Tensor& tensor) {
          return tensor.index_fill(2, torch::tensor({j}), nan);
        };
        const auto of_value = scaled_dot_product_attention(query, key, bad(value), sample.mask);
        EXPECT_TRUE(at::equal(of_value.output.isnan(), reached)) << dtype;
        const auto of_key = scaled_dot_product_attention(query, bad(key), value, sample.mask);
        EXPECT_TRUE(at::equal(of_key.output.isnan(), reached)) << dtype;
        of_key.output.sum().backward();
        EXPECT_TRUE(at::equal(query.grad().isnan(), reached)) << dtype;
      }
    }
  }
}

TEST(MaskPartsTest, GradientsOfTermsAreThoseOfThePlainPath) {
  for (const auto& sizes : path_sizes) {
    const auto [q, k, v] = draw_inputs(sizes);
    for (const auto& sample : mask_samples(sizes)) {
      const auto mask = test::resolve(sample.mask, sizes);
      const auto added = added_lists(mask);
      if (std::find(added.begin(), added.end(), &(mask.*sample.list)) == added.end()) continue;
      const auto gradient = [&, q = q, k = k, v = v](at::ScalarType dtype) {
        auto term = sample.mask.terms()[0].tensor;
        term.requires_grad_(true);
        const auto output =
            scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), sample.mask)
                .output;
        return torch::autograd::grad({output.square().sum()}, {term})[0];
      };
      EXPECT_TRUE(is_close(gradient(at::kFloat), gradient(at::kDouble), 2e-5))
          << sample.name << ", L " << sizes.l;
    }
  }
}

TEST(MaskPartsTest, NoListButThoseOfPairsTakesMemoryForPairs) {
  const Sizes sizes{2, 2, 70, 130};
  for (const auto& sample : mask_samples(sizes)) {
    const auto packed = pack_mask(test::resolve(sample.mask, sizes), detail::cpu_kernels());
    bool is_of_pairs = false;
    for (const MaskList& list : detail::mask_lists) {
      // What each head has of its own is none of keys alone.
      if (list.tensors == sample.list) is_of_pairs = list.has(detail::Axis::head);
    }
    EXPECT_LE(packed.mask.pair_bits != nullptr, is_of_pairs) << sample.name;
  }
}

}  // namespace
}  // namespace mha
