// Guards every gradient, first and second order, by central differences in float64: of query,
// key, value, an added mask and each parameter, over masks x options x shapes.
//
// Tolerance: with step h a central difference of a loss f is off by h^2 |f'''| / 6 from the
// expansion and by about eps |f| / h from rounding. At h = 6e-6, the cube root of eps, both are
// near 1e-10 for losses of magnitude 1 to 10, so 1e-8 leaves room and a wrong factor has none.
//
// The kernels' gradients of gradients, in float32 and bfloat16, are compared with float64's:
// 1e-4 and 0.1 of the largest are a hundred and some ten roundings of terms that cancel.
#include <mha/multi_head_attention.h>
#include <mha/scaled_dot_product_attention.h>

#include <functional>
#include <limits>
#include <vector>

#include "support/expect.h"

namespace mha {
namespace {

using test::is_close;
using test::leaf;

constexpr double step = 6e-6, tolerance = 1e-8;

at::Tensor draw(at::IntArrayRef shape) {
  return at::randn(shape, at::kDouble);
}

using Loss = std::function<at::Tensor()>;
using Leaves = std::vector<std::pair<std::string, at::Tensor>>;

// d loss / d x, an element at a time.
at::Tensor central_difference(const Loss& loss, const at::Tensor& x) {
  const auto gradient = at::zeros_like(x);
  double* const elements = x.data_ptr<double>();
  double* const slopes = gradient.data_ptr<double>();
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double at = elements[i];
    elements[i] = at + step;
    const double above = loss().item<double>();
    elements[i] = at - step;
    const double below = loss().item<double>();
    elements[i] = at;
    slopes[i] = (above - below) / (2 * step);
  }
  return gradient;
}

void expect_right_gradients(const Loss& loss, const Leaves& leaves) {
  std::vector<at::Tensor> inputs;
  for (const auto& [name, tensor] : leaves) inputs.push_back(tensor);
  const auto gradients = torch::autograd::grad({loss()}, inputs, {}, std::nullopt,
                                               /*create_graph=*/false, /*allow_unused=*/true);
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto& [name, tensor] = leaves[i];
    torch::NoGradGuard no_grad;
    const auto gradient = gradients[i].defined() ? gradients[i] : at::zeros_like(tensor);
    EXPECT_TRUE(is_close(gradient, central_difference(loss, tensor), tolerance)) << name;
  }
}

struct Sizes {
  int64_t n, h, l, s;
};
// Every kind of mask, alone and combined, with and without rows that may attend to nothing.
// `added` is a leaf that the mask adds to the scores; its gradient is checked too.
struct NamedMask {
  std::string name;
  Mask mask;
  at::Tensor added;
};
std::vector<NamedMask> masks(const Sizes& at) {
  const auto [n, h, l, s] = at;
  auto dead_row = at::ones({l, s});
  dead_row[0].fill_(0);
  const auto some = [&](at::IntArrayRef shape) { return at::rand(shape).gt(0.35); };
  const auto pairs = leaf(draw({l, s})), samples = leaf(draw({n, l, s})),
             maps = leaf(draw({n * h, l, s})), heads = leaf(draw({1, h, l, s}));
  auto infinite = draw({n, 1, l, s});
  infinite.masked_fill_(some({n, 1, l, s}), -std::numeric_limits<double>::infinity());
  const auto lengths =
      Mask::lengths(at::arange(n).remainder(s + 1));  // the first sample is empty
  return {{"everything", Mask(), {}},
          {"keep (L, S) with a dead row", Mask::keep(dead_row), {}},
          {"block (N, H, L, S)", Mask::block(some({n, h, l, s})), {}},
          {"keep (N, L, S)", Mask::keep(some({n, l, s})), {}},
          {"add (L, S)", Mask::add(pairs), pairs},
          {"add (N, L, S) and causal", Mask::add(samples) & Mask::causal(), samples},
          {"add (N*H, L, S) and lengths", Mask::add(maps) & lengths, maps},
          {"add (1, H, L, S) twice", Mask::add(heads) & Mask::add(heads), heads},
          {"add with -inf", Mask::add(infinite), {}},
          {"lengths with an empty sample", lengths, {}},
          {"block_keys", Mask::block_keys(some({n, s})), {}},
          {"causal top left", Mask::causal(Mask::Alignment::top_left), {}},
          {"window and keep_keys", Mask::window(1, 0) & Mask::keep_keys(some({s})), {}}};
}

