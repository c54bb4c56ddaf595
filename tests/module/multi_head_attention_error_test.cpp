// Guards that a wrong call or a wrong option of the module is refused with an error that names
// the argument, what was expected and what was found, and that a refused call changes nothing.
#include <mha/multi_head_attention.h>
#include <mha/torch_conversion.h>
#include <mha/weight_file.h>

#include <functional>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/expect.h"
#include "support/support.h"

namespace mha {
namespace {

using test::infinity;
using test::nan;
using test::refuses;

MultiHeadAttentionOptions options() {
  return MultiHeadAttentionOptions(12, 3);
}

::testing::AssertionResult refused_options(const MultiHeadAttentionOptions& wrong,
                                           std::initializer_list<std::string> words) {
  return refuses([&] { MultiHeadAttention module(wrong); }, words);
}

TEST(RefusedOptionsTest, SizesBelowOne) {
  for (const int64_t size : {0, -1, -12}) {
    const auto found = std::to_string(size);
    EXPECT_TRUE(refused_options(MultiHeadAttentionOptions(size, 3), {"d_model", found}));
    EXPECT_TRUE(refused_options(options().num_heads(size), {"num_heads", found}));
    EXPECT_TRUE(refused_options(options().head_dim(size), {"head_dim", found}));
    EXPECT_TRUE(refused_options(options().num_kv_heads(size), {"num_kv_heads", found}));
    EXPECT_TRUE(refused_options(options().kdim(size), {"kdim", found}));
    EXPECT_TRUE(refused_options(options().vdim(size), {"vdim", found}));
  }
}

TEST(RefusedOptionsTest, SizesWhoseProductOverflows) {
  const auto huge = std::numeric_limits<int64_t>::max() / 2;
  EXPECT_TRUE(refused_options(options().head_dim(huge), {"head_dim", std::to_string(huge)}));
  EXPECT_TRUE(
      refused_options(MultiHeadAttentionOptions(huge, 1), {"d_model", std::to_string(huge)}));
}

TEST(RefusedOptionsTest, SizesWhoseWeightsNoMemoryHolds) {
  const int64_t huge = int64_t{1} << 40;
  const auto found = std::to_string(huge);
  EXPECT_TRUE(refused_options(MultiHeadAttentionOptions(huge, 1), {"d_model", "2^44", found}));
  EXPECT_TRUE(refused_options(options().head_dim(32).kdim(huge), {"kdim", "2^44", found}));
  EXPECT_TRUE(refused_options(options().head_dim(32).vdim(huge), {"vdim", "2^44", found}));
}

TEST(RefusedOptionsTest, HeadsThatDoNotDivideTheModelUnlessTheHeadSizeIsGiven) {
  EXPECT_TRUE(refused_options(options().num_heads(5), {"num_heads", "12", "5"}));
  EXPECT_NO_THROW(MultiHeadAttention(options().num_heads(5).head_dim(4)));
}

TEST(RefusedOptionsTest, KeyHeadsThatDoNotDivideTheHeads) {
  EXPECT_TRUE(refused_options(options().num_kv_heads(2), {"num_kv_heads", "3", "2"}));
  EXPECT_TRUE(refused_options(options().num_kv_heads(6), {"num_kv_heads", "3", "6"}));
  EXPECT_NO_THROW(MultiHeadAttention(options().num_kv_heads(1)));
}

TEST(RefusedOptionsTest, DropoutThatIsNoProbability) {
  for (const auto& [p, found] :
       {std::pair{-0.25, "-0.25"}, {1.25, "1.25"}, {infinity, "inf"}}) {
    EXPECT_TRUE(refused_options(options().dropout(p), {"dropout", "[0, 1]", found}));
  }
}

TEST(RefusedOptionsTest, ASoftCapThatIsNegativeOrOutOfRange) {
  for (const double softcap : {-1.0, 1e-40, 1e40, nan}) {
    EXPECT_TRUE(refused_options(options().softcap(softcap), {"softcap", "1e-30", "1e30"}))
        << softcap;
  }
}

TEST(RefusedOptionsTest, AScaleThatIsNotFinite) {
  for (const auto& [scale, found] :
       {std::pair{nan, "nan"}, {infinity, "inf"}, {-infinity, "-inf"}}) {
    EXPECT_TRUE(refused_options(options().scale(scale), {"scale", "finite", found}));
  }
}

TEST(RefusedOptionsTest, ADtypeThatIsNotFloating) {
  for (const auto dtype : {at::kLong, at::kBool, at::kComplexFloat}) {
    EXPECT_TRUE(
        refused_options(options().dtype(dtype), {"dtype", "floating", c10::toString(dtype)}));
  }
}

// A refused call must leave the inputs, the parameters and their gradients as they were.
class RefusedCallTest : public ::testing::Test {
 protected:
  ::testing::AssertionResult refused(const at::Tensor& query, const at::Tensor& key,
                                     const at::Tensor& value,
                                     std::initializer_list<std::string> words,
                                     const Mask& mask = {}) {
    const auto versions = [&] {
      std::vector<int64_t> all;
      for (const auto& t : {query, key, value}) all.push_back(t.defined() ? t._version() : 0);
      for (const auto& t : module_->parameters()) all.push_back(t._version());
      return all;
    };
    const auto before = versions();
    const auto generator = at::detail::getDefaultCPUGenerator().get_state();
    if (auto result = refuses([&] { module_(query, key, value, mask); }, words); !result) {
      return result;
    }
    if (versions() != before) return ::testing::AssertionFailure() << "a tensor was written to";
    if (!at::equal(at::detail::getDefaultCPUGenerator().get_state(), generator)) {
      return ::testing::AssertionFailure() << "random numbers were drawn";
    }
    return ::testing::AssertionSuccess();
  }

