// Guards the contract's section "Numbers" for scaled_dot_product_attention: precision, strides,
// repeatability, threads, batch, second-order gradients.
//
// Precision has no tolerance of its own: the error against the float64 loops of oracle.h may be
// twice (gradients: three times) that of torch computing the same in the same dtype, plus one
// rounding of the result's largest element. Torch's way is matmul, softmax, matmul for float32
// and at::scaled_dot_product_attention, which accumulates in float32, for bfloat16 and float16.
// The error of one call is the root mean square over a tensor of some size. The largest error
// is held to the same factors, but over all calls together. float64 is not measured here, since
// the oracle's own rounding errors are of that size: the parity suite holds it to 1e-12.

#include <ATen/Parallel.h>
#include <mha/scaled_dot_product_attention.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "attention_path.h"
#include "oracle.h"
#include "support.h"
#include "torch_headers.h"

namespace mha::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// Half the distance between 1 and the next number of the dtype: the relative error of
/// rounding.
double unit_roundoff(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return 0x1p-24;
    case at::kHalf:
      return 0x1p-11;
    case at::kBFloat16:
      return 0x1p-8;
    default:
      return 0x1p-53;
  }
}

/// Output, weights and gradients of sum(output * grad_output) by input; what is not computed is
/// undefined.
struct Results {
  at::Tensor output, weights;
  at::Tensor query, key, value, added;
};

/// One call: query (N, H, L, D), key and value (N, Hk, S, .), leaves of autograd.
struct Call {
  at::Tensor query, key, value;
  Mask mask;
  at::Tensor added;  // the leaf in `mask`, or undefined
  at::Tensor grad_output;
  std::string name;

  DenseMask dense() const {
    return dense_mask(mask, query.size(0), query.size(1), query.size(2), key.size(2));
  }
  double scale() const { return 1 / std::sqrt(static_cast<double>(query.size(3))); }
};

enum class MaskKind { none, add, keep, causal, padding, window_and_add };
const std::vector<MaskKind> masked{MaskKind::add, MaskKind::keep, MaskKind::causal,
                                   MaskKind::padding, MaskKind::window_and_add};

struct Sizes {
  int64_t N, H, Hk, L, S, D, Dv;
};

/// Every query may attend to the first key at least, so that torch's answer is not NaN.
Call draw(Random& random, Sizes z, MaskKind kind, at::ScalarType dtype, double spread = 1) {
  const auto leaf = [&](at::IntArrayRef shape, double factor = 1) {
    return (random.normal(shape, at::kDouble) * factor).to(dtype).requires_grad_();
  };
  Call call;
  call.query = leaf({z.N, z.H, z.L, z.D}, spread);
  call.key = leaf({z.N, z.Hk, z.S, z.D});
  call.value = leaf({z.N, z.Hk, z.S, z.Dv});
  call.grad_output = random.normal({z.N, z.H, z.L, z.Dv}, dtype);
  const auto with_first_key = [](at::Tensor open) {
    open.select(-1, 0).fill_(true);
    return open;
  };
  switch (kind) {
    case MaskKind::none:
      break;
    case MaskKind::add:
      call.added = leaf({z.L, z.S});
      call.mask = Mask::add(call.added);
      break;
    case MaskKind::keep:
      call.mask = Mask::keep(with_first_key(random.coins({z.N, z.H, z.L, z.S}, 0.6)));
      break;
    case MaskKind::causal:
      call.mask = Mask::causal(Mask::Alignment::top_left);
      break;
    case MaskKind::padding:
      call.mask = Mask::keep_keys(with_first_key(random.coins({z.N, z.S}, 0.7)));
      break;
    case MaskKind::window_and_add: {
      call.added = leaf({z.N, z.L, z.S});
      const auto left = std::max(z.L, z.S);  // reaches the first key from everywhere
      call.mask =
          Mask::window(left, z.S / 3, Mask::Alignment::top_left) & Mask::add(call.added);
      break;
    }
  }
  std::ostringstream name;
  name << dtype << " N=" << z.N << " H=" << z.H << " Hk=" << z.Hk << " L=" << z.L
       << " S=" << z.S << " D=" << z.D << " Dv=" << z.Dv << " spread " << spread << " mask "
       << call.mask;
  call.name = name.str();
  return call;
}

