// Guards that a module moved to a device computes there what the loops of options_oracle.h do:
// random combinations of all options, masks and what a call may be given, gradients, caches,
// memories, recorders, files and conversions. Tolerances as in numerics/option_sweep_test.cpp:
// 3e-5 for results of unit scale, 2e-4 of the largest gradient, 0.06 for bfloat16 and an eighth
// of it for float16.
#include <mha/kv_cache.h>
#include <mha/map_recorder.h>
#include <mha/multi_head_attention.h>
#include <mha/relative_position_bias.h>
#include <mha/torch_conversion.h>
#include <mha/weight_file.h>

#include <algorithm>

#include "device/device_test.h"
#include "numerics/option_setting.h"
#include "support/file_support.h"
#include "support/options_oracle.h"
#include "support/random_configuration.h"
#include "support/values.h"

namespace mha::test {
namespace {

class DeviceModuleTest : public DeviceTest {};

// What a call is given, at that place.
CallOptions placed(const CallOptions& call, at::Device device) {
  auto there = call;
  there.mask(call.mask().to(device));
  if (call.positions().defined()) there.positions(call.positions().to(device));
  if (call.head_mask().defined()) there.head_mask(call.head_mask().to(device));
  return there;
}

MultiHeadAttention moved(const MultiHeadAttention& module, const Place& place) {
  MultiHeadAttention copy(std::dynamic_pointer_cast<MultiHeadAttentionImpl>(module->clone()));
  copy->to(place.dtype);
  copy->to(place.device);
  return copy;
}

Tensors gradients(MultiHeadAttention& module, const CallOptions& call, const at::Tensor& x,
                  const at::Tensor& upstream) {
  auto leaves = module->parameters();
  leaves.push_back(leaf(x));
  const auto output =
      module->attend(leaves.back(), CallOptions(call).weights(Weights::none)).output;
  return torch::autograd::grad({output}, leaves, {upstream});
}

::testing::AssertionResult is_there(const at::Tensor& tensor) {
  if (tensor.device() == test_device()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "on " << tensor.device();
}

// Compared on the CPU.
::testing::AssertionResult is_close_there(const at::Tensor& actual, const at::Tensor& expected,
                                          double tolerance) {
  if (const auto there = is_there(actual); !there) return there;
  return is_close(actual.detach().cpu(), expected, tolerance);
}

double sum_tolerance(const at::Tensor& expected) {
  return 2e-4 * std::max(1.0, expected.numel() ? expected.abs().max().item<double>() : 0);
}

TEST_F(DeviceModuleTest, EveryOptionComputesThere) {
  constexpr uint64_t settings = 60;
  const auto only = seed_from_environment();
  for (uint64_t seed = only.value_or(0); seed < only.value_or(settings - 1) + 1; ++seed) {
    const auto s = draw_option_setting(seed);
    SCOPED_TRACE(describe(s));
    MultiHeadAttention module(s.options);
    randomise_parameters(*module, seed);
    Random random(seed + 1000);
    const auto x = random.normal({s.batch, s.length, s.options.d_model()});
    const auto upstream = random.normal(x.sizes(), at::kDouble) / 8;
    const auto place = device_place(at::kFloat);
    auto there = moved(module, place);
    const auto call = placed(s.call, place.device);
    {
      const at::NoGradGuard no_grad;
      const auto expected = oracle_module(module, x, x, x, s.call);
      const auto result =
          there->attend(put(x, place), CallOptions(call).weights(Weights::per_head));
      EXPECT_TRUE(is_close_there(result.output, expected.output, 3e-5));
      EXPECT_TRUE(is_close_there(result.weights, expected.weights, 3e-5));
      const auto traced = there->trace(put(x, place), {}, {}, call);
      EXPECT_TRUE(is_close_there(traced.output, expected.output, 3e-5));
      EXPECT_TRUE(is_close_there(traced.map.dense(), expected.weights, 3e-5));
    }
    auto in_double = moved(module, reference_place());
    const auto expected = gradients(in_double, s.call, as_double(x), upstream);
    const auto found = gradients(there, call, put(x, place), put(upstream, place));
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(is_close_there(found[i], expected[i], sum_tolerance(expected[i]))) << i;
    }
  }
}

TEST_F(DeviceModuleTest, EveryDtypeComputesThere) {
  MultiHeadAttention module(MultiHeadAttentionOptions(24, 4)
                                .num_kv_heads(2)
                                .rotary(RotaryOptions())
                                .qk_norm(QKNorm::rms)
                                .output_gate(OutputGate::elementwise)
                                .sinks(true));
  randomise_parameters(*module, 1);
  const auto x = Random(2).normal({2, 7, 24});
  for (const auto dtype : device_dtypes()) {
    SCOPED_TRACE(dtype);
    const auto place = device_place(dtype);
    auto there = moved(module, place);
    auto same = moved(moved(module, {at::kCPU, dtype}), reference_place());
    const auto given = rounded(x, dtype);
    const at::NoGradGuard no_grad;
    const auto expected = same->forward(given, {}, {}, Mask::causal(), Weights::per_head);
    const auto result =
        there->forward(put(given, place), {}, {}, Mask::causal(), Weights::per_head);
    const double tolerance = dtype == at::kBFloat16 ? 0.06 : dtype == at::kHalf ? 0.0075 : 3e-5;
    EXPECT_TRUE(is_close_there(result.output, expected.output, tolerance));
    EXPECT_TRUE(is_close_there(result.weights, expected.weights, tolerance));
    EXPECT_EQ(result.output.scalar_type(), dtype);
  }
}

TEST_F(DeviceModuleTest, AModuleIsMadeMovedAndClonedThere) {
  const auto device = test_device();
  MultiHeadAttention made(MultiHeadAttentionOptions(8, 2).device(device).add_bias_kv(true));
  for (const auto& parameter : made->parameters()) {
    EXPECT_TRUE(is_there(parameter));
    EXPECT_TRUE(is_finite(parameter.cpu()));
  }
  MultiHeadAttention module(MultiHeadAttentionOptions(8, 2));
  const auto clone = std::dynamic_pointer_cast<MultiHeadAttentionImpl>(module->clone(device));
  const auto expected = module->W_q->weight.detach().clone();
  EXPECT_TRUE(is_close_there(clone->W_q->weight, expected, 0));
  module->to(device);
  EXPECT_TRUE(is_close_there(module->W_q->weight, expected, 0));
  EXPECT_EQ(module->W_q->weight.requires_grad(), true);
  module->to(at::kCPU);
  EXPECT_TRUE(is_close(module->W_q->weight, expected, 0));
}

TEST_F(DeviceModuleTest, CrossAttentionAndItsMemoryAgree) {
  MultiHeadAttention module(
      MultiHeadAttentionOptions(12, 2).kdim(10).vdim(6).add_zero_attn(true));
  randomise_parameters(*module, 3);
  Random random(4);
  const auto x = random.normal({2, 3, 12}), key = random.normal({2, 5, 10}),
             value = random.normal({2, 5, 6});
  const auto place = device_place(at::kFloat);
  auto there = moved(module, place);
  const at::NoGradGuard no_grad;
  const auto expected = oracle_module(module, x, key, value, Mask());
  const auto [output, weights] =
      there->forward(put(x, place), put(key, place), put(value, place));
  EXPECT_TRUE(is_close_there(output, expected.output, 3e-5));
  EXPECT_TRUE(is_close_there(weights, expected.weights, 3e-5));
  const auto memory = there->project_keys(put(key, place), put(value, place));
  EXPECT_TRUE(is_close_there(there->attend(put(x, place), CallOptions().memory(memory)).output,
                             expected.output, 3e-5));
  // Projected on the CPU, and moved.
  auto carried = module->project_keys(key, value);
  carried.to(place.device);
  EXPECT_TRUE(is_close_there(there->attend(put(x, place), CallOptions().memory(carried)).output,
                             expected.output, 3e-5));
}

// In chunks, of which the last ones come after the module and its cache have moved there.
TEST_F(DeviceModuleTest, ACacheMovesAlongAndGoesOn) {
  MultiHeadAttention module(MultiHeadAttentionOptions(16, 4).num_kv_heads(2).rotary(
      RotaryOptions().pairing(RotaryPairing::interleaved)));
  randomise_parameters(*module, 5);
  const auto x = Random(6).normal({3, 12, 16});
  const at::NoGradGuard no_grad;
  const auto expected = module->forward(x, {}, {}, Mask::causal(), Weights::none).output;
  for (const auto& options : {KVCacheOptions(), KVCacheOptions().capacity(12)}) {
    auto here = moved(module, {at::kCPU, at::kFloat});
    KVCache cache(options);
    auto call = CallOptions(Mask::causal()).cache(cache).weights(Weights::none);
    (void)here->attend(x.narrow(1, 0, 5), call);
    here->to(test_device());
    cache.to(test_device());
    const auto place = device_place(at::kFloat);
    for (int64_t from = 5; from < 12; from += from == 5 ? 4 : 1) {
      const int64_t count = from == 5 ? 4 : 1;
      const auto step = here->attend(put(x.narrow(1, from, count), place), call).output;
      EXPECT_TRUE(is_close_there(step, expected.narrow(1, from, count), 3e-5)) << from;
    }
    EXPECT_TRUE(is_there(cache.key()));
    EXPECT_EQ(cache.lengths()[0].item<int64_t>(), 12);
    TemporaryDirectory folder;
    cache.save(folder.file("cache.safetensors"));
    auto loaded = KVCache::load(folder.file("cache.safetensors"));
    loaded.to(test_device());
    EXPECT_TRUE(is_bit_equal(loaded.key().cpu(), cache.key().cpu()));
    EXPECT_TRUE(is_there(loaded.value()));
  }
}

TEST_F(DeviceModuleTest, CachesOfSamplesOfDifferentLengthsAgree) {
  MultiHeadAttention module(MultiHeadAttentionOptions(16, 2).rotary(RotaryOptions()));
  randomise_parameters(*module, 7);
  const auto x = Random(8).normal({2, 9, 16});
  const at::NoGradGuard no_grad;
  for (const auto& options :
       {KVCacheOptions(), KVCacheOptions().window(4), KVCacheOptions().dtype(at::kBFloat16)}) {
    Tensors results[2];
    for (const auto& place : {reference_place(), device_place(at::kFloat)}) {
      auto layer = moved(module, place);
      KVCache cache(options);
      auto call =
          CallOptions(Mask::causal() & Mask::alibi(put(alibi_slopes(2), place))).cache(cache);
      auto& found =
          results[place.device == reference_place().device && place.dtype == at::kDouble ? 0
                                                                                         : 1];
      call.new_lengths(numbers({4, 2}));
      found.push_back(layer->attend(put(x.narrow(1, 0, 4), place), call).output[0]);
      call.new_lengths({});
      auto step = layer->trace(put(x.narrow(1, 4, 2), place), {}, {}, call);
      found.push_back(step.output);
      found.push_back(step.map.dense());
      found.push_back(step.map.distance());
      cache.reorder(numbers({1, 1, 0}));
      cache.crop(5);
      cache.repeat(2);
      found.push_back(
          layer
              ->attend(put(x.narrow(1, 6, 1), place)
                           .index_select(0, put(numbers({1, 1, 1, 1, 0, 0}), place)),
                       call)
              .output);
      found.push_back(cache.clone().key());
    }
    ASSERT_EQ(results[0].size(), results[1].size());
    const double tolerance = options.dtype() ? 0.03 : 3e-5;
    for (size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(is_close_there(results[1][i], results[0][i], tolerance)) << i;
    }
  }
}

// One head off in all samples, another in one of them: NaN in what is theirs reaches nothing.
TEST_F(DeviceModuleTest, HeadsThatAreOffStayOff) {
  for (const auto& options :
       {MultiHeadAttentionOptions(24, 4), MultiHeadAttentionOptions(24, 4)
                                              .output_gate(OutputGate::elementwise)
                                              .num_kv_heads(4)}) {
    MultiHeadAttention module(options);
    randomise_parameters(*module, 9);
    {
      const at::NoGradGuard no_grad;
      module->W_v->weight.narrow(0, 6, 6).fill_(std::numeric_limits<double>::quiet_NaN());
      module->W_o->weight.narrow(1, 6, 6).fill_(std::numeric_limits<double>::infinity());
    }
    const auto factors = torch::tensor({{1.0, 0.0, 0.5, 1.0}, {1.0, 0.0, 1.0, 0.0}});
    const auto x = Random(10).normal({2, 5, 24}), upstream = Random(11).normal({2, 5, 24});
    const auto place = device_place(at::kFloat);
    auto there = moved(module, place), in_double = moved(module, reference_place());
    const auto call = CallOptions(Mask::causal()).head_mask(factors).weights(Weights::none);
    const auto expected = gradients(in_double, call, as_double(x), as_double(upstream));
    const auto found =
        gradients(there, placed(call, place.device), put(x, place), put(upstream, place));
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(is_finite(found[i].cpu())) << i;
      EXPECT_TRUE(is_close_there(found[i], expected[i], sum_tolerance(expected[i]))) << i;
    }
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(is_close_there(there->attend(put(x, place), call).output,  // a mask on the CPU
                               in_double->attend(as_double(x), call).output, 3e-5));
  }
}

// Padding of NaN in tokens, a norm and a gate beside it: no parameter's gradient sees it.
TEST_F(DeviceModuleTest, PaddingOfNanReachesNoGradient) {
  MultiHeadAttention module(MultiHeadAttentionOptions(16, 2)
                                .qk_norm(QKNorm::layer)
                                .output_gate(OutputGate::per_head));
  randomise_parameters(*module, 12);
  auto x = Random(13).normal({2, 6, 16}), zeroed = x.clone();
  x[1].narrow(0, 4, 2).fill_(std::numeric_limits<double>::quiet_NaN());
  zeroed[1].narrow(0, 4, 2).zero_();
  const auto upstream = Random(14).normal(x.sizes());
  const auto place = device_place(at::kFloat);
  auto there = moved(module, place);
  for (const auto& mask :
       {Mask::lengths(numbers({6, 4})) & Mask::query_lengths(numbers({6, 4})),
        Mask::keep(at::arange(6).lt(4).expand({2, 6, 6})) &
            Mask::real_queries(at::arange(6).lt(4)),
        Mask::documents(numbers({0, 0, 0, 0, 1, 1})) &
            Mask::keep_keys(numbers({1, 1, 1, 1, 0, 0}))}) {
    SCOPED_TRACE(mask);
    const auto call = CallOptions(mask.to(place.device)).weights(Weights::none);
    const auto found = gradients(there, call, put(x, place), put(upstream, place));
    const auto expected = gradients(there, call, put(zeroed, place), put(upstream, place));
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(is_bit_equal(found[i].cpu(), expected[i].cpu())) << i;
    }
  }
}

