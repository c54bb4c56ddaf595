#include <mha/multi_head_attention.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  mha::MultiHeadAttention attention(
      mha::MultiHeadAttentionOptions(/*d_model=*/512, /*num_heads=*/8));
  auto x = torch::randn({4, 20, 512});
  auto [output, weights] = attention->forward(x, x, x);  // (4, 20, 512), (4, 8, 20, 20)

  torch::NoGradGuard no_grad;  // to infer: nothing is kept for a backward
  auto decoded = attention->forward(x, x, x, mha::Mask::causal(), mha::Weights::none).output;
  std::cout << output.sizes() << ' ' << weights.sizes() << ' ' << decoded.sizes() << '\n';
}
