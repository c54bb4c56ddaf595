#include "workload.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <mha/kv_cache.h>
#include <mha/scaled_dot_product_attention.h>
#include <mha/torch_conversion.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/version.h>

#include <cmath>

namespace mha::bench {
namespace {

using Tensors = std::vector<at::Tensor>;

bool is_causal(Kind kind) {
  return kind == Kind::core_forward_causal || kind == Kind::module_forward_causal;
}

/// The pairs that `core_forward_window` allows.
at::Tensor window_pairs(int64_t length, at::Device device) {
  return at::ones({length, length}, at::TensorOptions(at::kBool).device(device))
      .tril()
      .triu(1 - window_length);
}

at::Tensor torch_sdpa(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      bool causal, const std::optional<at::Tensor>& allowed = {}) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 5)
  return at::scaled_dot_product_attention(query, key, value, allowed, 0.0, causal, {},
                                          /*enable_gqa=*/key.size(-3) != query.size(-3));
#else
  const int64_t shared = query.size(-3) / key.size(-3);
  return at::scaled_dot_product_attention(query, key.repeat_interleave(shared, -3),
                                          value.repeat_interleave(shared, -3), allowed, 0.0,
                                          causal);
#endif
}

/// Without gradients, of a function with a result or several.
template <typename Run>
Computation forward(Run run) {
  Computation computation;
  computation.run = [run]() mutable -> Tensors {
    const c10::NoGradGuard no_grad;
    return {run()};
  };
  return computation;
}

Workload core_workload(const Case& what, at::Device device) {
  const auto [batch, length, d_model, heads] = what.shape;
  const int64_t head_dim = what.shape.head_dim();
  const int64_t queries = what.kind == Kind::decode ? 1 : length;
  const auto options = at::TensorOptions().dtype(what.dtype).device(device);
  const int64_t kv_heads = heads / what.heads_per_kv_head;
  const at::Tensor q = at::randn({batch, heads, queries, head_dim}, options);
  at::Tensor k = at::randn({batch, kv_heads, length, head_dim}, options);
  at::Tensor v = at::randn({batch, kv_heads, length, head_dim}, options);
  if (what.kind == Kind::decode) {  // both sides read the cache
    const auto cached = KVCache(KVCacheOptions().capacity(length)).append(k, v);
    k = cached.key;
    v = cached.value;
  }
  const bool causal = is_causal(what.kind), window = what.kind == Kind::core_forward_window;
  const Mask mask = window   ? Mask::window(window_length - 1, 0)
                    : causal ? Mask::causal()
                             : Mask();
  const auto ours = [q, k, v, mask] {
    return scaled_dot_product_attention(q, k, v, mask,
                                        AttentionOptions().weights(Weights::none))
        .output;
  };
  std::optional<at::Tensor> allowed;
  if (window) allowed = window_pairs(length, device);
  const auto theirs = [q, k, v, causal, allowed] {
    return torch_sdpa(q, k, v, causal, allowed);
  };

  Workload workload;
  if (what.kind != Kind::core_backward) {
    workload.ours = forward(ours);
    workload.sdpa = forward(theirs);
    return workload;
  }
  for (const at::Tensor& leaf : {q, k, v}) leaf.requires_grad_();
  const at::Tensor gradient = at::randn({batch, heads, queries, head_dim}, options);
  const auto backward = [&](const at::Tensor& output) {
    Computation computation;
    computation.run = [output, leaves = Tensors{q, k, v}, gradient]() -> Tensors {
      return torch::autograd::grad({output}, leaves, {gradient}, /*retain_graph=*/true);
    };
    return computation;
  };
  workload.ours = backward(ours());
  workload.sdpa = backward(theirs());
  return workload;
}

/// Output and gradient of the input; the gradients of the parameters are computed as well.
/// Before each step every parameter counts as changed, as an optimiser would have left it.
template <typename Layer>
Computation training(Layer layer, const at::Tensor& input, const at::Tensor& gradient,
                     const Tensors& parameters) {
  Tensors leaves = {input};
  leaves.insert(leaves.end(), parameters.begin(), parameters.end());
  Computation computation;
  computation.run = [layer, leaves, gradient]() mutable -> Tensors {
    const at::Tensor output = layer();
    const Tensors gradients = torch::autograd::grad({output}, leaves, {gradient});
    return {output.detach(), gradients[0]};
  };
  computation.prepare = [parameters] {
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters) at::Tensor(parameter).mul_(1);
  };
  return computation;
}