struct NamedOptions {
  const char* name;
  MultiHeadAttentionOptions options;
  Sizes sizes;
  bool batched = true;
};
std::vector<NamedOptions> settings() {
  const MultiHeadAttentionOptions base(4, 2);
  auto all = base;
  all.bias(false).add_bias_kv(true).add_zero_attn(true).kdim(3).vdim(5).head_dim(3);
  auto dropout = base;
  dropout.dropout(0.4).weights_after_dropout(true);
  auto averaged = base;
  averaged.weights(Weights::averaged).dropout(0.3);
  return {{"default", base, {2, 2, 3, 4}},
          {"more queries than keys", base, {1, 2, 4, 2}},
          {"add_bias_kv", MultiHeadAttentionOptions(base).add_bias_kv(true), {2, 2, 2, 3}},
          {"add_zero_attn and scale",
           MultiHeadAttentionOptions(base).add_zero_attn(true).scale(1.3),
           {2, 2, 3, 2}},
          {"sequence first", MultiHeadAttentionOptions(base).batch_first(false), {3, 2, 2, 2}},
          {"everything beside bias", all, {2, 2, 2, 3}},
          {"dropout", dropout, {2, 2, 3, 3}},
          {"averaged", averaged, {2, 2, 3, 3}},
          {"soft cap and sinks",
           MultiHeadAttentionOptions(base).softcap(0.7).sinks(true),
           {2, 2, 3, 3}},
          {"unbatched", base, {1, 2, 3, 3}, false}};
}

class ModuleGradientTest : public ::testing::TestWithParam<size_t> {};

TEST_P(ModuleGradientTest, EveryInputAndParameterAgreesWithCentralDifferences) {
  for (const auto& setting : settings()) {
    const auto [n, h, l, s] = setting.sizes;
    torch::manual_seed(61);
    const auto& options = setting.options;
    MultiHeadAttention module(MultiHeadAttentionOptions(options).dtype(at::kDouble));
    const auto mask = masks(setting.sizes)[GetParam()];
    SCOPED_TRACE(setting.name + (" with " + mask.name));

    const auto input = [&, n = n](int64_t length, int64_t width) {
      if (!setting.batched) return leaf(draw({length, width}));
      return leaf(options.batch_first() ? draw({n, length, width}) : draw({length, n, width}));
    };
    Leaves leaves{{"query", input(l, 4)},
                  {"key", input(s, options.kdim().value_or(4))},
                  {"value", input(s, options.vdim().value_or(4))}};
    if (mask.added.defined()) leaves.emplace_back("added", mask.added);
    for (const auto& p : module->named_parameters()) leaves.emplace_back(p.key(), p.value());

    const auto call = [&] {
      torch::manual_seed(62);  // one pattern of dropout
      return module(leaves[0].second, leaves[1].second, leaves[2].second, mask.mask);
    };
    const auto shapes = call();
    const auto upstream = draw(shapes.output.sizes()), maps = draw(shapes.weights.sizes());
    expect_right_gradients(
        [&] {
          const auto [output, weights] = call();
          return at::Tensor((output * upstream).sum() + (weights * maps).sum());
        },
        leaves);
  }
}

constexpr size_t mask_count = 13;
INSTANTIATE_TEST_SUITE_P(Masks, ModuleGradientTest, ::testing::Range(size_t{0}, mask_count));