  // kdim and vdim make the three widths differ: 12, 5 and 7.
  MultiHeadAttention module_{options().kdim(5).vdim(7).dropout(0.5)};
  at::Tensor query_ = at::randn({3, 4, 12}), key_ = at::randn({3, 6, 5}),
             value_ = at::randn({3, 6, 7});
};

TEST_F(RefusedCallTest, BatchSizesThatDiffer) {
  EXPECT_TRUE(refused(query_, key_, at::randn({2, 6, 7}), {"value", "3", "2"}));
  EXPECT_TRUE(refused(query_, at::randn({1, 6, 5}), value_, {"key", "3", "1"}));
}

TEST_F(RefusedCallTest, KeyAndValueOfDifferentLengths) {
  EXPECT_TRUE(refused(query_, key_, at::randn({3, 8, 7}), {"value", "key", "6", "8"}));
}

TEST_F(RefusedCallTest, WidthsOtherThanTheOptions) {
  EXPECT_TRUE(refused(at::randn({3, 4, 11}), key_, value_, {"query", "12", "11"}));
  EXPECT_TRUE(refused(query_, at::randn({3, 6, 12}), value_, {"key", "5", "12"}));
  EXPECT_TRUE(refused(query_, key_, at::randn({3, 6, 5}), {"value", "7", "5"}));
}

TEST_F(RefusedCallTest, DimensionsOtherThanTwoOrThree) {
  EXPECT_TRUE(refused(at::randn({12}), key_, value_, {"query", "3", "2", "1"}));
  EXPECT_TRUE(refused(query_, at::randn({1, 3, 6, 5}), value_, {"key", "3", "4"}));
  EXPECT_TRUE(refused(query_, at::randn({6, 5}), value_, {"key", "3", "[6, 5]"}));
  EXPECT_TRUE(refused(at::randn({4, 12}), key_, value_, {"key", "2", "[3, 6, 5]"}));
}

TEST_F(RefusedCallTest, DtypesOtherThanTheParameters) {
  EXPECT_TRUE(refused(query_.to(at::kDouble), key_, value_, {"query", "Float", "Double"}));
  EXPECT_TRUE(refused(query_, key_.to(at::kHalf), value_, {"key", "Float", "Half"}));
  EXPECT_TRUE(refused(query_, key_, value_.to(at::kLong), {"value", "Float", "Long"}));
}

TEST_F(RefusedCallTest, DevicesOtherThanTheParameters) {
  EXPECT_TRUE(refused(query_.to(at::kMeta), key_, value_, {"query", "cpu", "meta"}));
}

TEST_F(RefusedCallTest, UndefinedInputs) {
  EXPECT_TRUE(refused({}, key_, value_, {"query", "undefined"}));
  EXPECT_TRUE(refused(query_, key_, {}, {"value", "undefined"}));
  EXPECT_TRUE(refused(query_, {}, value_, {"key", "undefined"}));
}

TEST_F(RefusedCallTest, SelfAttentionWithOtherWidthsForKeyAndValue) {
  EXPECT_TRUE(refused(query_, {}, {}, {"key", "5", "12"}));
}

TEST_F(RefusedCallTest, AMaskOfOtherSizes) {
  EXPECT_TRUE(refused(query_, key_, value_, {"Mask::keep", "4", "6", "[4, 5]"},
                      Mask::keep(at::ones({4, 5}))));
  EXPECT_TRUE(refused(query_, key_, value_, {"Mask::lengths", "6", "9"},
                      Mask::lengths(torch::tensor({6, 9, 1}))));
}

TEST_F(RefusedCallTest, AMaskThatCountsTheAppendedKeys) {
  module_ = MultiHeadAttention(options().kdim(5).vdim(7).add_bias_kv(true));
  EXPECT_TRUE(refused(query_, key_, value_, {"Mask::keep", "6", "[4, 7]"},
                      Mask::keep(at::ones({4, 7}))));
}

// Options are public, and so are the parameters: a change that leaves them at odds is refused
// by every call.
struct Change {
  std::function<void(MultiHeadAttentionImpl&)> make;
  std::vector<std::string> words;
};

TEST(ChangedModuleTest, OptionsThatNoLongerFitTheParametersAreRefused) {
  const auto all = MultiHeadAttentionOptions(64, 8)
                       .add_bias_kv(true)
                       .sinks(true)
                       .qk_norm(QKNorm::layer)
                       .qk_norm_bias(true)
                       .output_gate(OutputGate::per_head);
  const auto x = at::randn({2, 3, 64});
  const std::vector<Change> changes{
      {[](auto& m) { m.options.num_kv_heads(4); }, {"W_k.weight", "[32, 64]", "[64, 64]"}},
      {[](auto& m) { m.options.num_kv_heads(3); }, {"num_kv_heads", "8", "3"}},
      {[](auto& m) { m.options.num_heads(0); }, {"num_heads", "0"}},
      {[](auto& m) { m.options.num_heads(4); }, {"sinks", "[4]", "[8]"}},
      {[](auto& m) { m.options.d_model(32); }, {"W_q.weight", "[32, 32]", "[64, 64]"}},
      {[](auto& m) { m.options.head_dim(16); }, {"W_q.weight", "[128, 64]", "[64, 64]"}},
      {[](auto& m) { m.options.kdim(32); }, {"W_k.weight", "[64, 32]", "[64, 64]"}},
      {[](auto& m) { m.options.vdim(32); }, {"W_v.weight", "[64, 32]", "[64, 64]"}},
      {[](auto& m) { m.options.rotary(RotaryOptions().rotary_dim(100)); },
       {"rotary_dim", "8", "100"}},
      {[](auto& m) { m.options.softcap(-3); }, {"softcap", "-3"}},
      {[](auto& m) { m.options.dropout(2); }, {"dropout", "2"}},
      {[](auto& m) { m.options.add_bias_kv(false); }, {"bias_k", "none", "[1, 1, 64]"}},
      {[](auto& m) { m.options.bias(false); }, {"W_q.bias", "none", "[64]"}},
      {[](auto& m) { m.options.output_bias(false); }, {"W_o.bias", "none", "[64]"}},
      {[](auto& m) { m.options.sinks(false); }, {"sinks", "none", "[8]"}},
      {[](auto& m) { m.options.qk_norm(QKNorm::none).qk_norm_bias(false); },
       {"q_norm", "none", "[8]"}},
      {[](auto& m) { m.options.qk_norm_bias(false); }, {"q_norm_bias", "none", "[8]"}},
      {[](auto& m) { m.options.output_gate(OutputGate::none); }, {"W_g", "none"}},
      {[](auto& m) { m.options.output_gate(OutputGate::elementwise); },
       {"W_g.weight", "[64, 64]", "[8, 64]"}},
      {[](auto& m) { m.W_q->weight.set_data(at::zeros({64, 65})); }, {"W_q.weight", "65"}},
      {[](auto& m) { m.W_k->weight.set_data(at::zeros({32, 64})); }, {"W_k.weight", "32"}},
      {[](auto& m) { m.W_o->weight.set_data(at::zeros({64, 32})); }, {"W_o.weight", "32"}},
      {[](auto& m) { m.W_v->bias.set_data(at::zeros({63})); }, {"W_v.bias", "[64]", "[63]"}},
      {[](auto& m) { m.q_norm.set_data(at::ones({4})); }, {"q_norm", "[8]", "[4]"}},
      {[](auto& m) { m.k_norm_bias.set_data(at::ones({9})); }, {"k_norm_bias", "[8]", "[9]"}},
      {[](auto& m) { m.k_norm = at::Tensor(); }, {"k_norm", "[8]", "none"}},
      {[](auto& m) { m.sinks.set_data(at::zeros({7})); }, {"sinks", "[8]", "[7]"}},
      {[](auto& m) { m.bias_v.set_data(at::zeros({64})); }, {"bias_v", "[1, 1, 64]", "[64]"}},
  };
  for (const auto& [make, words] : changes) {
    MultiHeadAttention module(all);
    make(*module);
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { module->forward(x); }, [&] { module->project_keys(x); },
             [&] { module->attend(x, CallOptions().cache(KVCache())); },
             [&] { module->prune_heads({0}); }, [&] { save(module, "unwritten"); }}) {
      for (const auto& word : words) EXPECT_TRUE(refuses(call, {word}));
    }
  }
}

