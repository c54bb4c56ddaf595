#include <mha/multi_head_attention.h>
#include <torch/torch.h>

#include <iostream>

// Masks of one meaning, given in different ways, must give one result.
int main() {
  torch::NoGradGuard no_grad;
  mha::MultiHeadAttention attention(64, 4);
  attention->eval();
  auto x = torch::randn({2, 5, 64});

  // Sample 0 has five real tokens, sample 1 has three; no token sees a later one.
  auto mask = mha::Mask::causal() & mha::Mask::lengths(torch::tensor({5, 3}));
  auto [output, weights] = attention->forward(x, x, x, mask);

  auto later = torch::ones({5, 5}, torch::kBool).triu(1);
  auto padding =
      torch::tensor({{false, false, false, false, false}, {false, false, false, true, true}});
  auto same =
      attention->forward(x, x, x, mha::Mask::block(later) & mha::Mask::block_keys(padding));
  std::cout << "largest difference: " << (output - same.output).abs().max().item<float>()
            << '\n';
  return torch::allclose(output, same.output) && torch::equal(weights, same.weights) ? 0 : 1;
}
