// Guards that what a mask blocks has no effect at all: a key or value behind a mask never
// reaches a result or a gradient, not even as NaN or infinity, and a query that may attend to
// nothing is as good as absent. Comparisons are bit-equal to the same call with zeros in the
// blocked place; only where rows are left out, which changes the shape of the products, a few
// roundings differ.
#include <mha/scaled_dot_product_attention.h>

#include <cmath>
#include <vector>

#include "support/expect.h"
#include "support/oracle.h"
#include "support/values.h"

namespace mha {
namespace {

using test::all_zero;
using test::bools;
using test::infinity;
using test::is_bit_equal;
using test::is_close;
using test::is_finite;
using test::is_same_but_for_blas;
using test::is_same_result;
using test::leaf;
using test::nan;
using Alignment = Mask::Alignment;

constexpr double poisons[] = {nan, infinity, -infinity};
constexpr int64_t N = 2, H = 3, L = 4, S = 5, D = 6;

struct NamedMask {
  const char* name;
  Mask mask;
};

std::vector<NamedMask> masks() {
  torch::manual_seed(21);
  const auto random = at::rand({N, H, L, S}).gt(0.5);
  auto one_head = at::zeros({N, H, L, S}, at::kBool);
  one_head.select(1, 2).select(2, 3).fill_(true);
  auto added = at::zeros({L, S});
  added.select(1, 1).fill_(-infinity);
  auto row = at::ones({L, S});
  row[2].fill_(0);
  return {{"Everything", Mask()},
          {"Lengths", Mask::lengths(torch::tensor({3, 5}))},
          {"LengthsWithAnEmptySample", Mask::lengths(torch::tensor({5, 0}))},
          {"BlockKeys", Mask::block_keys(bools({0, 1, 0, 0, 1, 1, 0, 0, 0, 0}).view({N, S}))},
          {"KeepKeys", Mask::keep_keys(bools({1, 0, 1, 1, 0}))},
          {"KeepWithADeadRow", Mask::keep(row)},
          {"RandomPairs", Mask::keep(random)},
          {"BlockAKeyInOneHead", Mask::block(one_head)},
          {"AddMinusInfinityAtOneKey", Mask::add(added)},
          {"Causal", Mask::causal()},
          {"CausalTopLeft", Mask::causal(Alignment::top_left)},
          {"Window", Mask::window(1, 0)},
          {"CausalAndLengths", Mask::causal() & Mask::lengths(torch::tensor({0, 4}))}};
}

struct Inputs {
  at::Tensor query, key, value, added;
};
Inputs draw_inputs() {
  torch::manual_seed(22);
  return {at::randn({N, H, L, D}), at::randn({N, H, S, D}), at::randn({N, H, S, D}),
          at::randn({N, H, L, S})};
}

struct Results {
  at::Tensor output, weights, query, key, value, added;  // the last four are gradients
};
Results attend(const Inputs& in, const Mask& mask) {
  torch::manual_seed(23);
  const auto upstream = at::randn({N, H, in.query.size(2), D});
  const auto upstream_map = at::randn({N, H, in.query.size(2), in.key.size(2)});
  const auto query = leaf(in.query), key = leaf(in.key), value = leaf(in.value),
             added = leaf(in.added);
  const auto [output, weights] =
      mha::scaled_dot_product_attention(query, key, value, mask & Mask::add(added));
  at::Tensor(at::sum(output * upstream) + at::sum(weights * upstream_map)).backward();
  return {output.detach(), weights.detach(), query.grad(),
          key.grad(),      value.grad(),     added.grad()};
}

// `tensor` (N, H, T, X) with `value` in the rows (N, H, T) that `where` names.
at::Tensor filled(const at::Tensor& tensor, const at::Tensor& where, double value) {
  return tensor.masked_fill(where.unsqueeze(-1), value);
}

// Gradients from the weights are those of the plain path, on every path.
void expect_same(const Results& a, const Results& b) {
  EXPECT_TRUE(is_same_result(a.output, b.output));
  EXPECT_TRUE(is_same_result(a.weights, b.weights));
  EXPECT_TRUE(is_same_but_for_blas(a.query, b.query));
  EXPECT_TRUE(is_same_but_for_blas(a.key, b.key));
  EXPECT_TRUE(is_same_but_for_blas(a.value, b.value));
  EXPECT_TRUE(is_same_but_for_blas(a.added, b.added));
}

// One mask with what it means for the inputs, worked out by the oracle.
struct Case {
  explicit Case(const NamedMask& named)
      : name(named.name),
        mask(named.mask),
        allowed(test::dense_mask(mask, N, H, L, S).allowed.ne(0)),
        unseen_keys(allowed.any(2).logical_not()),
        dead_queries(allowed.any(3).logical_not()) {}
  std::string name;
  Mask mask;
  at::Tensor allowed;       // (N, H, L, S)
  at::Tensor unseen_keys;   // (N, H, S)
  at::Tensor dead_queries;  // (N, H, L)
};
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& named : masks()) all.emplace_back(named);
  return all;
}