void add_gradients(Results& results, const Call& call) {
  std::vector<at::Tensor> leaves{call.query, call.key, call.value};
  if (call.added.defined()) leaves.push_back(call.added);
  const auto gradients = torch::autograd::grad({results.output}, leaves, {call.grad_output});
  results.query = gradients[0];
  results.key = gradients[1];
  results.value = gradients[2];
  if (call.added.defined()) results.added = gradients[3];
}

Results run_library(const Call& call, Weights weights = Weights::per_head) {
  const auto [output, maps] = scaled_dot_product_attention(
      call.query, call.key, call.value, call.mask, AttentionOptions().weights(weights));
  Results results;
  results.output = output;
  results.weights = maps;
  add_gradients(results, call);
  return results;
}

Results run_oracle(const Call& call) {
  const auto dense = call.dense();
  Results results;
  const auto [output, weights] =
      oracle_attention(call.query, call.key, call.value, dense, call.scale());
  const auto gradients = oracle_attention_backward(call.query, call.key, call.value, dense,
                                                   call.scale(), call.grad_output, {});
  results.output = output;
  results.weights = weights;
  results.query = gradients.query;
  results.key = gradients.key;
  results.value = gradients.value;
  if (call.added.defined()) results.added = sum_to_mask_shape(gradients.added, call.added);
  return results;
}

/// The whole mask as one added tensor in the dtype of the call, connected to `call.added`.
at::Tensor torch_mask(const Call& call) {
  if (call.mask.allows_everything()) return {};
  const auto blocked = call.dense().allowed == 0;
  auto mask = at::zeros(blocked.sizes(), call.query.options().requires_grad(false));
  if (call.added.defined())
    mask = mask + (call.added.dim() == 3 ? call.added.unsqueeze(1) : call.added);
  return mask.masked_fill(blocked, -infinity);
}

/// matmul, softmax, matmul in the dtype of the call.
Results run_torch_composition(const Call& call) {
  const auto group = call.query.size(1) / call.key.size(1);
  auto scores = at::matmul(call.query, call.key.repeat_interleave(group, 1).transpose(-2, -1)) *
                call.scale();
  if (const auto mask = torch_mask(call); mask.defined()) scores = scores + mask;
  Results results;
  results.weights = at::softmax(scores, -1);
  results.output = at::matmul(results.weights, call.value.repeat_interleave(group, 1));
  add_gradients(results, call);
  return results;
}

Results run_torch_fused(const Call& call) {
  const auto group = call.query.size(1) / call.key.size(1);
  std::optional<at::Tensor> mask;
  if (auto given = torch_mask(call); given.defined()) mask = given;
  Results results;
  results.output = at::scaled_dot_product_attention(
      call.query, call.key.repeat_interleave(group, 1), call.value.repeat_interleave(group, 1),
      mask, 0.0, false, call.scale());
  add_gradients(results, call);
  return results;
}

/// Sizes on either side of vector widths and block sizes, in random combinations that the loops
/// of the oracle get through in milliseconds.
Sizes draw_sizes(Random& random) {
  const std::vector<int64_t> lengths{1,  2,  3,  7,  8,  9,  15, 16,  17,
                                     31, 32, 33, 48, 63, 64, 65, 127, 129};
  const std::vector<int64_t> head_sizes{1, 2, 3, 5, 8, 15, 16, 17, 32, 33, 64, 80};
  Sizes z{};
  do {
    z.N = random.between(1, 3);
    z.Hk = random.between(1, 3);
    z.H = z.Hk * random.between(1, 2);
    z.L = random.pick(lengths);
    z.S = random.pick(lengths);
    z.D = random.pick(head_sizes);
    z.Dv = random.chance(0.5) ? z.D : random.pick(head_sizes);
  } while (z.N * z.H * z.L * z.S * (z.D + z.Dv) > 1'500'000);
  return z;
}

double root_mean_square(const at::Tensor& tensor) {
  return tensor.detach().to(at::kDouble).square().mean().sqrt().item<double>();
}

/// The largest errors of one result over all calls, in roundings of the result.
struct LargestErrors {
  double actual = 0, peer = 0;
};

/// In fewer elements torch's error may be small by luck.
constexpr int64_t enough_elements = 256;

