// Guards that a weight is packed again when its memory is another, even if that lies at the
// same address and differs in few numbers, and that a packed weight keeps no memory of one that
// is gone. Bit-equal to a module that packs for the first time.
#include <mha/multi_head_attention.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "support/support.h"

namespace mha::test {
namespace {

TEST(PackedWeightTest, AWeightSetToOtherMemoryAtTheSameAddressIsPackedAgain) {
  at::NoGradGuard no_grad;
  torch::manual_seed(95);
  MultiHeadAttention module(
      MultiHeadAttentionOptions(64, 4).output_gate(OutputGate::elementwise));
  const auto x = at::randn({2, 5, 64});
  for (auto layer : {module->W_q, module->W_k, module->W_v, module->W_o, module->W_g}) {
    auto& weight = layer->weight;
    std::vector<float> numbers(weight.data_ptr<float>(), weight.data_ptr<float>() + 64 * 64);
    const auto use_numbers = [&] { weight.set_data(at::from_blob(numbers.data(), {64, 64})); };
    use_numbers();
    module->forward(x);
    for (const size_t place : {1, 70, 2050}) {  // three that are not sampled
      weight.set_data(at::zeros({1}));
      numbers[place] += 1;
      use_numbers();
      const auto fresh =
          std::dynamic_pointer_cast<MultiHeadAttentionImpl>(module->clone())->forward(x).output;
      EXPECT_TRUE(is_same_result(module->forward(x).output, fresh)) << place;
    }
    weight.set_data(weight.clone());
  }
}

TEST(PackedWeightTest, AWeightThatIsGoneKeepsNoMemory) {
  at::NoGradGuard no_grad;
  MultiHeadAttention module(64, 4);
  bool freed = false;
  std::vector<float> numbers(64 * 64, 0.5F);
  module->W_q->weight.set_data(
      at::from_blob(numbers.data(), {64, 64}, [&freed](void* /*data*/) { freed = true; }));
  module->forward(at::randn({2, 5, 64}));
  module->W_q->weight.set_data(at::zeros({64, 64}));
  EXPECT_TRUE(freed);
}

}  // namespace
}  // namespace mha::test