/// For comparison with ours, which is batch-first.
Computation batch_first(Computation computation) {
  computation.run = [run = computation.run]() -> Tensors {
    Tensors results = run();
    for (at::Tensor& result : results) result = result.transpose(0, 1);
    return results;
  };
  return computation;
}

at::Tensor split_heads(const at::Tensor& tokens, int64_t heads) {
  return tokens.unflatten(-1, {heads, -1}).transpose(1, 2);
}

at::Tensor project(const torch::nn::Linear& linear, const at::Tensor& tokens) {
  return at::linear(tokens, linear->weight, linear->bias);
}

/// (B, T, D) -> (B, H, T, D), heads outside, as keys are cached.
at::Tensor projected_heads(const torch::nn::Linear& linear, const at::Tensor& tokens,
                           int64_t heads) {
  return split_heads(project(linear, tokens), heads).contiguous();
}

/// The only projections that a caller can have without attention. Both sides leave the heads as
/// decoding reads them: of the time that is the small part that isn't the products'.
Workload projection_workload(const Case& what, at::Device device) {
  const auto [batch, length, d_model, heads] = what.shape;
  MultiHeadAttention module(
      MultiHeadAttentionOptions(d_model, heads).dtype(what.dtype).device(device));
  module->eval();
  const at::Tensor x =
      at::randn({batch, length, d_model}, at::TensorOptions().dtype(what.dtype).device(device));
  Workload workload;
  workload.ours = forward([module, x, room = KVCacheOptions().capacity(length)]() mutable {
    const KVCache memory = module->project_keys(x, {}, room);
    return Tensors{memory.key(), memory.value()};
  });
  workload.sdpa = forward([module, x, h = heads] {
    return Tensors{projected_heads(module->W_k, x, h), projected_heads(module->W_v, x, h)};
  });
  return workload;
}

/// One query over a memory that was projected once; the built-in projects it each time.
Workload memory_workload(const Case& what, at::Device device) {
  const auto [batch, length, d_model, heads] = what.shape;
  const auto options = at::TensorOptions().dtype(what.dtype).device(device);
  MultiHeadAttention module(
      MultiHeadAttentionOptions(d_model, heads).dtype(what.dtype).device(device));
  torch::nn::MultiheadAttention builtin = to_torch(module);
  module->eval();
  builtin->eval();
  const at::Tensor x = at::randn({batch, 1, d_model}, options);
  const at::Tensor tokens = at::randn({batch, length, d_model}, options);
  const c10::NoGradGuard no_grad;
  const KVCache memory = module->project_keys(tokens);
  const at::Tensor k = projected_heads(module->W_k, tokens, heads);
  const at::Tensor v = projected_heads(module->W_v, tokens, heads);

  Workload workload;
  const auto call = CallOptions().memory(memory).weights(Weights::none);
  workload.ours =
      forward([module, x, call]() mutable { return module->attend(x, call).output; });
  workload.sdpa = forward([module, x, k, v, h = heads] {
    const at::Tensor attended =
        torch_sdpa(split_heads(project(module->W_q, x), h), k, v, false);
    return project(module->W_o, attended.transpose(1, 2).flatten(2));
  });
  const at::Tensor query = x.transpose(0, 1).contiguous();
  const at::Tensor keys = tokens.transpose(0, 1).contiguous();
  workload.builtin = batch_first(forward([builtin, query, keys]() mutable {
    return std::get<0>(builtin->forward(query, keys, keys, {}, /*need_weights=*/false));
  }));
  return workload;
}