class PrecisionTest : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void compare(const std::string& what, const at::Tensor& actual, const at::Tensor& peer,
               const at::Tensor& exact, const Call& call) {
    ASSERT_TRUE(actual.defined() && peer.defined() && exact.defined()) << what;
    ASSERT_EQ(actual.sizes(), exact.sizes()) << what;
    const double rounding =
        unit_roundoff(call.query.scalar_type()) * exact.abs().max().item<double>();
    if (rounding == 0) {
      // A gradient that a single open key leaves at 0. What remains of dy . v - dy . output in
      // float32, terms of up to 30, is summed over up to 129 queries.
      EXPECT_TRUE(is_close(actual, exact, 5e-5)) << what << ", " << call.name;
      return;
    }
    const double error = root_mean_square(actual.detach() - exact);
    const double peer_error = root_mean_square(peer.detach() - exact);
    if (exact.numel() >= enough_elements) {
      EXPECT_LE(error, factor(what) * peer_error + rounding)
          << "error of " << what << " against float64; torch's is " << peer_error
          << ", a rounding is " << rounding << "; " << call.name;
    }
    auto& largest = largest_[what];
    largest.actual = std::max(largest.actual, largest_difference(actual, exact) / rounding);
    largest.peer = std::max(largest.peer, largest_difference(peer, exact) / rounding);
  }

  void compare_largest() const {
    for (const auto& [what, largest] : largest_)
      EXPECT_LE(largest.actual, factor(what) * largest.peer + 1)
          << "largest error of " << what << " over all calls, in roundings of the result; "
          << "torch's is " << largest.peer;
  }

 private:
  static double factor(const std::string& what) {
    return what == "output" || what == "weights" ? 2 : 3;
  }
  std::map<std::string, LargestErrors> largest_;
};

TEST_P(PrecisionTest, ErrorsAreWithinTwiceAndOfGradientsThriceThoseOfTorch) {
  const auto dtype = GetParam();
  const bool half = dtype != at::kFloat;
  Random random(2024);
  for (size_t setting = 0; setting < 120; ++setting) {
    const auto sizes = draw_sizes(random);
    const double spread = setting % 3 == 0 ? 4 : 1;  // 4: most weight on few keys
    for (const auto kind : {MaskKind::none, masked[setting % masked.size()]}) {
      const auto call = draw(random, sizes, kind, dtype, spread);
      const auto exact = run_oracle(call);
      const auto actual = run_library(call);
      const auto peer = half ? run_torch_fused(call) : run_torch_composition(call);
      EXPECT_EQ(actual.output.scalar_type(), dtype);
      EXPECT_EQ(actual.weights.scalar_type(), dtype);
      compare("output", actual.output, peer.output, exact.output, call);
      compare("value gradient", actual.value, peer.value, exact.value, call);
      compare("query gradient", actual.query, peer.query, exact.query, call);
      compare("key gradient", actual.key, peer.key, exact.key, call);
      if (call.added.defined())
        compare("mask gradient", actual.added, peer.added, exact.added, call);
      if (!half) {
        compare("weights", actual.weights, peer.weights, exact.weights, call);
      } else {
        // torch returns none in a half type. Computed in float32 and rounded once, with 1e-5 of
        // room for float32's own error at scores of up to 40.
        EXPECT_TRUE(is_close(actual.weights, exact.weights, unit_roundoff(dtype) + 1e-5))
            << call.name;
      }
      if (HasFailure()) return;
    }
  }
  compare_largest();
}

TEST_P(PrecisionTest, ASingleKeyHasWeightOneAndNoGradientButThroughItsValue) {
  Random random(1);
  const auto call = draw(random, {2, 3, 3, 9, 1, 16, 16}, MaskKind::none, GetParam());
  const auto results = run_library(call);
  EXPECT_TRUE(is_close(results.weights, at::ones({2, 3, 9, 1}), 4 * unit_roundoff(at::kFloat)));
  // What is left of dy . v - dy . output, terms of size sqrt(16), after rounding to float32.
  EXPECT_TRUE(is_close(results.query, at::zeros_like(results.query), 1e-5));
  EXPECT_TRUE(is_close(results.key, at::zeros_like(results.key), 1e-5));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, PrecisionTest,
                         ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                         [](const ::testing::TestParamInfo<at::ScalarType>& dtype) {
                           return std::string(c10::toString(dtype.param));
                         });