// query (2, 2, 2, 2), key (2, Hk, 3, 2), value (2, Hk, 3, 3) and the loss of one call.
constexpr Sizes functional_sizes{2, 2, 2, 3};
struct FunctionalCall {
  FunctionalCall(int64_t kv_heads, NamedMask mask_) : mask(std::move(mask_)) {
    leaves = {{"query", leaf(draw({2, 2, 2, 2}))},
              {"key", leaf(draw({2, kv_heads, 3, 2}))},
              {"value", leaf(draw({2, kv_heads, 3, 3}))}};
    if (mask.added.defined()) leaves.emplace_back("added", mask.added);
    upstream = draw({2, 2, 2, 3});
    maps = draw({2, 2, 2, 3});
  }
  void add_score_options() {
    leaves.emplace_back("sinks", leaf(draw({2})));
    options.softcap(0.8).sinks(leaves.back().second);
  }
  at::Tensor loss() const {
    const auto [output, weights] = mha::scaled_dot_product_attention(
        leaves[0].second, leaves[1].second, leaves[2].second, mask.mask, options);
    return (output * upstream).sum() + (weights * maps).sum();
  }
  NamedMask mask;
  AttentionOptions options;
  Leaves leaves;
  at::Tensor upstream, maps;
};

TEST(FunctionalGradientTest, GroupedHeadsAgreeWithCentralDifferences) {
  torch::manual_seed(63);
  for (const int64_t kv_heads : {1, 2}) {
    for (const auto& mask : masks(functional_sizes)) {
      SCOPED_TRACE(mask.name);
      const FunctionalCall call(kv_heads, mask);
      expect_right_gradients([&] { return call.loss(); }, call.leaves);
    }
  }
}

// The loss becomes a weighted sum of the first-order gradients, itself recorded.
Loss loss_of_gradients(const Loss& loss, const Leaves& leaves) {
  std::vector<at::Tensor> inputs, weights;
  for (const auto& [name, tensor] : leaves) {
    inputs.push_back(tensor);
    weights.push_back(draw(tensor.sizes()));
  }
  return [loss, inputs, weights] {
    torch::AutoGradMode enable(true);  // the differences call this without gradients
    const auto gradients = torch::autograd::grad({loss()}, inputs, {}, std::nullopt,
                                                 /*create_graph=*/true, /*allow_unused=*/true);
    auto sum = at::zeros({}, at::kDouble);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (gradients[i].defined()) sum = sum + (gradients[i] * weights[i]).sum();
    }
    return sum;
  };
}

TEST(SecondOrderGradientTest, TheFunctionalFormAgreesWithCentralDifferencesOfFirstOrder) {
  torch::manual_seed(64);
  for (const auto& mask : masks(functional_sizes)) {
    SCOPED_TRACE(mask.name);
    const FunctionalCall call(1, mask);
    const Loss loss = [&] { return call.loss(); };
    expect_right_gradients(loss_of_gradients(loss, call.leaves), call.leaves);
  }
}

TEST(SecondOrderGradientTest, SoftCapAndSinksAgreeWithCentralDifferencesOfFirstOrder) {
  torch::manual_seed(66);
  for (const auto& mask : masks(functional_sizes)) {
    SCOPED_TRACE(mask.name);
    FunctionalCall call(1, mask);
    call.add_score_options();
    const Loss loss = [&] { return call.loss(); };
    expect_right_gradients(loss, call.leaves);
    expect_right_gradients(loss_of_gradients(loss, call.leaves), call.leaves);
  }
}

TEST(SecondOrderGradientTest, TheModuleAgreesWithCentralDifferencesOfFirstOrder) {
  torch::manual_seed(65);
  MultiHeadAttention module(
      MultiHeadAttentionOptions(4, 2).add_bias_kv(true).dtype(at::kDouble));
  Leaves leaves{{"query", leaf(draw({2, 3, 4}))}, {"key", leaf(draw({2, 4, 4}))}};
  for (const auto& p : module->named_parameters()) leaves.emplace_back(p.key(), p.value());
  const auto upstream = draw({2, 3, 4});
  const Loss loss = [&] {
    const auto& key = leaves[1].second;
    return (module(leaves[0].second, key, key, Mask::causal()).output * upstream).sum();
  };
  expect_right_gradients(loss_of_gradients(loss, leaves), leaves);
}

