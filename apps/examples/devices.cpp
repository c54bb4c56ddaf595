#include <mha/multi_head_attention.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  mha::MultiHeadAttention attention(mha::MultiHeadAttentionOptions(64, 8).num_kv_heads(2));
  auto prompt = torch::randn({2, 20, 64}), token = torch::randn({2, 1, 64});
  auto lengths = torch::tensor({21, 18});

  at::NoGradGuard no_grad;
  mha::KVCache cache;
  auto call = mha::CallOptions().cache(cache);
  attention->attend(prompt, mha::CallOptions(call).mask(mha::Mask::causal()));

  at::Device device = torch::cuda::is_available() ? at::kCUDA : at::kCPU;
  attention->to(device);
  cache.to(device);                                   // what was cached before goes along
  call.mask(mha::Mask::lengths(lengths).to(device));  // and so do a mask's tensors
  auto x = token.to(device);
  auto [output, map] = attention->trace(x, {}, {}, call);  // all there
  auto entropy = map.entropy().cpu();                      // (2, 8, 1)
  auto here = map.to(at::kCPU);                            // to draw, or to keep
  std::cout << output.sizes() << ' ' << entropy.sizes() << ' ' << here.dense().sizes() << '\n';
}