TEST_F(DeviceModuleTest, TrainingDropsWeightsThere) {
  MultiHeadAttention module(
      MultiHeadAttentionOptions(16, 2).dropout(0.5).weights_after_dropout(true));
  const auto place = device_place(at::kFloat);
  auto there = moved(module, place);
  const auto x = put(Random(15).normal({2, 40, 16}), place);
  torch::manual_seed(16);
  const auto dropped = there->forward(x).weights.detach().cpu().eq(0).to(at::kDouble);
  EXPECT_NEAR(dropped.mean().item<double>(), 0.5, 0.05);  // 6,400 coins
  there->eval();
  EXPECT_TRUE(
      is_close(there->forward(x).weights.detach().cpu().sum(-1), at::ones({2, 2, 40}), 1e-5));
}

TEST_F(DeviceModuleTest, ARecorderSeesMapsThere) {
  MultiHeadAttention module(MultiHeadAttentionOptions(16, 2));
  const auto place = device_place(at::kFloat);
  auto there = moved(module, place);
  MapRecorder recorder(*there);
  const auto result = there->forward(put(Random(17).normal({2, 5, 16}), place));
  ASSERT_EQ(recorder.records().size(), 1u);
  const auto dense = recorder.records()[0].map.dense();
  EXPECT_TRUE(is_close_there(dense, result.weights.detach().cpu(), 1e-6));
  EXPECT_TRUE(is_there(attention_rollout({recorder.records()[0].map})));
}

