#include <mha/scaled_dot_product_attention.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  auto q = torch::randn({2, 8, 20, 64});  // (N, H, L, D)
  auto k = torch::randn({2, 2, 30, 64});  // (N, Hk, S, D): four query heads share one of these
  auto v = torch::randn({2, 2, 30, 64});
  auto m = torch::rand({20, 30}) > 0.1;  // false blocks
  auto [o, w] = mha::scaled_dot_product_attention(q, k, v, mha::Mask::keep(m));
  std::cout << o.sizes() << ' ' << w.sizes() << '\n';
  return torch::allclose(w.sum(-1), torch::ones({2, 8, 20})) ? 0 : 1;
}
