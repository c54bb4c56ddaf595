#include <mha/torch_conversion.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  torch::nn::MultiheadAttention builtin(torch::nn::MultiheadAttentionOptions(64, 4));
  auto attention = mha::from_torch(builtin);  // same weights, still (L, N, E)
  auto x = torch::randn({5, 2, 64});
  auto [output, weights] = attention->forward(x, x, x);

  attention->options.batch_first(true);  // from now on (N, L, E)
  auto batch_first = attention->forward(x.transpose(0, 1)).output;

  auto expected = std::get<0>(builtin->forward(x, x, x));
  auto back = mha::to_torch(attention);
  const bool equal = torch::allclose(output, expected, 1e-5, 2e-6) &&
                     torch::allclose(batch_first.transpose(0, 1), expected, 1e-5, 2e-6) &&
                     torch::equal(std::get<0>(back->forward(x, x, x)), expected);
  std::cout << (equal ? "equal outputs\n" : "outputs differ\n");
  return equal ? 0 : 1;
}
