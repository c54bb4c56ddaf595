#include <mha/map_recorder.h>
#include <mha/relative_position_bias.h>
#include <mha/weight_file.h>

#include <limits>
#include <optional>

#include "support/support.h"
#include "wrong_calls/wrong_calls.h"

namespace mha::test {
namespace {

constexpr int64_t huge = int64_t{1} << 60;

template <typename Enum>
Enum ninth() {
  return static_cast<Enum>(9);
}

// The places that take options, and each wrong set of them.
class Table {
 public:
  explicit Table(WrongCalls& calls) : calls_(calls) {}
  void add(const std::string& name, std::function<void()> call) {
    calls_.push_back({name, std::move(call)});
  }

 private:
  WrongCalls& calls_;
};

void add_attention_options(Table& table) {
  const auto x = at::ones({1, 2, 3, 4});
  const auto attend = [&](const std::string& name, const AttentionOptions& options) {
    table.add("scaled_dot_product_attention: " + name,
              [=] { scaled_dot_product_attention(x, x, x, {}, options); });
    table.add("trace_scaled_dot_product_attention: " + name,
              [=] { trace_scaled_dot_product_attention(x, x, x, {}, options); });
    table.add("AttentionMap: " + name, [=] { AttentionMap(x, x, {}, options); });
  };
  using Options = AttentionOptions;
  attend("dropout -1", Options().dropout(-1));
  attend("dropout 1.5", Options().dropout(1.5));
  attend("dropout NaN", Options().dropout(nan));
  attend("scale NaN", Options().scale(nan));
  attend("scale inf", Options().scale(infinity));
  attend("softcap NaN", Options().softcap(nan));
  attend("softcap -1", Options().softcap(-1));
  attend("softcap 1e31", Options().softcap(1e31));
  attend("weights 9", Options().weights(ninth<Weights>()));
}

void add_module_options(Table& table) {
  using Options = MultiHeadAttentionOptions;
  const auto make = [&](const std::string& name, const Options& options) {
    table.add("MultiHeadAttentionOptions: " + name,
              [=] { MultiHeadAttention module(options); });
  };
  using Tuning = TemperatureTuning;
  const Options good(12, 4);
  for (const int64_t size : {int64_t{0}, int64_t{-1}, huge}) {
    const auto text = std::to_string(size);
    make("d_model " + text, Options(size, 4));
    make("num_heads " + text, Options(12, size));
    make("head_dim " + text, Options(good).head_dim(size));
    make("v_head_dim " + text, Options(good).v_head_dim(size));
    make("num_kv_heads " + text, Options(good).num_kv_heads(size));
    make("kdim " + text, Options(good).kdim(size));
    make("vdim " + text, Options(good).vdim(size));
  }
  make("num_heads 5", Options(12, 5));
  make("num_kv_heads 3", Options(good).num_kv_heads(3));
  make("weights beyond memory", Options(int64_t{1} << 40, 1).head_dim(int64_t{1} << 20));
  make("dropout NaN", Options(good).dropout(nan));
  make("dropout 1.5", Options(good).dropout(1.5));
  make("scale inf", Options(good).scale(infinity));
  make("softcap -1", Options(good).softcap(-1));
  make("qk_norm 9", Options(good).qk_norm(ninth<QKNorm>()));
  make("qk_norm_eps 0", Options(good).qk_norm(QKNorm::rms).qk_norm_eps(0));
  make("qk_norm_eps NaN", Options(good).qk_norm(QKNorm::rms).qk_norm_eps(nan));
  make("qk_norm_bias alone", Options(good).qk_norm_bias(true));
  make("qk_norm_bias without a gain",
       Options(good).qk_norm(QKNorm::layer).qk_norm_gain(QKNormGain::none).qk_norm_bias(true));
  make("qk_norm_scope 9", Options(good).qk_norm_scope(ninth<QKNormScope>()));
  make("qk_norm_gain 9", Options(good).qk_norm_gain(ninth<QKNormGain>()));
  make("qk_norm_gain per_head over all heads", Options(good)
                                                   .qk_norm(QKNorm::rms)
                                                   .qk_norm_scope(QKNormScope::all_heads)
                                                   .qk_norm_gain(QKNormGain::per_head));
  make("qk_norm_order 9", Options(good).qk_norm_order(ninth<QKNormOrder>()));
  make("value_scale inf", Options(good).value_scale(infinity));
  make("values beyond memory", Options(int64_t{1} << 40, 1).head_dim(1).v_head_dim(1 << 20));
  make("temperature_tuning scale NaN", Options(good).temperature_tuning(Tuning(nan, 2)));
  make("temperature_tuning floor_scale 0", Options(good).temperature_tuning(Tuning(0.1, 0)));
  make("temperature_tuning offset -1",
       Options(good).temperature_tuning(Tuning(0.1, 2).offset(-1)));
  make("output_gate 9", Options(good).output_gate(ninth<OutputGate>()));
  make("weights 9", Options(good).weights(ninth<Weights>()));
  for (const auto dtype : {at::kLong, at::kBool, at::kComplexFloat, at::kFloat8_e5m2}) {
    make(std::string("dtype ") + c10::toString(dtype), Options(good).dtype(dtype));
  }
}

void add_rotary_options(Table& table) {
  using Options = RotaryOptions;
  const auto x = at::ones({1, 1, 2, 8});
  const auto rotate = [&](const std::string& name, const Options& options) {
    table.add("RotaryOptions: " + name, [=] { apply_rotary(x, at::arange(2), options); });
    table.add("RotaryOptions of a module: " + name, [=] {
      MultiHeadAttention module(MultiHeadAttentionOptions(16, 2).rotary(options));
    });
  };
  rotate("base 1", Options().base(1));
  rotate("base NaN", Options().base(nan));
  rotate("rotary_dim 3", Options().rotary_dim(3));
  rotate("rotary_dim 10", Options().rotary_dim(10));
  rotate("rotary_dim 0", Options().rotary_dim(0));
  rotate("rotary_dim huge", Options().rotary_dim(huge));
  rotate("pairing 9", Options().pairing(ninth<RotaryPairing>()));
  rotate("linear factor 0.5", Options().scaling(LinearScaling(0.5)));
  rotate("ntk factor NaN", Options().scaling(NtkScaling(nan)));
  rotate("yarn original 0", Options().scaling(YarnScaling(2, 0)));
  rotate("yarn betas", Options().scaling(YarnScaling(2, 64).beta_slow(40)));
  rotate("yarn attention_factor 0", Options().scaling(YarnScaling(2, 64).attention_factor(0)));
  rotate("yarn mscale -1", Options().scaling(YarnScaling(2, 64).mscale(-1)));
  rotate("longrope short_factor", Options().scaling(LongRopeScaling({1}, {1, 1, 1, 1}, 64)));
  rotate("longrope long_factor 0",
         Options().scaling(LongRopeScaling({1, 1, 1, 1}, {1, 1, 1, 0}, 64)));
  rotate("longrope original 0",
         Options().scaling(LongRopeScaling({1, 1, 1, 1}, {1, 1, 1, 1}, 0)));
  rotate("frequencies of 3 pairs", Options().frequencies({1, 1, 1}));
  rotate("frequencies NaN", Options().frequencies({1, 1, 1, nan}));
  rotate("frequencies and a scaling",
         Options().frequencies({1, 1, 1, 1}).scaling(LinearScaling(2)));
  rotate("llama3 original -1", Options().scaling(Llama3Scaling(2, -1)));
  rotate("llama3 frequencies", Options().scaling(Llama3Scaling(2, 64).low_freq_factor(5)));
  table.add("rotary_frequencies: head_dim 0", [] { rotary_frequencies({}, 0); });
  table.add("rotary_frequencies: head_dim 7", [] { rotary_frequencies({}, 7); });
}

void add_cache_options(Table& table) {
  using Options = KVCacheOptions;
  const auto make = [&](const std::string& name, const Options& options) {
    table.add("KVCacheOptions: " + name, [=] { KVCache cache(options); });
  };
  for (const int64_t size : {int64_t{0}, int64_t{-1}, huge}) {
    make("capacity " + std::to_string(size), Options().capacity(size));
    make("window " + std::to_string(size), Options().window(size));
  }
  make("capacity and window", Options().capacity(8).window(4));
  for (const auto dtype : {at::kLong, at::kComplexFloat, at::kFloat8_e4m3fn}) {
    make(std::string("dtype ") + c10::toString(dtype), Options().dtype(dtype));
  }
}

void add_other_options(Table& table) {
  using Bias = RelativePositionBiasOptions;
  const auto bias = [&](const std::string& name, const Bias& options) {
    table.add("RelativePositionBiasOptions: " + name,
              [=] { RelativePositionBias module(options); });
  };
  bias("num_heads 0", Bias(0));
  bias("num_heads -1", Bias(-1));
  bias("num_heads huge", Bias(huge));
  bias("num_buckets huge", Bias(2).num_buckets(huge));
  bias("num_buckets 7", Bias(2).num_buckets(7));
  bias("num_buckets 2", Bias(2).num_buckets(2));
  bias("num_buckets 1 of one side", Bias(2).num_buckets(1).bidirectional(false));
  bias("max_distance 8", Bias(2).max_distance(8));
  table.add("MapRecorderOptions: budget_bytes -1",
            [] { MapRecorder recorder(MapRecorderOptions().budget_bytes(-1)); });
}

void add_masks(Table& table) {
  const auto nine = ninth<Mask::Alignment>();
  table.add("Mask::causal: alignment 9", [=] { Mask::causal(nine); });
  table.add("Mask::window: alignment 9", [=] { Mask::window(1, 1, nine); });
  table.add("Mask::alibi: alignment 9", [=] { Mask::alibi(at::ones({2}), nine); });
  for (const int64_t extent : {int64_t{-2}, std::numeric_limits<int64_t>::min()}) {
    const auto text = std::to_string(extent);
    table.add("Mask::window: left " + text, [=] { Mask::window(extent, 0); });
    table.add("Mask::window: right " + text, [=] { Mask::window(0, extent); });
    table.add("Mask::window: left " + text + " beside offsets",
              [=] { Mask::window(extent, 0, torch::tensor({1})); });
  }
  for (const int64_t heads : {int64_t{0}, int64_t{-1}, int64_t{1} << 40}) {
    table.add("alibi_slopes: num_heads " + std::to_string(heads), [=] { alibi_slopes(heads); });
  }
}

}  // namespace

WrongCalls wrong_options(EntrySetting&) {
  WrongCalls calls;
  Table table(calls);
  add_attention_options(table);
  add_module_options(table);
  add_rotary_options(table);
  add_cache_options(table);
  add_other_options(table);
  add_masks(table);
  return calls;
}

}  // namespace mha::test
