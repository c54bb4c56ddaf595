// Guards that calls on device `meta`, where tensors have shapes and no numbers, give the shapes
// and dtypes of the call on the CPU: the function, its gradients, the module with its options
// and caches, maps. It is how a model's shapes are checked without its memory.
#include <mha/kv_cache.h>
#include <mha/multi_head_attention.h>

#include "device/device_test.h"
#include "support/values.h"

namespace mha::test {
namespace {

const Place meta{at::kMeta, at::kFloat}, cpu{at::kCPU, at::kFloat};

::testing::AssertionResult has_shapes_of(const Tensors& found, const Tensors& expected) {
  if (found.size() != expected.size()) return ::testing::AssertionFailure() << found.size();
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i].defined() != expected[i].defined() ||
        (found[i].defined() &&
         (!found[i].is_meta() || found[i].sizes() != expected[i].sizes() ||
          found[i].scalar_type() != expected[i].scalar_type()))) {
      return ::testing::AssertionFailure()
             << "result " << i << ": " << found[i].toString() << found[i].sizes()
             << ", expected " << expected[i].toString() << expected[i].sizes();
    }
  }
  return ::testing::AssertionSuccess();
}

TEST(MetaDeviceTest, TheFunctionHasShapes) {
  Random random(1);
  const Tensors inputs{random.normal({2, 2, 5, 8}), random.normal({2, 2, 9, 8}),
                       random.normal({2, 2, 9, 4})};
  for (const auto& [name, mask] : masks_of_every_kind(5, 9)) {
    SCOPED_TRACE(::testing::Message() << name << " " << mask);
    const auto call = [&, m = mask](const Place& place) -> Tensors {
      const auto [output, weights] = mha::scaled_dot_product_attention(
          put(inputs[0], place), put(inputs[1], place), put(inputs[2], place),
          m.to(place.device), AttentionOptions().softcap(2));
      return {output, weights};
    };
    EXPECT_TRUE(has_shapes_of(call(meta), call(cpu)));
  }
}

TEST(MetaDeviceTest, EveryMethodOfAMapHasItsShape) {
  const auto x = Random(2).normal({2, 2, 6, 8});
  for (const auto& method : map_methods()) {
    const auto call = [&](const Place& place) {
      const auto given = put(x, place);
      return method.call(
          trace_scaled_dot_product_attention(given, given, given, Mask::causal()).map);
    };
    EXPECT_TRUE(has_shapes_of(call(meta), call(cpu))) << method.name;
  }
}

TEST(MetaDeviceTest, TheModuleHasShapes) {
  const auto options = MultiHeadAttentionOptions(16, 4)
                           .num_kv_heads(2)
                           .rotary(RotaryOptions())
                           .qk_norm(QKNorm::rms)
                           .qk_norm_gain(QKNormGain::per_head)
                           .temperature_tuning(TemperatureTuning(0.1, 2))
                           .v_head_dim(6)
                           .output_gate(OutputGate::elementwise)
                           .sinks(true)
                           .add_bias_kv(true)
                           .dropout(0.1);
  const auto x = Random(3).normal({2, 6, 16});
  const auto call = [&](const Place& place) -> Tensors {
    MultiHeadAttention module(MultiHeadAttentionOptions(options).device(place.device));
    const auto given = put(x, place);
    const auto all =
        CallOptions(Mask::causal() & Mask::lengths(numbers({6, 4}).to(place.device)))
            .head_mask(put(torch::tensor({1.0, 0.0, 1.0, 2.0}), place))
            .positions(put(at::arange(6), place))
            .weights(Weights::averaged);
    const auto [output, weights] = module->attend(given, all);
    return {output, weights, module->trace(given).map.entropy()};
  };
  EXPECT_TRUE(has_shapes_of(call(meta), call(cpu)));
}

TEST(MetaDeviceTest, CachesAndMemoriesHaveShapes) {
  const auto x = Random(4).normal({2, 6, 16});
  const at::NoGradGuard no_grad;
  const auto call = [&](const Place& place) -> Tensors {
    MultiHeadAttention module(
        MultiHeadAttentionOptions(16, 4).rotary(RotaryOptions()).device(place.device));
    KVCache cache;
    const auto options = CallOptions(Mask::causal()).cache(cache);
    const auto given = put(x, place);
    (void)module->attend(given, CallOptions(options).new_lengths(numbers({6, 3})));
    const auto [output, weights] = module->attend(given.narrow(1, 0, 1), options);
    cache.repeat(2);
    const auto memory = module->project_keys(given);
    const auto crossed =
        module->attend(given.narrow(1, 0, 2), CallOptions().memory(memory)).output;
    return {output, weights, cache.key(), memory.value(), crossed};
  };
  EXPECT_TRUE(has_shapes_of(call(meta), call(cpu)));
}

TEST(MetaDeviceTest, RotationsAndPackedSequencesHaveShapes) {
  const auto x = at::empty({2, 2, 5, 8}, at::TensorOptions(at::kMeta));
  EXPECT_TRUE(apply_rotary(x, at::arange(5).to(at::kMeta), RotaryOptions()).is_meta());
  const auto packed = Mask::documents_from_lengths(numbers({0, 2, 5})).to(at::kMeta);
  EXPECT_EQ(mha::scaled_dot_product_attention(x, x, x, packed).output.sizes(), x.sizes());
}

TEST(MetaDeviceTest, TensorsWithNumbersBesideItAreNamed) {
  const auto x = at::zeros({1, 1, 2, 4}), shape = x.to(at::kMeta);
  EXPECT_TRUE(refuses([&] { mha::scaled_dot_product_attention(shape, x, shape); },
                      {"key", "meta", "cpu"}));
  EXPECT_TRUE(
      refuses([&] { mha::scaled_dot_product_attention(x, shape, x); }, {"key", "meta", "cpu"}));
  KVCache cache;
  cache.append(shape, shape);
  EXPECT_TRUE(refuses([&] { cache.to(at::kCPU); }, {"KVCache", "meta", "cpu"}));
  EXPECT_TRUE(refuses([&] { cache.append(shape, shape, numbers({1}).to(at::kMeta)); },
                      {"new_lengths", "meta"}));
}

}  // namespace
}  // namespace mha::test