Workload module_workload(const Case& what, at::Device device) {
  const auto [batch, length, d_model, heads] = what.shape;
  const auto options = at::TensorOptions().dtype(what.dtype).device(device);
  MultiHeadAttention module(
      MultiHeadAttentionOptions(d_model, heads).dtype(what.dtype).device(device));
  torch::nn::MultiheadAttention builtin = to_torch(module);
  const bool train = what.kind == Kind::module_train;
  module->train(train);
  builtin->train(train);

  const bool causal = is_causal(what.kind);
  const at::Tensor x = at::randn({batch, length, d_model}, options);
  const at::Tensor sequence_first = x.transpose(0, 1).contiguous();
  const at::Tensor added =
      causal ? at::full({length, length}, -INFINITY, options).triu(1) : at::Tensor();
  const auto ours = [module, x, mask = causal ? Mask::causal() : Mask()]() mutable {
    return module->forward(x, {}, {}, mask, Weights::none).output;
  };
  const auto builtins = [builtin, sequence_first, added]() mutable {
    return std::get<0>(builtin->forward(sequence_first, sequence_first, sequence_first, {},
                                        /*need_weights=*/false, added));
  };
  const auto layer = [module, x, causal, h = heads] {
    const at::Tensor attended = torch_sdpa(split_heads(project(module->W_q, x), h),
                                           split_heads(project(module->W_k, x), h),
                                           split_heads(project(module->W_v, x), h), causal);
    return project(module->W_o, attended.transpose(1, 2).flatten(2));
  };

  Workload workload;
  switch (what.kind) {
    case Kind::module_weights:
      workload.ours = forward([module, x]() mutable {
        return module->forward(x, {}, {}, {}, Weights::per_head).weights;
      });
      workload.builtin = forward([builtin, sequence_first]() mutable {
        return std::get<1>(builtin->forward(sequence_first, sequence_first, sequence_first, {},
                                            /*need_weights=*/true, /*attn_mask=*/{},
                                            /*average_attn_weights=*/false));
      });
      workload.ours.memory = map_bytes(what);
      break;
    case Kind::module_train: {
      for (const at::Tensor& leaf : {x, sequence_first}) leaf.requires_grad_();
      const at::Tensor gradient = at::randn({batch, length, d_model}, options);
      workload.ours = training(ours, x, gradient, module->parameters());
      workload.sdpa = training(layer, x, gradient, module->parameters());
      workload.builtin =
          batch_first(training(builtins, sequence_first, gradient.transpose(0, 1).contiguous(),
                               builtin->parameters()));
      break;
    }
    default:
      workload.ours = forward(ours);
      workload.sdpa = forward(layer);
      workload.builtin = batch_first(forward(builtins));
  }
  // The built-in makes scores and weights, and for training their gradients.
  workload.builtin->memory = (train ? 5 : 3) * map_bytes(what);
  return workload;
}

}  // namespace

const char* name_of(Side side) {
  switch (side) {
    case Side::ours:
      return "mha";
    case Side::builtin:
      return "builtin";
    case Side::sdpa:
      return "sdpa";
  }
  TORCH_INTERNAL_ASSERT(false, "no such side: ", static_cast<int>(side));
}

bool computes(Side side, Kind kind) {
  switch (kind) {
    case Kind::core_forward:
    case Kind::core_forward_causal:
    case Kind::core_forward_window:
    case Kind::core_backward:
    case Kind::decode:
    case Kind::projection:
      return side != Side::builtin;
    case Kind::module_weights:
      return side != Side::sdpa;
    default:
      return true;
  }
}

const Computation* Workload::side(Side side) const {
  if (side == Side::ours) return &ours;
  const std::optional<Computation>& peer = side == Side::builtin ? builtin : sdpa;
  return peer ? &*peer : nullptr;
}

Workload make_workload(const Case& what, at::Device device) {
  at::manual_seed(0);
  const auto make = what.kind == Kind::projection        ? projection_workload
                    : what.kind == Kind::cross_decode    ? memory_workload
                    : computes(Side::builtin, what.kind) ? module_workload
                                                         : core_workload;
  const Workload workload = make(what, device);
  for (const Side side : kSides) {
    TORCH_INTERNAL_ASSERT((workload.side(side) != nullptr) == computes(side, what.kind));
  }
  return workload;
}

void check_agreement(const Case& what, const std::vector<at::Tensor>& ours, Side side,
                     const std::vector<at::Tensor>& theirs) {
  const c10::NoGradGuard no_grad;
  // Wide enough for the rounding of either side, far too narrow for another mask or scale.
  const double tolerance = what.dtype == at::kFloat ? 1e-3 : 5e-2;
  TORCH_INTERNAL_ASSERT(ours.size() == theirs.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    TORCH_CHECK(ours[i].sizes() == theirs[i].sizes(), name_of(what), ": expected results of ",
                ours[i].sizes(), " like ours from ", name_of(side), ", found ",
                theirs[i].sizes());
    const double scale = ours[i].abs().max().item<double>();
    const double difference = (ours[i] - theirs[i]).abs().max().item<double>();
    TORCH_CHECK(difference <= tolerance * scale, name_of(what), ": expected results of ",
                name_of(side), " within ", tolerance * scale, " of ours, found ", difference);
  }
}

}  // namespace mha::bench
