// Guards how often the host waits for a device: not at all in a call whose mask is none, a
// band, flags, added terms or documents, forward and backward, with or without weights,
// whatever the options; once for numbers that are checked before they are used (lengths and
// cumulative lengths), and for the seed of a dropout that runs in blocks. Counted on the
// pretend device, which names what was read.
#include <mha/kv_cache.h>
#include <mha/multi_head_attention.h>
#include <mha/relative_position_bias.h>

#include "attention/plain_attention.h"
#include "attention/plain_blocks.h"
#include "device/device_test.h"
#include "support/pretend_device.h"
#include "support/values.h"

namespace mha::test {
namespace {

using Names = std::vector<std::string>;

class HostTrafficTest : public DeviceTest {
 protected:
  void SetUp() override {
    if (!is_pretend()) GTEST_SKIP() << "reads are counted on the pretend device alone";
  }
};

Names reads_of(const std::function<void()>& call) {
  return traffic_of(call).reads;
}

at::Tensor there(const at::Tensor& tensor) {
  return put(tensor, device_place(at::kFloat));
}

// How often a call under this mask may read.
size_t reads_allowed(const Mask& mask) {
  size_t count = 0;
  for (const auto& term : mask.terms()) {
    using Kind = Mask::Term::Kind;
    count += term.kind == Kind::lengths || term.kind == Kind::query_lengths ||
             term.kind == Kind::document_lengths;
  }
  return count;
}

TEST_F(HostTrafficTest, TheFunctionReadsNothingButLengths) {
  Random random(1);
  const auto query = there(random.normal({2, 2, 5, 8})),
             key = there(random.normal({2, 2, 9, 8}));
  for (const auto& [name, mask] : masks_of_every_kind(5, 9)) {
    const auto placed = mask.to(test_device());
    for (const bool records : {false, true}) {
      SCOPED_TRACE(::testing::Message() << name << " " << mask << " records " << records);
      const auto reads = reads_of([&, m = placed] {
        const at::AutoGradMode mode(records);
        const auto q = leaf(query), k = leaf(key), v = leaf(key);
        const auto result = mha::scaled_dot_product_attention(q, k, v, m);
        if (records) (result.output.sum() + result.weights.square().sum()).backward();
      });
      EXPECT_EQ(reads, Names(reads_allowed(mask), "copy to the CPU"));
    }
  }
}

TEST_F(HostTrafficTest, ConstructorsOfMasksReadAtMostOnce) {
  const auto flags = there(at::ones({4}, at::kLong)), table = there(at::ones({2, 8}));
  EXPECT_EQ(reads_of([&] { Mask::keep_keys(flags); }), Names{"item"});  // may be negative
  EXPECT_EQ(reads_of([&] { Mask::relative(table); }), Names{"item"});   // may be -inf
  EXPECT_EQ(reads_of([&] { Mask::keep_keys(flags.to(at::kBool)); }), Names{});
  EXPECT_EQ(reads_of([&] { Mask::add(table); }), Names{});
  const auto cumulative = there(numbers({0, 2, 5}));
  const auto query = there(at::ones({1, 1, 5, 4}));
  EXPECT_EQ(reads_of([&] {
              mha::scaled_dot_product_attention(query, query, query,
                                                Mask::documents_from_lengths(cumulative));
            }),
            Names{"copy to the CPU"});
}

TEST_F(HostTrafficTest, BlocksReadNothing) {
  Random random(2);
  const auto query = there(random.normal({2, 2, 6, 8}));
  for (const auto& mask : {Mask(), Mask::causal(), Mask::keep(there(at::ones({6, 6}).gt(0)))}) {
    const auto resolved =
        detail::resolve(mask, {{}, 2, 2, 6, 6, {}, at::kFloat}, test_device());
    EXPECT_EQ(reads_of([&] {
                const auto leaves = leaf(query);
                const auto result = detail::plain_attention_in_blocks(
                    leaves, leaves, leaves, resolved, {{0.3}, Weights::per_head}, {1, 1, 2});
                (result.output.sum() + result.weights.square().sum()).backward();
              }),
              Names{});
  }
}

struct ModuleCase {
  const char* name;
  MultiHeadAttentionOptions options;
  Mask mask;
};

std::vector<ModuleCase> module_cases() {
  const auto base = [] { return MultiHeadAttentionOptions(16, 4); };
  const auto padding = Mask::keep_keys(at::ones({2, 6}).gt(0).to(test_device()));
  return {{"plain", base(), {}},
          {"causal", base(), Mask::causal()},
          {"padding", base(), padding},
          {"padding beside a gate and norms",
           base().output_gate(OutputGate::elementwise).qk_norm(QKNorm::rms), padding},
          {"pairs", base(), Mask::keep(at::ones({6, 6}).tril().gt(0).to(test_device()))},
          {"documents", base(), Mask::documents(there(numbers({0, 0, 0, 1, 1, 2})))},
          {"norms over all heads after a rotation, tuned",
           base()
               .rotary(RotaryOptions())
               .qk_norm(QKNorm::rms)
               .qk_norm_scope(QKNormScope::all_heads)
               .qk_norm_order(QKNormOrder::after_rotary)
               .temperature_tuning(TemperatureTuning(0.1, 2))
               .v_head_dim(6)
               .value_scale(0.5),
           Mask::causal()},
          {"all options",
           base()
               .num_kv_heads(2)
               .rotary(RotaryOptions())
               .qk_norm(QKNorm::layer)
               .output_gate(OutputGate::per_head)
               .sinks(true)
               .softcap(5)
               .add_bias_kv(true)
               .add_zero_attn(true),
           Mask::causal()}};
}

TEST_F(HostTrafficTest, TheModuleReadsNothing) {
  const auto x = there(Random(3).normal({2, 6, 16}));
  const auto head_mask = there(torch::tensor({1.0, 0.0, 0.5, 1.0}));
  for (const auto& c : module_cases()) {
    MultiHeadAttention module(c.options);
    module->to(test_device());
    for (const bool records : {false, true}) {
      for (const auto weights : {Weights::none, Weights::per_head}) {
        SCOPED_TRACE(::testing::Message() << c.name << " " << records << " " << weights);
        const auto attend = [&](const CallOptions& call) {
          return reads_of([&] {
            const at::AutoGradMode mode(records);
            const auto output = module->attend(x, call).output;
            if (records) output.sum().backward();
          });
        };
        const auto call = CallOptions(c.mask).weights(weights);
        EXPECT_EQ(attend(call), Names{});
        EXPECT_EQ(attend(CallOptions(call).head_mask(head_mask)), Names{}) << "head mask";
      }
    }
    EXPECT_EQ(reads_of([&] {
                const auto map = module->trace(x, {}, {}, c.mask).map;
                for (const auto& method : map_methods()) (void)method.call(map);
              }),
              Names{})
        << c.name;
  }
}

TEST_F(HostTrafficTest, DecodingReadsNothing) {
  MultiHeadAttention module(MultiHeadAttentionOptions(16, 4).rotary(RotaryOptions()));
  module->to(test_device());
  const auto x = there(Random(4).normal({2, 6, 16})),
             token = there(Random(5).normal({2, 1, 16}));
  const at::NoGradGuard no_grad;
  KVCache even, ragged;
  const auto step = [&](KVCache& cache, const at::Tensor& tokens) {
    return reads_of(
        [&] { (void)module->attend(tokens, CallOptions(Mask::causal()).cache(cache)); });
  };
  EXPECT_EQ(step(even, x), Names{});
  EXPECT_EQ(step(even, token), Names{});
  auto call = CallOptions(Mask::causal()).cache(ragged);
  EXPECT_EQ(reads_of([&] {  // lengths that the host has
              (void)module->attend(x, CallOptions(call).new_lengths(numbers({6, 3})));
            }),
            Names{});
  EXPECT_EQ(step(ragged, token), Names{});
  EXPECT_EQ(reads_of([&] {  // and that the device has
              (void)module->attend(x, CallOptions(call).new_lengths(there(numbers({6, 3}))));
            }),
            Names{"copy to the CPU"});
  EXPECT_EQ(reads_of([&] { even.reorder(numbers({1, 0})); }), Names{});
  const auto memory = module->project_keys(x);
  EXPECT_EQ(reads_of([&] { (void)module->attend(token, CallOptions().memory(memory)); }),
            Names{});
}

TEST_F(HostTrafficTest, DropoutReadsTheSeedOfItsBlocksAlone) {
  const auto query = there(Random(6).normal({1, 2, 6, 8}));
  const auto resolved = detail::resolve({}, {{}, 1, 2, 6, 6, {}, at::kFloat}, test_device());
  const detail::AttentionCall call{{0.3}, Weights::none, false, 0.5};
  const auto attend = [&](const detail::BlockSizes& sizes) {
    return reads_of([&] {
      (void)detail::plain_attention_in_blocks(query, query, query, resolved, call, sizes);
    });
  };
  EXPECT_EQ(attend({1, 2, 6}), Names{});
  EXPECT_EQ(attend({1, 1, 2}), Names{"item"});
}

// What keeps NaN behind a mask without asking for it takes what its comments say: values once
// more and the mask in bfloat16, and with gradients query and key once more. No tensor of all
// pairs.
TEST_F(HostTrafficTest, KeepingNanAwayTakesNoTensorOfPairs) {
  constexpr int64_t h = 8, l = 256, d = 8;
  const auto query = there(Random(7).normal({1, h, l, d}));
  const auto mask =
      detail::resolve(Mask::causal(), {{}, 1, h, l, l, {}, at::kFloat}, test_device());
  const auto peak_if = [&](bool finite, bool records) {
    const at::AutoGradMode mode(records);
    const auto leaves = leaf(query);
    detail::PlainPart part;
    part.finite = finite;
    return device_peak_of([&] {
      const auto result =
          detail::plain_part(leaves, leaves, leaves, mask, {{0.3}, Weights::none}, part);
      if (records) result.output.sum().backward();
    });
  };
  constexpr int64_t tokens = h * l * d * 4, pairs = h * l * l * 4;
  for (const bool records : {false, true}) {
    const int64_t known = peak_if(true, records), unknown = peak_if(false, records);
    // Copies of the three, their marks and sums, and the mask of one head at two bytes.
    EXPECT_LE(unknown, known + 8 * tokens + l * l * 4) << "records " << records;
    EXPECT_LT(8 * tokens + l * l * 4, pairs / 2);
  }
}

}  // namespace
}  // namespace mha::test