TEST_F(DeviceModuleTest, FilesConversionsAndPruningKnowTheDevice) {
  MultiHeadAttention module(MultiHeadAttentionOptions(16, 4));
  randomise_parameters(*module, 18);
  const auto place = device_place(at::kFloat);
  auto there = moved(module, place);
  const auto x = Random(19).normal({2, 5, 16});
  const at::NoGradGuard no_grad;
  const auto expected = module->forward(x).output;
  TemporaryDirectory folder;
  save(there, folder.file("layer.safetensors"));
  auto loaded = mha::load(folder.file("layer.safetensors"));
  EXPECT_TRUE(is_close(loaded->forward(x).output, expected, 3e-5));
  MultiHeadAttention target(MultiHeadAttentionOptions(16, 4).device(place.device));
  load(target, folder.file("layer.safetensors"));
  EXPECT_TRUE(is_close_there(target->forward(put(x, place)).output, expected, 3e-5));
  torch::save(there, folder.file("layer.pt"));
  MultiHeadAttention archived(MultiHeadAttentionOptions(16, 4));
  torch::load(archived, folder.file("layer.pt"), at::kCPU);
  EXPECT_TRUE(is_close(archived->forward(x).output, expected, 3e-5));

  const auto builtin = to_torch(there);
  EXPECT_TRUE(is_there(builtin->in_proj_weight));
  EXPECT_TRUE(is_close_there(from_torch(builtin)->W_k->weight, module->W_k->weight, 0));
  there->prune_heads({1, 2});
  module->prune_heads({1, 2});
  EXPECT_TRUE(
      is_close_there(there->forward(put(x, place)).output, module->forward(x).output, 3e-5));
}

TEST_F(DeviceModuleTest, ALearnedPositionBiasChoosesTheSameBucketsThere) {
  RelativePositionBias bias(RelativePositionBiasOptions(2));
  const auto here = std::dynamic_pointer_cast<RelativePositionBiasImpl>(bias->clone());
  bias->to(test_device());
  const auto expected = here->forward(300, 400).terms()[0].tensor;
  EXPECT_TRUE(is_close_there(bias->forward(300, 400).terms()[0].tensor, expected, 0));
}

}  // namespace
}  // namespace mha::test
