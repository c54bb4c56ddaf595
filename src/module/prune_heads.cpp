#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <mha/multi_head_attention.h>

#include <utility>
#include <vector>

#include "module/module_checks.h"

namespace mha {
namespace {

// The heads that stay, in order.
struct KeptHeads {
  std::vector<int64_t> query, key_value;
};

KeptHeads kept_heads(const std::vector<int64_t>& pruned, int64_t heads, int64_t kv_heads) {
  std::vector<bool> keep(static_cast<size_t>(heads), true);
  for (const int64_t head : pruned) {
    TORCH_CHECK(head >= 0 && head < heads, "prune_heads: heads: expected numbers from 0 to ",
                heads - 1, ", found ", head);
    TORCH_CHECK(keep[static_cast<size_t>(head)],
                "prune_heads: heads: expected distinct numbers, found ", head, " twice");
    keep[static_cast<size_t>(head)] = false;
  }
  TORCH_CHECK(static_cast<int64_t>(pruned.size()) < heads,
              "prune_heads: heads: expected at most ", heads - 1, " of ", heads,
              ", so that one stays, found ", pruned.size());
  KeptHeads kept;
  const int64_t group = heads / kv_heads;
  int64_t wanted = 0;  // of the first group that stays
  for (int64_t g = 0; g < kv_heads; ++g) {
    int64_t count = 0;
    for (int64_t h = g * group; h < (g + 1) * group; ++h) {
      if (!keep[static_cast<size_t>(h)]) continue;
      kept.query.push_back(h);
      ++count;
    }
    if (count == 0) continue;
    if (wanted == 0) wanted = count;
    TORCH_CHECK(
        count == wanted,
        "prune_heads: heads: expected to leave every key/value head as many query heads "
        "as the others, or none, found ",
        wanted, " left for key/value head ", kept.key_value.front(), " and ", count, " for ",
        g);
    kept.key_value.push_back(g);
  }
  return kept;
}

// The rows of `heads` blocks of rows of equal size, along `dim`.
at::Tensor blocks(const at::Tensor& tensor, int64_t dim, int64_t count,
                  const std::vector<int64_t>& heads) {
  const auto index = at::tensor(heads, at::kLong).to(tensor.device());
  const auto apart = tensor.detach().unflatten(dim, {count, tensor.size(dim) / count});
  return apart.index_select(dim, index).flatten(dim, dim + 1);
}

}  // namespace

void MultiHeadAttentionImpl::prune_heads(const std::vector<int64_t>& heads) {
  detail::check_module(*this);
  const int64_t h = options.num_heads(), kv_heads = num_kv_heads(), d = head_dim();
  const KeptHeads kept = kept_heads(heads, h, kv_heads);
  if (heads.empty()) return;
  TORCH_CHECK(options.qk_norm() == QKNorm::none || options.qk_norm_scope() == QKNormScope::head,
              "prune_heads: qk_norm_scope: expected head, since a norm over all heads has each "
              "depend on the others, found all_heads");

  // All is computed before the first parameter changes.
  std::vector<std::pair<at::Tensor, at::Tensor>> shrunk;
  const auto shrink = [&](const at::Tensor& parameter, int64_t dim, int64_t count,
                          const std::vector<int64_t>& stay) {
    if (parameter.defined())
      shrunk.emplace_back(parameter, blocks(parameter, dim, count, stay));
  };
  const auto shrink_outputs = [&](const torch::nn::Linear& layer, int64_t count,
                                  const std::vector<int64_t>& stay) {
    shrink(layer->weight, 0, count, stay);
    shrink(layer->bias, 0, count, stay);
  };
  shrink_outputs(W_q, h, kept.query);
  shrink_outputs(W_k, kv_heads, kept.key_value);
  shrink_outputs(W_v, kv_heads, kept.key_value);
  shrink(W_o->weight, 1, h, kept.query);
  if (!W_g.is_empty()) shrink_outputs(W_g, h, kept.query);
  shrink(sinks, 0, h, kept.query);
  if (options.qk_norm_gain() == QKNormGain::per_head) {
    for (const auto& of_queries : {q_norm, q_norm_bias}) shrink(of_queries, 0, h, kept.query);
    for (const auto& of_keys : {k_norm, k_norm_bias}) {
      shrink(of_keys, 0, kv_heads, kept.key_value);
    }
  }
  shrink(bias_k, 2, kv_heads, kept.key_value);
  shrink(bias_v, 2, kv_heads, kept.key_value);

  const c10::NoGradGuard no_grad;
  for (auto& [parameter, value] : shrunk) {
    parameter.mutable_grad().reset();
    parameter.set_data(value);
  }
  for (auto layer : {W_q, W_k, W_v, W_g}) {
    if (!layer.is_empty()) layer->options.out_features(layer->weight.size(0));
  }
  W_o->options.in_features(W_o->weight.size(1));
  options.num_heads(static_cast<int64_t>(kept.query.size())).head_dim(d);
  options.num_kv_heads(static_cast<int64_t>(kept.key_value.size()));
}

}  // namespace mha
