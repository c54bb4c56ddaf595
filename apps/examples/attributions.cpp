#include <mha/map_recorder.h>
#include <mha/multi_head_attention.h>
#include <torch/torch.h>

#include <iostream>
#include <vector>

struct Classifier : torch::nn::Module {
  Classifier() {
    for (int i = 0; i < 3; ++i) layers->push_back(mha::MultiHeadAttention(256, 8));
    register_module("layers", layers);
    register_module("classes", classes);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) {
      x = x + layer->as<mha::MultiHeadAttention>()->forward(x).output;
    }
    return classes->forward(x.select(1, 0));
  }
  torch::nn::ModuleList layers;
  torch::nn::Linear classes{256, 10};
};

int main() {
  Classifier model;
  model.eval();
  auto x = torch::randn({2, 300, 256});
  const int64_t label = 7;

  mha::MapRecorder recorder(model, mha::MapRecorderOptions().gradients(true));
  model.forward(x).select(1, label).sum().backward();

  std::vector<mha::AttentionAttribution> layers;
  for (const auto& record : recorder.records()) layers.push_back(record.attribution());
  auto relevance = mha::attention_relevance(layers);  // (2, 300, 300): Chefer et al., 2021

  using mha::Attribution;
  auto heads = layers[1].sums(Attribution::relevance).by_head;         // (2, 8)
  auto gradient = layers[1].rows(Attribution::gradient, 0, 1);         // (2, 8, 1, 300)
  auto [products, keys] = layers[1].top_k(Attribution::relevance, 5);  // (2, 8, 300, 5)
  auto coarse = layers[1].pooled(Attribution::positive_relevance, 30, 30);

  std::cout << relevance.sizes() << ' ' << heads.sizes() << ' ' << gradient.sizes() << ' '
            << products.sizes() << ' ' << keys.sizes() << ' ' << coarse.sizes() << '\n';
  return relevance.ge(0).all().item<bool>() ? 0 : 1;
}