TEST(HalfPrecisionTest, ScoresBeyondTheRangeOfHalfStayFinite) {
  // q . k is 300 * 300 * 64 = 5.76e6 on the diagonal, 88 times what float16 can hold.
  Random random(3);
  const auto signs = random.coins({1, 2, 9, 64}, 0.5).to(at::kDouble) * 2 - 1;
  const auto q = (signs * 300).to(at::kHalf).requires_grad_();
  const auto v = random.normal({1, 2, 9, 64}, at::kHalf);
  const auto [output, weights] = mha::scaled_dot_product_attention(q, q, v);
  const auto exact = oracle_attention(q, q, v);
  EXPECT_TRUE(is_finite(output));
  EXPECT_TRUE(is_close(weights, exact.weights, 0x1p-11));
  EXPECT_TRUE(is_close(output, exact.output, 4 * 0x1p-11));
  output.sum().backward();
  EXPECT_TRUE(is_finite(q.grad()));
}

struct NamedPair {
  std::string name;
  at::Tensor actual, expected;
};
std::vector<NamedPair> gradients(const Results& actual, const Results& expected) {
  std::vector<NamedPair> pairs{{"query gradient", actual.query, expected.query},
                               {"key gradient", actual.key, expected.key},
                               {"value gradient", actual.value, expected.value}};
  if (expected.added.defined())
    pairs.push_back({"mask gradient", actual.added, expected.added});
  return pairs;
}

void expect_bit_equal_forward(const Results& actual, const Results& expected,
                              const std::string& where) {
  EXPECT_TRUE(is_bit_equal(actual.output, expected.output)) << "output, " << where;
  EXPECT_TRUE(is_bit_equal(actual.weights, expected.weights)) << "weights, " << where;
}

void expect_bit_equal(const Results& actual, const Results& expected,
                      const std::string& where) {
  expect_bit_equal_forward(actual, expected, where);
  for (const auto& pair : gradients(actual, expected))
    EXPECT_TRUE(is_bit_equal(pair.actual, pair.expected)) << pair.name << ", " << where;
}

class RepeatabilityTest : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void TearDown() override { at::set_num_threads(threads_); }

 private:
  int threads_ = at::get_num_threads();
};

TEST_P(RepeatabilityTest, TheSameCallRepeatedIsBitEqual) {
  Random random(5);
  for (const auto kind : {MaskKind::none, MaskKind::add, MaskKind::keep, MaskKind::padding}) {
    const auto call = draw(random, {2, 4, 2, 65, 70, 32, 24}, kind, GetParam());
    const auto first = run_library(call);
    for (int repeat = 0; repeat < 3; ++repeat)
      expect_bit_equal(run_library(call), first, call.name);
  }
}

TEST_P(RepeatabilityTest, AnyNumberOfThreadsGivesTheSameBits) {
  Random random(6);
  for (const Sizes sizes :
       {Sizes{2, 4, 4, 33, 33, 16, 16}, Sizes{2, 4, 4, 128, 128, 64, 64},
        Sizes{1, 2, 1, 300, 257, 64, 48}, Sizes{1, 1, 1, 1, 1000, 64, 64}}) {
    for (const auto kind : {MaskKind::none, MaskKind::add, MaskKind::keep}) {
      const auto call = draw(random, sizes, kind, GetParam());
      // The plain path multiplies by the BLAS, whose batched products in the backward sum in an
      // order that depends on the threads. There the gradients agree up to rounding.
      const bool fused =
          GetParam() == at::kFloat && !call.added.defined() && !detail::plain_is_forced();
      at::set_num_threads(1);
      const auto alone = run_library(call);
      for (const int threads : {2, 4, 8}) {
        at::set_num_threads(threads);
        const auto results = run_library(call);
        const auto where = std::to_string(threads) + " threads, " + call.name;
        expect_bit_equal_forward(results, alone, where);
        for (const auto& pair : gradients(results, alone)) {
          if (fused) {
            EXPECT_TRUE(is_bit_equal(pair.actual, pair.expected)) << pair.name << ", " << where;
          } else {
            // A half type rounds once more, and may do so the other way.
            const double roundings =
                GetParam() == at::kFloat || GetParam() == at::kDouble ? 16 : 2;
            const double tolerance = roundings * unit_roundoff(GetParam()) *
                                     pair.expected.abs().max().item<double>();
            EXPECT_TRUE(is_close(pair.actual, pair.expected, tolerance))
                << pair.name << ", " << where;
          }
        }
      }
    }
  }
}

