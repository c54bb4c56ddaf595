// Guards that tokens without effect have none however large they are: keys that no query sees,
// queries that see nothing and padding may overflow in a projection, a norm or a gate. Every
// result and gradient is bit-equal to that of the same call with zeros in their place. What a
// mask leaves unseen is found by the oracle's loops.
#include <mha/multi_head_attention.h>

#include <optional>
#include <string>
#include <vector>

#include "module/unseen_tokens.h"
#include "support/expect.h"
#include "support/mask_samples.h"
#include "support/oracle.h"
#include "support/values.h"

namespace mha::test {
namespace {

constexpr int64_t N = 2, H = 2, E = 16;

struct MaskCase {
  const char* name;
  int64_t queries, keys;
  Mask mask;
};

std::vector<MaskCase> mask_cases() {
  auto pairs = at::ones({N, H, 3, 5});
  pairs.select(3, 2).fill_(0);
  pairs[1][0][1].fill_(0);
  pairs[1][1][1].fill_(0);
  auto added = at::zeros({3, 5});
  added.select(1, 4).fill_(-infinity);
  added[0].fill_(-infinity);
  auto of_heads = at::zeros({1, H, 1, 5}), rows = at::ones({1, H, 3, 1});
  of_heads.select(3, 1).fill_(-infinity);
  of_heads[0][0][0][2] = -infinity;
  rows[0][0][1] = 0;
  rows.select(2, 2).fill_(0);
  const auto one_for_all = at::ones({1, 1, 3, 5}).index_fill(3, numbers({1}), 0);
  return {
      {"lengths", 3, 5, Mask::lengths(numbers({3, 0}))},
      {"keep_keys", 3, 5, Mask::keep_keys(numbers({1, 0, 1, 1, 0}))},
      {"block_keys", 3, 5,
       Mask::block_keys(numbers({0, 1, 0, 0, 0, 1, 1, 1, 1, 1}).view({N, 5}).to(at::kBool))},
      {"causal over more queries", 5, 3, Mask::causal()},
      {"causal from the first key", 3, 5, Mask::causal(Mask::Alignment::top_left)},
      {"causal from offsets", 3, 5, Mask::causal(numbers({-2, 1}))},
      {"window", 2, 7, Mask::window(1, 1)},
      {"window of holes", 4, 4, Mask::window(0, 0) & Mask::keep_keys(numbers({1, 0, 1, 1}))},
      {"window by offsets", 2, 6,
       Mask::window(1, 0, numbers({0, 3})) & Mask::lengths(numbers({6, 3}))},
      {"documents", 4, 6, Mask::documents(numbers({0, 7, 7, 2}), numbers({7, 0, 5, 7, 5, 0}))},
      {"documents with padding", 6, 6,
       Mask::documents(numbers({1, 1, 2, 2, 3, 3})) & Mask::causal() &
           Mask::keep_keys(numbers({1, 1, 0, 1, 0, 0}))},
      {"two kinds of documents", 4, 4,
       Mask::documents(numbers({0, 0, 1, 1})) &
           Mask::documents(numbers({4, 5, 4, 6}), numbers({4, 4, 5, 6})) & Mask::window(1, 2)},
      {"padded queries", 4, 4,
       Mask::real_queries(numbers({1, 1, 0, 1})) & Mask::query_lengths(numbers({4, 2})) &
           Mask::causal()},
      {"floating key padding", 3, 5,
       Mask::add_keys(at::zeros({N, 5}).index_fill(1, numbers({0, 3}), -infinity))},
      {"floating key padding of each head", 3, 5, Mask::add(of_heads.expand({N, H, 3, 5}))},
      {"rows of each head", 3, 5, Mask::keep(rows.expand({N, H, 3, 5}))},
      {"keys of all samples and lengths", 3, 5,
       Mask::keep_keys(numbers({1, 1, 0, 1, 1})) & Mask::lengths(numbers({5, 2}))},
      {"keys of all samples and offsets", 3, 5,
       Mask::add_keys(at::zeros({5}).index_fill(0, numbers({1}), -infinity)) &
           Mask::causal(numbers({-1, 2}))},
      {"lengths in bytes", 3, 5, Mask::lengths(numbers({0, 3}).to(at::kByte))},
      {"pairs", 3, 5, Mask::keep(pairs)},
      {"pairs of all heads", 3, 5, Mask::keep(one_for_all.expand({N, H, 3, 5}))},
      {"added", 3, 5, Mask::add(added)},
      {"pairs and keys", 3, 5, Mask::keep(pairs) & Mask::lengths(numbers({5, 1}))},
      {"added numbers of keys, with a gradient", 3, 5,
       Mask::add_keys(at::zeros({5}).index_fill(0, numbers({1}), -infinity).requires_grad_())},
      {"real queries", 4, 4, Mask::real_queries(numbers({1, 0, 0, 1})) & Mask::causal()},
      {"lengths of queries", 3, 5, Mask::query_lengths(numbers({2, 0})) & Mask::window(1, 1)},
      {"queries in pairs", 3, 5,
       Mask::keep(numbers({1, 0, 1}).view({3, 1}).expand({3, 5})) &
           Mask::add_keys(at::zeros({5}).index_fill(0, numbers({2}), -infinity))},
      {"table", 3, 5, Mask::alibi(at::ones({H})) & Mask::lengths(numbers({4, 0}))},
  };
}

// Which tokens have no effect, (N, T).
struct Unseen {
  Unseen(const MaskCase& c, bool appends_keys) {
    const auto allowed = dense_mask(c.mask, N, H, c.queries, c.keys, 0).allowed.ne(0).any(1);
    keys = allowed.any(1).logical_not();
    queries =
        appends_keys ? at::zeros({N, c.queries}, at::kBool) : allowed.any(2).logical_not();
  }
  at::Tensor queries, keys;
};

// A module whose gate overflows to infinity minus infinity where its input is huge.
MultiHeadAttention make(const MultiHeadAttentionOptions& options, at::ScalarType dtype) {
  torch::manual_seed(71);
  MultiHeadAttention module(MultiHeadAttentionOptions(options).dtype(dtype));
  const at::NoGradGuard no_grad;
  if (!module->W_g.is_empty()) module->W_g->weight.mul_(100);
  return module;
}

struct Results {
  at::Tensor output;
  std::vector<at::Tensor> gradients;
};

Results attend(MultiHeadAttention& module, const at::Tensor& query, const at::Tensor& key,
               const Mask& mask) {
  const auto q = leaf(query), k = leaf(key);
  const auto output = module->forward(q, k, k, mask, Weights::none).output;
  const auto upstream = at::linspace(-1, 1, output.numel()).view(output.sizes());
  std::vector<at::Tensor> inputs{q, k};
  for (const auto& parameter : module->parameters()) inputs.push_back(parameter);
  const auto loss = (output * upstream.to(output.scalar_type())).sum();
  return {output.detach(), torch::autograd::grad({loss}, inputs, {}, std::nullopt, false,
                                                 /*allow_unused=*/true)};
}

struct Huge {
  at::ScalarType dtype;
  double value;
};
const std::vector<Huge> huge_numbers{{at::kFloat, 1e20},
                                     {at::kFloat, 3e38},
                                     {at::kDouble, 1e300},
                                     {at::kHalf, 65504},
                                     {at::kBFloat16, 3e38}};

std::vector<MultiHeadAttentionOptions> option_cases() {
  const MultiHeadAttentionOptions base(E, H);
  return {MultiHeadAttentionOptions(base).qk_norm(QKNorm::layer).qk_norm_bias(true),
          MultiHeadAttentionOptions(base).qk_norm(QKNorm::rms).rotary(RotaryOptions()),
          MultiHeadAttentionOptions(base)
              .qk_norm(QKNorm::layer)
              .add_zero_attn(true)
              .num_kv_heads(1),
          MultiHeadAttentionOptions(base)
              .qk_norm(QKNorm::rms)
              .qk_norm_scope(QKNormScope::all_heads),
          MultiHeadAttentionOptions(base)
              .rotary(RotaryOptions())
              .qk_norm(QKNorm::layer)
              .qk_norm_gain(QKNormGain::per_head)
              .qk_norm_order(QKNormOrder::after_rotary)
              .v_head_dim(6)
              .value_scale(2)
              .temperature_tuning(TemperatureTuning(0.5, 2)),
          MultiHeadAttentionOptions(base).output_gate(OutputGate::elementwise),
          MultiHeadAttentionOptions(base)
              .output_gate(OutputGate::per_head)
              .rotary(RotaryOptions())};
}

TEST(UnseenTokensTest, AreFoundBehindEveryList) {
  const Sizes sizes{N, H, 4, 6};
  for (const auto& sample : mask_samples(sizes)) {
    const Unseen expected({sample.name, sizes.l, sizes.s, sample.mask}, false);
    const auto found = detail::unseen_tokens(resolve(sample.mask, sizes), at::kCPU);
    // Of shape (N or 1, T); undefined: none.
    const auto is_same = [](const at::Tensor& tokens, const at::Tensor& other) {
      return tokens.defined() ? at::equal(tokens.expand_as(other), other)
                              : !other.any().item<bool>();
    };
    EXPECT_TRUE(is_same(found.keys, expected.keys)) << sample.name;
    EXPECT_TRUE(is_same(found.queries, expected.queries)) << sample.name;
  }
}

TEST(UnseenTokensTest, AreAsGoodAsZerosInEveryResultAndGradientHoweverLarge) {
  for (const auto& [dtype, value] : huge_numbers) {
    for (const auto& options : option_cases()) {
      auto module = make(options, dtype);
      for (const auto& c : mask_cases()) {
        Random random(72);
        const auto query = random.normal({N, c.queries, E}, dtype);
        const auto key = random.normal({N, c.keys, E}, dtype);
        const Unseen unseen(c, options.add_zero_attn());
        const auto filled = [](const at::Tensor& tokens, const at::Tensor& where, double with) {
          // Of both signs, so that a projection may be infinity minus infinity.
          const auto signs = at::arange(E).remainder(2) * 2 - 1;
          return at::where(where.unsqueeze(-1), (signs * with).to(tokens.scalar_type()),
                           tokens);
        };
        const auto expected = attend(module, filled(query, unseen.queries, 0),
                                     filled(key, unseen.keys, 0), c.mask);
        const auto actual = attend(module, filled(query, unseen.queries, value),
                                   filled(key, unseen.keys, value), c.mask);
        SCOPED_TRACE(c.name);
        EXPECT_TRUE(is_same_but_for_blas(actual.output, expected.output))
            << dtype << " " << value;
        for (size_t i = 0; i < expected.gradients.size(); ++i) {
          const auto &a = actual.gradients[i], &b = expected.gradients[i];
          ASSERT_EQ(a.defined(), b.defined());
          if (!a.defined()) continue;
          EXPECT_TRUE(is_same_but_for_blas(a, b)) << i << " " << dtype << " " << value;
        }
      }
    }
  }
}

TEST(UnseenTokensTest, InAGatedModuleAQueryThatSeesNothingGivesTheBiasHoweverLargeItIs) {
  at::NoGradGuard no_grad;
  for (const auto gate : {OutputGate::per_head, OutputGate::elementwise}) {
    auto module = make(MultiHeadAttentionOptions(E, H).output_gate(gate), at::kFloat);
    torch::manual_seed(73);
    auto x = at::randn({N, 4, E});
    x[1] = (at::arange(E).remainder(2) * 2 - 1) * 3e38;
    const auto bias = module->W_o->bias.expand({4, E});
    const auto mask = Mask::lengths(numbers({4, 0}));
    EXPECT_TRUE(is_close(module->forward(x, x, x, mask).output[1], bias, 0));
    EXPECT_TRUE(
        is_close(module->attend(x, CallOptions(mask).cache(KVCache())).output[1], bias, 0));
    const auto memory = module->project_keys(at::randn({N, 4, E}));
    EXPECT_TRUE(
        is_close(module->attend(x, CallOptions(mask).memory(memory)).output[1], bias, 0));
  }
}

TEST(UnseenTokensTest, PaddingOfACachedCallReachesNoGradientHoweverLarge) {
  for (const auto& options : option_cases()) {
    auto module = make(options, at::kFloat);
    torch::manual_seed(74);
    for (auto& parameter : module->parameters()) parameter.set_requires_grad(false);
    module->W_q->weight.set_requires_grad(true);
    if (module->q_norm.defined()) module->q_norm.set_requires_grad(true);
    if (!module->W_g.is_empty()) module->W_g->weight.set_requires_grad(true);
    std::vector<at::Tensor> trained;
    for (const auto& parameter : module->parameters()) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
    const auto prompt = at::randn({N, 3, E}), x = at::randn({N, 4, E});
    const auto gradients = [&](double padding) {
      auto tokens = x.clone();
      tokens[1].slice(0, 1) = (at::arange(E).remainder(2) * 2 - 1) * padding;
      const auto call = CallOptions(Mask::causal()).cache(KVCache());
      module->attend(prompt, CallOptions(call).new_lengths(numbers({2, 3})));
      const auto output =
          module->attend(tokens, CallOptions(call).new_lengths(numbers({4, 1}))).output;
      const auto loss = output[0].square().sum() + output[1][0].square().sum();
      return torch::autograd::grad({loss}, trained);
    };
    const auto expected = gradients(0), actual = gradients(3e38);
    for (size_t i = 0; i < trained.size(); ++i) {
      EXPECT_TRUE(is_same_but_for_blas(actual[i], expected[i])) << i;
    }
  }
}

}  // namespace
}  // namespace mha::test
