#include <mha/multi_head_attention.h>
#include <torch/types.h>

#include <cstdio>

#ifdef DRAW
#include <mha/draw.h>
#endif

int main() {
  mha::MultiHeadAttention attention(mha::MultiHeadAttentionOptions(16, 4));
  auto [output, weights] = attention->forward(torch::ones({2, 5, 16}));
  bool right = output.sizes() == at::IntArrayRef{2, 5, 16} &&
                     weights.sizes() == at::IntArrayRef{2, 4, 5, 5} &&
                     weights.sum(-1).allclose(torch::ones({2, 4, 5}));
#ifdef DRAW
  mha::draw::Maps maps;
  maps.weights = weights[0];
  right = right && mha::draw::png(maps).substr(1, 3) == "PNG";
#endif
  std::puts(right ? "attention works" : "attention gives a wrong result");
  return right ? 0 : 1;
}