TEST(ChangedModuleTest, NumbersOfHeadsThatDivideNothingAreRefusedOrPrintedAsTheyAre) {
  constexpr int64_t lowest = std::numeric_limits<int64_t>::min();
  for (const auto& [d_model, heads] : {std::pair<int64_t, int64_t>{64, 0}, {lowest, -1}}) {
    MultiHeadAttention module(MultiHeadAttentionOptions(64, 8));
    module->options.num_heads(heads).d_model(d_model);
    const auto found = std::to_string(heads);
    EXPECT_TRUE(refuses([&] { module->head_dim(); }, {"num_heads", found}));
    EXPECT_TRUE(refuses([&] { to_torch(module); }, {"expected", "found"}));
    const auto text = (std::ostringstream() << *module).str();
    EXPECT_TRUE(test::has_word(text, "num_heads=" + found)) << text;
    EXPECT_TRUE(test::has_word(text, "head_dim=none")) << text;
  }
}

TEST(ChangedModuleTest, NothingIsDrawnClonedOrConvertedFromOptionsThatNoLongerFit) {
  MultiHeadAttention module(MultiHeadAttentionOptions(64, 8));
  const auto before = module->W_q->weight.clone();
  const auto generator = at::detail::getDefaultCPUGenerator().get_state();
  for (const auto& change : std::vector<std::function<void(MultiHeadAttentionOptions&)>>{
           [](auto& o) { o.sinks(true); }, [](auto& o) { o.add_bias_kv(true); },
           [](auto& o) { o.qk_norm(QKNorm::rms); }, [](auto& o) { o.bias(false); },
           [](auto& o) { o.output_bias(false); }, [](auto& o) { o.num_heads(4).head_dim(8); },
           [](auto& o) { o.output_gate(OutputGate::per_head); }}) {
    module->options = MultiHeadAttentionOptions(64, 8);
    change(module->options);
    EXPECT_TRUE(refuses([&] { module->reset_parameters(); }, {"expected", "found"}));
    EXPECT_TRUE(refuses([&] { module->clone(); }, {"expected", "found"}));
    EXPECT_TRUE(refuses([&] { to_torch(module); }, {"expected", "found"}));
  }
  EXPECT_TRUE(test::is_bit_equal(module->W_q->weight, before));
  EXPECT_TRUE(at::equal(at::detail::getDefaultCPUGenerator().get_state(), generator));
}

TEST(ChangedModuleTest, OptionsThatSayNothingOfParametersMayChange) {
  MultiHeadAttention module(MultiHeadAttentionOptions(64, 8));
  module->eval();
  const auto x = at::randn({2, 3, 64});
  const auto before = module->forward(x).output;
  module->options.batch_first(false);
  EXPECT_TRUE(
      test::is_close(module->forward(x.transpose(0, 1)).output.transpose(0, 1), before, 1e-5));
  module->options.batch_first(true).softcap(0.5).scale(2.0).rotary(RotaryOptions());
  EXPECT_GT(test::largest_difference(module->forward(x).output, before), 1e-3);
}

}  // namespace
}  // namespace mha