TEST(BlockedValuesTest, AKeyBlockedForEveryQueryHasNoEffect) {
  const Inputs inputs = draw_inputs();
  for (const auto& c : cases()) {
    SCOPED_TRACE(c.name);
    Inputs zeros = inputs;
    zeros.key = filled(inputs.key, c.unseen_keys, 0);
    const auto expected = attend(zeros, c.mask);
    for (const double poison : poisons) {
      Inputs poisoned = inputs;
      poisoned.key = filled(inputs.key, c.unseen_keys, poison);
      expect_same(attend(poisoned, c.mask), expected);
    }
  }
}

TEST(BlockedValuesTest, AValueBlockedForEveryQueryHasNoEffect) {
  const Inputs inputs = draw_inputs();
  for (const auto& c : cases()) {
    SCOPED_TRACE(c.name);
    Inputs zeros = inputs;
    zeros.value = filled(inputs.value, c.unseen_keys, 0);
    const auto expected = attend(zeros, c.mask);
    for (const double poison : poisons) {
      Inputs poisoned = inputs;
      poisoned.value = filled(inputs.value, c.unseen_keys, poison);
      expect_same(attend(poisoned, c.mask), expected);
    }
  }
}

TEST(BlockedValuesTest, AQueryThatMayAttendToNothingHasNoEffect) {
  const Inputs inputs = draw_inputs();
  for (const auto& c : cases()) {
    SCOPED_TRACE(c.name);
    Inputs zeros = inputs;
    zeros.query = filled(inputs.query, c.dead_queries, 0);
    const auto expected = attend(zeros, c.mask);
    for (const double poison : poisons) {
      Inputs poisoned = inputs;
      poisoned.query = filled(inputs.query, c.dead_queries, poison);
      expect_same(attend(poisoned, c.mask), expected);
    }
  }
}

TEST(BlockedValuesTest, AnAddedTermAtABlockedPairHasNoEffect) {
  const Inputs inputs = draw_inputs();
  for (const auto& c : cases()) {
    SCOPED_TRACE(c.name);
    Inputs zeros = inputs;
    zeros.added = inputs.added.masked_fill(~c.allowed, 0);
    const auto expected = attend(zeros, c.mask);
    EXPECT_TRUE(all_zero(expected.added.masked_select(~c.allowed)));
    for (const double poison : poisons) {
      Inputs poisoned = inputs;
      poisoned.added = inputs.added.masked_fill(~c.allowed, poison);
      expect_same(attend(poisoned, c.mask), expected);
    }
  }
}

// Poison at one key of one head reaches the queries that see it, and through their weights the
// gradients of the keys that those see. Everything else equals the call with zeros there.
TEST(BlockedValuesTest, NanAtAKeyOrValueReachesExactlyTheQueriesThatSeeIt) {
  const Inputs inputs = draw_inputs();
  for (const auto& c : cases()) {
    SCOPED_TRACE(c.name);
    for (int64_t j = 0; j < S; ++j) {
      auto place = at::zeros({N, H, S}, at::kBool);
      place[1][2][j] = true;
      const auto sees = c.allowed.logical_and(place.unsqueeze(2)).any(3);  // (N, H, L)
      const auto reached_keys = c.allowed.logical_and(sees.unsqueeze(3)).any(2);
      const auto keep = [](const at::Tensor& t, const at::Tensor& reached) {
        return filled(t, reached, 0);
      };
      for (const bool at_key : {true, false}) {
        Inputs zeros = inputs;
        at::Tensor& zeroed = at_key ? zeros.key : zeros.value;
        zeroed = filled(zeroed, place, 0);
        const auto expected = attend(zeros, c.mask);
        for (const double poison : poisons) {
          Inputs poisoned = inputs;
          at::Tensor& target = at_key ? poisoned.key : poisoned.value;
          target = filled(target, place, poison);
          const auto actual = attend(poisoned, c.mask);
          SCOPED_TRACE(::testing::Message() << poison << (at_key ? " key " : " value ") << j);
          EXPECT_TRUE(is_same_result(keep(actual.output, sees), keep(expected.output, sees)));
          EXPECT_TRUE(is_same_result(keep(actual.weights, sees), keep(expected.weights, sees)));
          EXPECT_TRUE(
              is_same_but_for_blas(keep(actual.query, sees), keep(expected.query, sees)));
          EXPECT_TRUE(
              is_same_but_for_blas(keep(actual.added, sees), keep(expected.added, sees)));
          EXPECT_TRUE(is_same_but_for_blas(keep(actual.key, reached_keys),
                                           keep(expected.key, reached_keys)));
          EXPECT_TRUE(is_same_but_for_blas(keep(actual.value, reached_keys),
                                           keep(expected.value, reached_keys)));
          if (!std::isnan(poison)) continue;
          EXPECT_TRUE(is_bit_equal(actual.output.isnan().any(-1), sees));
          EXPECT_TRUE(is_bit_equal(actual.output.isnan().all(-1), sees));
          if (!at_key) {
            EXPECT_TRUE(is_same_result(actual.weights, expected.weights));
          }
        }
      }
    }
  }
}

