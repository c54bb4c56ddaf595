#include <mha/map_recorder.h>
#include <mha/multi_head_attention.h>
#include <torch/torch.h>

#include <iostream>
#include <vector>

struct Encoder : torch::nn::Module {
  Encoder() {
    for (int i = 0; i < 3; ++i) layers->push_back(mha::MultiHeadAttention(256, 8));
    register_module("layers", layers);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) {
      x = x + layer->as<mha::MultiHeadAttention>()->forward(x).output;
    }
    return x;
  }
  torch::nn::ModuleList layers;
};

int main() {
  torch::NoGradGuard no_grad;
  mha::MultiHeadAttention attention(256, 8);
  auto x = torch::randn({2, 1000, 256});

  auto [output, map] = attention->trace(x, x, x, mha::Mask::causal());
  auto last = map.block(/*h=*/3, {999, 1000}, {0, 1000});  // (2, 1, 1000): what one token sees
  auto entropy = map.entropy();         // (2, 8, 1000): how spread each row is, in nats
  auto [weights, keys] = map.top_k(5);  // (2, 8, 1000, 5): largest weights, and their keys
  auto coarse = map.pooled(100, 100);   // (2, 8, 100, 100): rows still sum to 1

  Encoder model;
  mha::MapRecorder recorder(model);
  model.forward(x);                                       // knows nothing of the recorder
  auto far = recorder.maps("layers.2").at(0).distance();  // (2, 8): how far each head looks

  std::vector<mha::AttentionMap> layers;
  for (const auto& record : recorder.records()) layers.push_back(record.map);
  auto rollout = mha::attention_rollout(layers);  // (2, 1000, 1000)

  std::cout << last.sizes() << ' ' << entropy.sizes() << ' ' << weights.sizes() << ' '
            << keys.sizes() << ' ' << coarse.sizes() << ' ' << far.sizes() << '\n';
  return torch::allclose(rollout.sum(-1), torch::ones({2, 1000})) ? 0 : 1;
}
