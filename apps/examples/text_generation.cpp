// A tiny decoder learns one sentence and continues its beginning: once by computing the whole
// text for every token, once with a cache for each layer. Both give the same tokens.

#include <mha/multi_head_attention.h>
#include <torch/torch.h>

#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr int64_t width = 48, heads = 4, layers = 2, vocabulary = 128, longest = 96;

struct LayerImpl : torch::nn::Module {
  LayerImpl() {
    register_module("attention", attention);
    register_module("before_attention", before_attention);
    register_module("before_mlp", before_mlp);
    register_module("mlp", mlp);
  }

  at::Tensor forward(const at::Tensor& x, const mha::CallOptions& call) {
    const auto attended = x + attention->attend(before_attention(x), call).output;
    return attended + mlp->forward(before_mlp(attended));
  }

  mha::MultiHeadAttention attention{
      mha::MultiHeadAttentionOptions(width, heads).num_kv_heads(2)};
  torch::nn::LayerNorm before_attention{torch::nn::LayerNormOptions({width})};
  torch::nn::LayerNorm before_mlp{torch::nn::LayerNormOptions({width})};
  torch::nn::Sequential mlp{torch::nn::Linear(width, 4 * width), torch::nn::GELU(),
                            torch::nn::Linear(4 * width, width)};
};
TORCH_MODULE(Layer);

struct DecoderImpl : torch::nn::Module {
  DecoderImpl() {
    register_module("tokens", tokens);
    register_module("positions", positions);
    for (int64_t i = 0; i < layers; ++i) stack->push_back(Layer());
    register_module("stack", stack);
    register_module("logits", logits);
  }

  // (N, L) bytes to (N, L, vocabulary), after what the caches hold, if there are any.
  at::Tensor forward(const at::Tensor& bytes, const std::vector<mha::KVCache>& caches = {}) {
    const bool goes_on = !caches.empty() && caches[0].batch_size() > 0;
    const int64_t first = goes_on ? caches[0].next_positions()[0].item<int64_t>() : 0;
    auto x = tokens(bytes) + positions(at::arange(first, first + bytes.size(1)));
    for (size_t i = 0; i < stack->size(); ++i) {
      auto call = mha::CallOptions(mha::Mask::causal()).weights(mha::Weights::none);
      if (!caches.empty()) call.cache(caches[i]);
      x = stack->ptr<LayerImpl>(i)->forward(x, call);
    }
    return logits(x);
  }

  torch::nn::Embedding tokens{vocabulary, width}, positions{longest, width};
  torch::nn::ModuleList stack;
  torch::nn::Linear logits{width, vocabulary};
};
TORCH_MODULE(Decoder);

at::Tensor bytes_of(const std::string& text) {
  return torch::tensor(std::vector<int64_t>(text.begin(), text.end())).unsqueeze(0);
}

char likeliest(const at::Tensor& logits) {
  return static_cast<char>(logits[0][-1].argmax().item<int64_t>());
}

void learn(Decoder& decoder, const std::string& text) {
  torch::optim::Adam adam(decoder->parameters(), 5e-3);
  const auto bytes = bytes_of(text);
  const int64_t count = bytes.size(1) - 1;
  for (int step = 0; step < 120; ++step) {
    adam.zero_grad();
    const auto logits = decoder->forward(bytes.narrow(1, 0, count));
    torch::nn::functional::cross_entropy(logits[0], bytes[0].narrow(0, 1, count)).backward();
    adam.step();
  }
}

}  // namespace

int main() {
  torch::manual_seed(1);
  Decoder decoder;
  const std::string sentence = "a query asks every key, and each key answers with its value.";
  learn(decoder, sentence);
  decoder->eval();
  at::NoGradGuard no_grad;
  const size_t beginning = 8;

  std::string recomputed = sentence.substr(0, beginning);
  while (recomputed.size() < sentence.size()) {
    recomputed += likeliest(decoder->forward(bytes_of(recomputed)));
  }

  std::vector<mha::KVCache> caches(layers);  // one a layer
  std::string cached = sentence.substr(0, beginning);
  auto logits = decoder->forward(bytes_of(cached), caches);
  while (cached.size() < sentence.size()) {
    cached += likeliest(logits);
    logits = decoder->forward(bytes_of(cached.substr(cached.size() - 1)), caches);
  }

  std::cout << "recomputed: " << recomputed << "\ncached:     " << cached << '\n';
  return cached == recomputed && cached == sentence ? 0 : 1;
}
