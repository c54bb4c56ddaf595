#include <mha/scaled_dot_product_attention.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  auto q = torch::randn({2, 8, 20, 64});  // (N, H, L, D)
  auto k = torch::randn({2, 2, 30, 64});  // (N, Hk, S, D): four query heads share one of these
  auto v = torch::randn({2, 2, 30, 64});
  auto m = torch::rand({20, 30}) > 0.1;  // false blocks
  auto [o, w] = mha::scaled_dot_product_attention(q, k, v, mha::Mask::keep(m));

  // Scores held within (-50, 50), and a score for each head that takes weight and has no value.
  auto options = mha::AttentionOptions().softcap(50).sinks(torch::zeros({8}));
  auto [o2, w2] = mha::scaled_dot_product_attention(q, k, v, {}, options);  // rows sum to < 1
  std::cout << o.sizes() << ' ' << w.sizes() << ' ' << o2.sizes() << '\n';
  const bool all_is_shared = torch::allclose(w.sum(-1), torch::ones({2, 8, 20}));
  return all_is_shared && w2.sum(-1).lt(1).all().item<bool>() ? 0 : 1;
}