// A call whose inputs are one tensor or are computed from one another, as a function of x
// (2, 2, 3, 4).
struct SharedInputs {
  const char* name;
  std::function<at::Tensor(const at::Tensor&)> output;
};
std::vector<SharedInputs> shared_inputs() {
  const auto attend = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const Mask& mask = {}, const AttentionOptions& options = {}) {
    torch::manual_seed(67);  // one pattern of dropout
    return mha::scaled_dot_product_attention(q, k, v, mask, options).output;
  };
  return {
      {"one tensor three times", [=](const at::Tensor& x) { return attend(x, x, x); }},
      {"causal, with dropout",
       [=](const at::Tensor& x) {
         return attend(x, x, x, Mask::causal(), AttentionOptions().dropout(0.3));
       }},
      {"key is value",
       [=](const at::Tensor& x) {
         const auto k = x.cos();
         return attend(x.sin(), k, k);
       }},
      {"key from query, value from key",
       [=](const at::Tensor& x) {
         const auto k = x.sin();
         return attend(x, k, k.cos());
       }},
      {"added mask from query and key",
       [=](const at::Tensor& x) {
         const auto k = x.sin();
         return attend(x, k, x, Mask::add(x.matmul(k.transpose(2, 3)).cos()) & Mask::causal());
       }},
      {"one mask added twice",
       [=](const at::Tensor& x) {
         const auto added = x.narrow(3, 0, 3);
         return attend(x, x.sin(), x.cos(), Mask::add(added) & Mask::add(added));
       }},
      {"table from query",
       [=](const at::Tensor& x) {
         return attend(x, x.sin(), x.cos(), Mask::relative(x.flatten(2)[0].narrow(1, 0, 5)));
       }},
      {"sinks from query",
       [=](const at::Tensor& x) {
         return attend(x, x.sin(), x, {},
                       AttentionOptions().softcap(2).sinks(x.mean({0, 2, 3})));
       }},
  };
}

// Gradients by x of the first, second and third order, each of a sum over the one before.
std::vector<at::Tensor> orders_of_gradients(const SharedInputs& shared, const at::Tensor& x) {
  std::vector<at::Tensor> orders;
  auto loss = shared.output(x).pow(2).sum();
  for (int order = 1; order <= 3; ++order) {
    orders.push_back(torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true)[0]);
    loss = (orders.back() * x.detach().cos()).sum();
  }
  return orders;
}

TEST(SharedInputsTest, GradientsOfEveryOrderAreThoseOfEachUse) {
  torch::manual_seed(68);
  const auto data = draw({2, 2, 3, 4});
  for (const auto& shared : shared_inputs()) {
    SCOPED_TRACE(shared.name);
    const auto in_double = leaf(data);
    const Loss loss = [&] { return shared.output(in_double).pow(2).sum(); };
    expect_right_gradients(loss, {{"x", in_double}});
    expect_right_gradients(loss_of_gradients(loss, {{"x", in_double}}), {{"x", in_double}});
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const auto x = leaf(data.to(dtype)), same = leaf(x.to(at::kDouble));
      const auto actual = orders_of_gradients(shared, x);
      const auto expected = orders_of_gradients(shared, same);
      for (size_t i = 0; i < actual.size(); ++i) {
        const double largest = expected[i].abs().max().item<double>();
        EXPECT_TRUE(
            is_close(actual[i], expected[i], (dtype == at::kFloat ? 1e-4 : 0.1) * largest))
            << dtype << ", order " << i + 1;
      }
      const auto unrecorded = torch::autograd::grad({shared.output(x).pow(2).sum()}, {x})[0];
      EXPECT_TRUE(
          is_close(actual[0], unrecorded,
                   (dtype == at::kFloat ? 1e-5 : 0.02) * unrecorded.abs().max().item<double>()))
          << dtype << ", with and without a graph";
    }
  }
}

}  // namespace
}  // namespace mha
