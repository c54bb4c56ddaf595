#include "numerics/numerics_call.h"

#include <algorithm>
#include <optional>
#include <sstream>

#include "support/torch_headers.h"

namespace mha::test {
namespace {

void add_gradients(Results& results, const Call& call) {
  std::vector<at::Tensor> leaves{call.query, call.key, call.value};
  if (call.added.defined()) leaves.push_back(call.added);
  const auto gradients = torch::autograd::grad({results.output}, leaves, {call.grad_output});
  results.query = gradients[0];
  results.key = gradients[1];
  results.value = gradients[2];
  if (call.added.defined()) results.added = gradients[3];
}

/// The whole mask as one added tensor in the dtype of the call, connected to `call.added`.
at::Tensor torch_mask(const Call& call) {
  if (call.mask.allows_everything()) return {};
  const auto blocked = call.dense().allowed == 0;
  auto mask = at::zeros(blocked.sizes(), call.query.options().requires_grad(false));
  if (call.added.defined())
    mask = mask + (call.added.dim() == 3 ? call.added.unsqueeze(1) : call.added);
  return mask.masked_fill(blocked, -infinity);
}

}  // namespace

Call draw(Random& random, Sizes z, MaskKind kind, at::ScalarType dtype, double spread) {
  const auto leaf = [&](at::IntArrayRef shape, double factor = 1) {
    return (random.normal(shape, at::kDouble) * factor).to(dtype).requires_grad_();
  };
  Call call;
  call.query = leaf({z.N, z.H, z.L, z.D}, spread);
  call.key = leaf({z.N, z.Hk, z.S, z.D});
  call.value = leaf({z.N, z.Hk, z.S, z.Dv});
  call.grad_output = random.normal({z.N, z.H, z.L, z.Dv}, dtype);
  const auto with_first_key = [](at::Tensor open) {
    open.select(-1, 0).fill_(true);
    return open;
  };
  switch (kind) {
    case MaskKind::none:
      break;
    case MaskKind::add:
      call.added = leaf({z.L, z.S});
      call.mask = Mask::add(call.added);
      break;
    case MaskKind::keep:
      call.mask = Mask::keep(with_first_key(random.coins({z.N, z.H, z.L, z.S}, 0.6)));
      break;
    case MaskKind::causal:
      call.mask = Mask::causal(Mask::Alignment::top_left);
      break;
    case MaskKind::padding:
      call.mask = Mask::keep_keys(with_first_key(random.coins({z.N, z.S}, 0.7)));
      break;
    case MaskKind::window_and_add: {
      call.added = leaf({z.N, z.L, z.S});
      const auto left = std::max(z.L, z.S);  // reaches the first key from everywhere
      call.mask =
          Mask::window(left, z.S / 3, Mask::Alignment::top_left) & Mask::add(call.added);
      break;
    }
  }
  std::ostringstream name;
  name << dtype << " N=" << z.N << " H=" << z.H << " Hk=" << z.Hk << " L=" << z.L
       << " S=" << z.S << " D=" << z.D << " Dv=" << z.Dv << " spread " << spread << " mask "
       << call.mask;
  call.name = name.str();
  return call;
}

Results run_library(const Call& call, Weights weights) {
  const auto [output, maps] = scaled_dot_product_attention(
      call.query, call.key, call.value, call.mask, AttentionOptions().weights(weights));
  Results results;
  results.output = output;
  results.weights = maps;
  add_gradients(results, call);
  return results;
}

Results run_oracle(const Call& call) {
  const auto dense = call.dense();
  Results results;
  const auto [output, weights] =
      oracle_attention(call.query, call.key, call.value, dense, call.scale());
  const auto gradients = oracle_attention_backward(call.query, call.key, call.value, dense,
                                                   call.scale(), call.grad_output, {});
  results.output = output;
  results.weights = weights;
  results.query = gradients.query;
  results.key = gradients.key;
  results.value = gradients.value;
  if (call.added.defined()) results.added = sum_to_mask_shape(gradients.added, call.added);
  return results;
}

Results run_torch_composition(const Call& call) {
  const auto group = call.query.size(1) / call.key.size(1);
  auto scores = at::matmul(call.query, call.key.repeat_interleave(group, 1).transpose(-2, -1)) *
                call.scale();
  if (const auto mask = torch_mask(call); mask.defined()) scores = scores + mask;
  Results results;
  results.weights = at::softmax(scores, -1);
  results.output = at::matmul(results.weights, call.value.repeat_interleave(group, 1));
  add_gradients(results, call);
  return results;
}

Results run_torch_fused(const Call& call) {
  const auto group = call.query.size(1) / call.key.size(1);
  std::optional<at::Tensor> mask;
  if (auto given = torch_mask(call); given.defined()) mask = given;
  Results results;
  results.output = at::scaled_dot_product_attention(
      call.query, call.key.repeat_interleave(group, 1), call.value.repeat_interleave(group, 1),
      mask, 0.0, false, call.scale());
  add_gradients(results, call);
  return results;
}

Sizes draw_sizes(Random& random) {
  const std::vector<int64_t> lengths{1,  2,  3,  7,  8,  9,  15, 16,  17,
                                     31, 32, 33, 48, 63, 64, 65, 127, 129};
  const std::vector<int64_t> head_sizes{1, 2, 3, 5, 8, 15, 16, 17, 32, 33, 64, 80};
  Sizes z{};
  do {
    z.N = random.between(1, 3);
    z.Hk = random.between(1, 3);
    z.H = z.Hk * random.between(1, 2);
    z.L = random.pick(lengths);
    z.S = random.pick(lengths);
    z.D = random.pick(head_sizes);
    z.Dv = random.chance(0.5) ? z.D : random.pick(head_sizes);
  } while (z.N * z.H * z.L * z.S * (z.D + z.Dv) > 1'500'000);
  return z;
}

}  // namespace mha::test