TEST(BlockedValuesTest, NanInAQueryReachesExactlyItself) {
  const Inputs inputs = draw_inputs();
  for (const auto& c : cases()) {
    SCOPED_TRACE(c.name);
    for (int64_t i = 0; i < L; ++i) {
      auto place = at::zeros({N, H, L}, at::kBool);
      place[1][0][i] = true;
      const auto alive = place.logical_and(c.dead_queries.logical_not());
      const auto reached_keys = c.allowed.logical_and(place.unsqueeze(3)).any(2);
      Inputs zeros = inputs, poisoned = inputs;
      zeros.query = filled(inputs.query, place, 0);
      poisoned.query = filled(inputs.query, place, nan);
      const auto expected = attend(zeros, c.mask), actual = attend(poisoned, c.mask);
      SCOPED_TRACE(i);
      EXPECT_TRUE(is_bit_equal(actual.output.isnan().all(-1), alive));
      EXPECT_TRUE(
          is_same_result(filled(actual.output, alive, 0), filled(expected.output, alive, 0)));
      EXPECT_TRUE(
          is_same_result(filled(actual.weights, alive, 0), filled(expected.weights, alive, 0)));
      EXPECT_TRUE(is_same_but_for_blas(filled(actual.query, alive, 0),
                                       filled(expected.query, alive, 0)));
      EXPECT_TRUE(is_same_but_for_blas(filled(actual.key, reached_keys, 0),
                                       filled(expected.key, reached_keys, 0)));
      EXPECT_TRUE(is_same_but_for_blas(filled(actual.value, reached_keys, 0),
                                       filled(expected.value, reached_keys, 0)));
    }
  }
}

TEST(BlockedValuesTest, ADeadRowGetsZeroAndGivesFiniteGradients) {
  const Inputs inputs = draw_inputs();
  for (const auto& c : cases()) {
    SCOPED_TRACE(c.name);
    const auto result = attend(inputs, c.mask);
    EXPECT_TRUE(is_bit_equal(result.weights.ne(0), c.allowed));
    EXPECT_TRUE(all_zero(result.weights.masked_select(~c.allowed)));
    const auto rows = c.dead_queries.unsqueeze(-1);
    EXPECT_TRUE(all_zero(result.output.masked_select(rows)));
    EXPECT_TRUE(all_zero(result.query.masked_select(rows)));
    EXPECT_TRUE(all_zero(result.added.masked_select(rows)));
    EXPECT_TRUE(all_zero(result.key.masked_select(c.unseen_keys.unsqueeze(-1))));
    EXPECT_TRUE(all_zero(result.value.masked_select(c.unseen_keys.unsqueeze(-1))));
    for (const auto& t :
         {result.output, result.query, result.key, result.value, result.added}) {
      EXPECT_TRUE(is_finite(t));
    }
  }
}

TEST(BlockedValuesTest, ASharedKeyAndValueReachOnlyTheHeadsThatSeeThem) {
  torch::manual_seed(24);
  const auto query = at::randn({1, 2, L, D}), key = at::randn({1, 1, S, D});
  auto blocked = at::zeros({1, 2, 1, S}, at::kBool);
  blocked[0][0][0][2] = true;
  const auto mask = Mask::block(blocked.expand({1, 2, L, S}));
  auto zeros = key.clone(), poisoned = key.clone();
  zeros[0][0][2].fill_(0);
  poisoned[0][0][2].fill_(nan);
  const auto expected = mha::scaled_dot_product_attention(query, zeros, zeros, mask);
  const auto actual = mha::scaled_dot_product_attention(query, poisoned, poisoned, mask);
  EXPECT_TRUE(is_same_result(actual.output.select(1, 0), expected.output.select(1, 0)));
  EXPECT_TRUE(is_same_result(actual.weights.select(1, 0), expected.weights.select(1, 0)));
  EXPECT_TRUE(actual.output.select(1, 1).isnan().all().item<bool>());
}

