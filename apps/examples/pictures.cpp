#include <mha/draw.h>
#include <mha/multi_head_attention.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  mha::MultiHeadAttention attention(64, 4);
  auto weights = attention->forward(torch::randn({1, 4, 64})).weights;  // (1, 4, 4, 4)

  mha::draw::Maps maps;       // #include <mha/draw.h>
  maps.weights = weights[0];  // (H, L, S) of one sample, or (L, S)
  maps.queries = maps.keys = {"[CLS]", "a", "cat", "[SEP]"};
  mha::draw::save(maps, "cat.html");  // or .svg, .png

  std::cout << mha::draw::text(maps, mha::draw::terminal_of(stdout));
}
