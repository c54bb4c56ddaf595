#include <mha/multi_head_attention.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  mha::MultiHeadAttention attention(mha::MultiHeadAttentionOptions(64, 8).num_kv_heads(2));
  auto prompt = torch::randn({2, 20, 64}), token = torch::randn({2, 1, 64});
  auto encoded = torch::randn({2, 30, 64});

  at::NoGradGuard no_grad;
  mha::KVCache cache;  // of this layer
  auto call = mha::CallOptions(mha::Mask::causal()).cache(cache);
  auto [output, weights] = attention->attend(prompt, call);  // (2, 20, 64), (2, 8, 20, 20)
  auto step = attention->attend(token, call);                // weights (2, 8, 1, 21)

  mha::KVCache ragged;  // prompts of 20 and 12 tokens, the second one padded
  auto padded = mha::CallOptions(mha::Mask::causal()).cache(ragged);
  padded.new_lengths(torch::tensor({20, 12}));
  attention->attend(prompt, padded);
  ragged.save("prompt.safetensors");

  padded.new_lengths({});  // a token for each sample, at its own position 20 or 12
  auto seen = attention->trace(token, {}, {}, padded).map.entropy();  // (2, 8, 1)

  mha::KVCache memory = attention->project_keys(encoded);  // once
  auto crossed = attention->attend(token, mha::CallOptions().memory(memory)).output;
  std::cout << output.sizes() << ' ' << step.weights.sizes() << ' ' << crossed.sizes() << ' '
            << seen.sizes() << '\n';
}