TEST(DeadRowTest, OtherRowsAreAsIfTheDeadOnesWereAbsent) {
  const auto in = draw_inputs();
  auto pairs = at::ones({L, S});
  pairs.slice(0, 0, 2).fill_(0);
  pairs[3][1] = 0;
  const auto tail = [](const at::Tensor& t) { return t.slice(t.dim() - 2, 2); };
  for (const auto& [mask, shorter] :
       {std::pair{Mask::keep(pairs), Mask::keep(tail(pairs))},
        std::pair{Mask::block(pairs.eq(0)), Mask::block(tail(pairs).eq(0))},
        std::pair{Mask::add(pairs.log()), Mask::add(tail(pairs).log())}}) {
    const auto query = leaf(in.query), key = leaf(in.key), value = leaf(in.value);
    const auto key2 = leaf(in.key), value2 = leaf(in.value), query2 = leaf(tail(in.query));
    const auto all = mha::scaled_dot_product_attention(query, key, value, mask);
    const auto alive = mha::scaled_dot_product_attention(query2, key2, value2, shorter);
    EXPECT_TRUE(is_close(tail(all.output), alive.output, 1e-6));
    EXPECT_TRUE(is_close(tail(all.weights), alive.weights, 1e-6));
    const auto upstream = at::randn({N, H, L, D});
    (all.output * upstream).sum().backward();
    (alive.output * tail(upstream)).sum().backward();
    EXPECT_TRUE(is_close(tail(query.grad()), query2.grad(), 1e-5));
    EXPECT_TRUE(is_close(key.grad(), key2.grad(), 1e-5));
    EXPECT_TRUE(is_close(value.grad(), value2.grad(), 1e-5));
  }
}

TEST(DeadRowTest, ItIsDecidedOnTheMaskAndNotOnNanInTheScores) {
  auto in = draw_inputs();
  in.query = at::full_like(in.query, nan);  // no row is dead, so every row is NaN
  EXPECT_TRUE(mha::scaled_dot_product_attention(in.query, in.key, in.value, Mask::causal())
                  .output.isnan()
                  .all()
                  .item<bool>());
}

TEST(DeadRowTest, EveryKindOfMaskAndEveryDtypeMakesTheSameDeadRow) {
  const auto nothing = at::zeros({1, 3});
  for (const Mask& mask :
       {Mask::keep(nothing), Mask::block(nothing.eq(0)), Mask::add(nothing.log()),
        Mask::keep_keys(nothing), Mask::block_keys(nothing.eq(0)),
        Mask::lengths(at::zeros({1}, at::kLong)),
        Mask::window(0, 0) & Mask::lengths(torch::tensor({2})),
        Mask::keep(torch::tensor({{1, 0, 0}})) &
            Mask::add(torch::tensor({{-infinity, 0., 0.}}))}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const auto kind : {Weights::none, Weights::averaged, Weights::per_head}) {
        const auto q = leaf(at::ones({1, 2, 1, 4}, dtype)),
                   k = leaf(at::ones({1, 2, 3, 4}, dtype));
        const auto result =
            mha::scaled_dot_product_attention(q, k, k, mask, AttentionOptions().weights(kind));
        EXPECT_TRUE(all_zero(result.output)) << mask;
        if (kind != Weights::none) {
          EXPECT_TRUE(all_zero(result.weights)) << mask;
        }
        result.output.sum().backward();
        EXPECT_TRUE(all_zero(q.grad())) << mask;
        EXPECT_TRUE(all_zero(k.grad())) << mask;
      }
    }
  }
}

TEST(DeadRowTest, ARowThatIsDeadInOneHeadCountsAsZeroInTheAverage) {
  auto pairs = at::ones({1, 2, 1, 3});
  pairs[0][1].fill_(0);
  const auto q = at::zeros({1, 2, 1, 4}), k = at::zeros({1, 2, 3, 4});
  const auto weights =
      mha::scaled_dot_product_attention(q, k, k, Mask::keep(pairs),
                                        AttentionOptions().weights(Weights::averaged))
          .weights;
  EXPECT_TRUE(is_close(weights, at::full({1, 1, 3}, 1.0 / 6), 1e-7));
}

}  // namespace
}  // namespace mha