TEST_P(RepeatabilityTest, BatchSizeAndPlaceInTheBatchChangeNoBit) {
  Random random(7);
  for (const Sizes sizes : {Sizes{5, 3, 3, 7, 7, 8, 8}, Sizes{5, 4, 4, 33, 65, 16, 24},
                            Sizes{3, 4, 4, 128, 128, 64, 64}, Sizes{6, 4, 2, 1, 129, 64, 64}}) {
    for (const auto kind : {MaskKind::none, MaskKind::padding, MaskKind::window_and_add}) {
      const auto call = draw(random, sizes, kind, GetParam());
      const auto together = run_library(call);
      for (int64_t n = 0; n < sizes.N; ++n) {
        const auto sample = [n](const at::Tensor& tensor) {
          return tensor.detach().narrow(0, n, 1).clone().requires_grad_(tensor.requires_grad());
        };
        Call single;
        single.query = sample(call.query);
        single.key = sample(call.key);
        single.value = sample(call.value);
        single.grad_output = sample(call.grad_output);
        for (const auto& term : call.mask.terms()) {
          if (term.kind == Mask::Term::Kind::keep_keys)
            single.mask = Mask::keep_keys(sample(term.tensor));
          if (term.kind == Mask::Term::Kind::window)
            single.mask = single.mask & Mask::window(term.left, term.right, term.alignment);
          if (term.kind == Mask::Term::Kind::add)
            single.mask = single.mask & Mask::add(single.added = sample(term.tensor));
        }
        const auto one = run_library(single);
        Results expected;
        expected.output = sample(together.output);
        expected.weights = sample(together.weights);
        expected.query = sample(together.query);
        expected.key = sample(together.key);
        expected.value = sample(together.value);
        if (call.added.defined()) expected.added = sample(together.added);
        expect_bit_equal(one, expected, "sample " + std::to_string(n) + " of " + call.name);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, RepeatabilityTest,
                         ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf),
                         [](const ::testing::TestParamInfo<at::ScalarType>& dtype) {
                           return std::string(c10::toString(dtype.param));
                         });

// Views whose elements do not lie where those of a contiguous tensor do.
struct View {
  std::string name;
  at::Tensor query, key, value;
};

std::vector<View> draw_views(Random& random, at::ScalarType dtype) {
  constexpr int64_t N = 3, H = 4, L = 9, D = 16;
  const auto normal = [&](at::IntArrayRef shape) { return random.normal(shape, dtype); };
  std::vector<View> views;
  views.push_back({"heads behind the sequence", normal({N, L, H, D}).transpose(1, 2),
                   normal({N, L, H, D}).transpose(1, 2), normal({N, L, H, D}).transpose(1, 2)});
  views.push_back({"head size not innermost", normal({N, H, D, L}).transpose(2, 3),
                   normal({N, H, D, L}).transpose(2, 3), normal({N, H, D, L}).transpose(2, 3)});
  const auto every_second = [&] {
    return normal({N, H, 2 * L + 1, 2 * D}).slice(2, 1, 2 * L + 1, 2).slice(3, 0, 2 * D, 2);
  };
  views.push_back({"every second element", every_second(), every_second(), every_second()});
  views.push_back({"expanded over batch and heads", normal({1, H, L, D}).expand({N, H, L, D}),
                   normal({N, 1, L, D}).expand({N, H, L, D}),
                   normal({1, 1, L, D}).expand({N, H, L, D})});
  views.push_back({"one row for all", normal({N, H, 1, D}).expand({N, H, L, D}),
                   normal({N, H, 1, 1}).expand({N, H, L, D}),
                   normal({N, H, 1, D}).expand({N, H, L, D})});
  const auto packed = normal({N, L, 3, H, D}).permute({2, 0, 3, 1, 4});
  views.push_back({"packed qkv", packed[0], packed[1], packed[2]});
  const auto same = normal({N, L, H, D}).transpose(1, 2);
  views.push_back({"one tensor three times", same, same, same});
  return views;
}

class StridesTest : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(StridesTest, ViewsGiveWhatContiguousCopiesGiveAndAreNotModified) {
  const auto dtype = GetParam();
  Random random(8);
  for (auto& view : draw_views(random, dtype)) {
    const auto L = view.query.size(2), S = view.key.size(2);
    // The mask too is a view: the transpose of a contiguous tensor.
    const auto mask_values = random.normal({S, L}, dtype).t();
    const auto run = [&](const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const at::Tensor& mask) {
      Call call;
      // A leaf of autograd may be a view of any strides.
      call.query = query.detach().requires_grad_();
      call.key = key.detach().requires_grad_();
      call.value = value.detach().requires_grad_();
      call.added = mask.detach().requires_grad_();
      call.mask = Mask::add(call.added) & Mask::causal();
      call.grad_output = at::ones_like(value).cumsum(2) / 10;
      return run_library(call);
    };
    // Where elements share memory a write through one of them would show in the others.
    const auto copy = [](const at::Tensor& tensor) {
      return tensor.clone(at::MemoryFormat::Contiguous);
    };
    const auto query = copy(view.query), key = copy(view.key), value = copy(view.value),
               mask = copy(mask_values);
    const auto expected = run(query, key, value, mask);
    const auto actual = run(view.query, view.key, view.value, mask_values);
    expect_bit_equal(actual, expected, view.name);
    EXPECT_TRUE(is_bit_equal(view.query, query)) << view.name;
    EXPECT_TRUE(is_bit_equal(view.key, key)) << view.name;
    EXPECT_TRUE(is_bit_equal(view.value, value)) << view.name;
    EXPECT_TRUE(is_bit_equal(mask_values, mask)) << view.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, StridesTest,
                         ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf),
                         [](const ::testing::TestParamInfo<at::ScalarType>& dtype) {
                           return std::string(c10::toString(dtype.param));
                         });

TEST(InputsTest, NoCallModifiesItsInputsWhateverTheMaskAndTheWeights) {
  Random random(9);
  for (const auto kind : {MaskKind::none, MaskKind::add, MaskKind::keep, MaskKind::causal,
                          MaskKind::padding, MaskKind::window_and_add}) {
    for (const auto weights : {Weights::none, Weights::averaged, Weights::per_head}) {
      const auto call = draw(random, {2, 4, 2, 5, 7, 8, 3}, kind, at::kFloat);
      std::vector<at::Tensor> inputs{call.query, call.key, call.value, call.grad_output};
      for (const auto& term : call.mask.terms())
        if (term.tensor.defined()) inputs.push_back(term.tensor);
      std::vector<at::Tensor> copies;
      for (const auto& input : inputs) copies.push_back(input.detach().clone());
      run_library(call, weights);
      for (size_t i = 0; i < inputs.size(); ++i)
        EXPECT_TRUE(is_bit_equal(inputs[i], copies[i])) << "tensor " << i << ", " << call.name;
    }
  }
}

TEST(SecondOrderTest, GradientsOfGradientsAreTheDerivativesOfTheOraclesGradients) {
  // g(t) = sum(gradients(x + t direction) * probe); its derivative at 0 is taken by autograd's
  // double backward and by central differences of the oracle's analytic gradients. The step's
  // cube and rounding over the step both come to 1e-10.
  constexpr double step = 1e-5;
  Random random(10);
  for (const auto kind : {MaskKind::none, MaskKind::add, MaskKind::keep, MaskKind::causal,
                          MaskKind::padding, MaskKind::window_and_add}) {
    const auto call = draw(random, {2, 4, 2, 5, 7, 8, 3}, kind, at::kDouble);
    const std::vector<at::Tensor> inputs{call.query, call.key, call.value};
    std::vector<at::Tensor> directions, probes;
    for (const auto& input : inputs) {
      directions.push_back(random.normal(input.sizes(), at::kDouble));
      probes.push_back(random.normal(input.sizes(), at::kDouble));
    }

    const auto output =
        mha::scaled_dot_product_attention(call.query, call.key, call.value, call.mask).output;
    const auto gradients = torch::autograd::grad({output}, inputs, {call.grad_output}, true,
                                                 /*create_graph=*/true);
    auto g = at::zeros({}, at::kDouble);
    for (size_t i = 0; i < inputs.size(); ++i) g = g + (gradients[i] * probes[i]).sum();
    const auto second = torch::autograd::grad({g}, inputs);
    double actual = 0;
    for (size_t i = 0; i < inputs.size(); ++i)
      actual += (second[i] * directions[i]).sum().item<double>();

    const auto g_at = [&](double t) {
      const auto at_t = oracle_attention_backward(
          call.query.detach() + t * directions[0], call.key.detach() + t * directions[1],
          call.value.detach() + t * directions[2], call.dense(), call.scale(), call.grad_output,
          {});
      return ((at_t.query * probes[0]).sum() + (at_t.key * probes[1]).sum() +
              (at_t.value * probes[2]).sum())
          .item<double>();
    };
    const double expected = (g_at(step) - g_at(-step)) / (2 * step);
    EXPECT_NEAR(actual, expected, 1e-7 * std::max(1.0, std::abs(expected))) << call.name;
  }
}

}  // namespace
}  // namespace mha::test
