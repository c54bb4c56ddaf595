#include "fused_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <utility>

#include "cpu_kernels.h"
#include "finite.h"
#include "huge_pages.h"
#include "kernel_mask.h"
#include "non_finite.h"
#include "plain_attention.h"
#include "run_tasks.h"

namespace mha::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// (N, H, T, D) with unit stride in D.
at::Tensor kernel_view(const at::Tensor& tensor) {
  return tensor.size(-1) > 1 && tensor.stride(-1) != 1 ? tensor.contiguous() : tensor;
}

template <typename T>
cpu::Rows<T> rows(const at::Tensor& tensor) {
  return {tensor.data_ptr<float>(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

cpu::Storage storage_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16:
      return cpu::Storage::bfloat16;
    case at::kHalf:
      return cpu::Storage::float16;
    default:
      return cpu::Storage::float32;
  }
}

cpu::StoredRows stored_rows(const at::Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

cpu::KernelDropout kernel_dropout(const AttentionCall& call) {
  if (call.dropout == 0) return {};
  const double factor = call.dropout == 1 ? 0 : 1 / (1 - call.dropout);
  return {call.dropout_seed, dropout_threshold(call.dropout), static_cast<float>(factor)};
}

// Memory laid out as (N, T, H, D), seen as (N, H, T, D).
at::Tensor empty_heads(int64_t n, int64_t h, int64_t t, int64_t d, const at::Tensor& like) {
  return at::empty({n, t, h, d}, like.options()).transpose(1, 2);
}

struct ForwardResult {
  at::Tensor output, weights;          // weights undefined if not wanted
  at::Tensor row_maximum, row_factor;  // defined for the backward
};

// Few queries: chunks of keys are the tasks.
void decode(const cpu::Kernels& kernels, const cpu::AttentionForward& args) {
  const auto partials = at::empty({kernels.decode_partials(args)}, at::kFloat);
  float* data = partials.data_ptr<float>();
  const int64_t chunks = (args.keys + kernels.decode_chunk - 1) / kernels.decode_chunk;
  run_tasks(args.batch * args.kv_heads * chunks, kernels.decode_scratch(args),
            [&](int64_t i, float* scratch) { kernels.decode(args, i, i + 1, scratch, data); });
  kernels.merge_decoded(args, data);
}

void attend(const cpu::Kernels& kernels, const cpu::AttentionForward& args) {
  const int64_t tiles = (args.queries + kernels.tile - 1) / kernels.tile;
  run_tasks(args.averaged ? args.batch * tiles : args.batch * args.heads * tiles,
            kernels.forward_scratch(args),
            [&](int64_t i, float* scratch) { kernels.forward(args, i, i + 1, scratch); });
}

// `query` is float32; keys and values may be of a half type, and are read as they are where the
// kernels can.
ForwardResult forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const ResolvedMask& mask, const AttentionCall& call, bool for_backward) {
  const auto q = kernel_view(query), k = kernel_view(key), v = kernel_view(value);
  const int64_t n = q.size(0), h = q.size(1), l = q.size(2);
  const cpu::Kernels& kernels = cpu_kernels();
  const auto packed = pack_mask(mask, kernels);

  cpu::AttentionForward args{};
  args.batch = n;
  args.heads = h;
  args.kv_heads = k.size(1);
  args.queries = l;
  args.keys = k.size(2);
  args.head_dim = q.size(3);
  args.value_dim = v.size(3);
  args.scale = static_cast<float>(call.scale);
  args.query = rows<const float>(q);
  args.storage = storage_of(k);
  args.key = stored_rows(k);
  args.value = stored_rows(v);
  args.mask = packed.mask;
  args.dropout = kernel_dropout(call);
  args.averaged = call.weights == Weights::averaged;
  args.weights_after_dropout = call.weights_after_dropout;

  ForwardResult result{empty_heads(n, h, l, v.size(3), q), {}, {}, {}};
  args.output = rows<float>(result.output);
  if (for_backward) {
    result.row_maximum = at::empty({n, h, l}, q.options());
    result.row_factor = at::empty({n, h, l}, q.options());
    args.row_maximum = result.row_maximum.data_ptr<float>();
    args.row_factor = result.row_factor.data_ptr<float>();
  }
  if (args.averaged) {
    result.weights = at::empty({n, l, args.keys}, q.options());
    args.weights = {result.weights.data_ptr<float>(), l * args.keys, 0, args.keys};
  } else if (call.weights == Weights::per_head) {
    result.weights = at::empty({n, h, l, args.keys}, q.options());
    args.weights = rows<float>(result.weights);
  }
  if (result.weights.defined()) {
    prefer_huge_pages(result.weights.data_ptr(), result.weights.nbytes());
  }

  if (kernels.can_decode(args)) {
    decode(kernels, args);
  } else if (args.storage == cpu::Storage::float32) {
    attend(kernels, args);
  } else if (kernels.can_dot(args)) {
    const auto pairs = at::empty({kernels.value_pairs(args)}, at::kInt);
    auto* data = reinterpret_cast<uint32_t*>(pairs.data_ptr<int32_t>());
    run_tasks(n * args.kv_heads, 1,
              [&](int64_t i, float*) { kernels.pair_values(args, i, i + 1, data); });
    args.value_pairs = data;
    attend(kernels, args);
  } else {
    const auto wide_key = k.to(at::kFloat), wide_value = v.to(at::kFloat);
    args.storage = cpu::Storage::float32;
    args.key = stored_rows(wide_key);
    args.value = stored_rows(wide_value);
    attend(kernels, args);
  }
  return result;
}

// Zeros up to a multiple of 16 in the last dimension change no product.
at::Tensor padded(const at::Tensor& tensor) {
  const int64_t excess = tensor.size(-1) % 16;
  return kernel_view(excess == 0 ? tensor : at::constant_pad_nd(tensor, {0, 16 - excess}));
}

variable_list backward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       const ForwardResult& result, const at::Tensor& grad_output,
                       const ResolvedMask& mask, const AttentionCall& call) {
  const auto q = padded(query), k = padded(key), v = padded(value);
  const auto o = padded(result.output), go = padded(grad_output);
  const cpu::Kernels& kernels = cpu_kernels();
  const auto packed = pack_mask(mask, kernels);
  const int64_t n = q.size(0), h = q.size(1), kv_h = k.size(1), l = q.size(2), s = k.size(2);
  const auto grad_query = empty_heads(n, h, l, q.size(3), q);
  const auto grad_key = empty_heads(n, kv_h, s, k.size(3), k);
  const auto grad_value = empty_heads(n, kv_h, s, v.size(3), v);

  cpu::AttentionBackward args{};
  args.batch = n;
  args.heads = h;
  args.kv_heads = kv_h;
  args.queries = l;
  args.keys = s;
  args.head_dim = q.size(3);
  args.value_dim = v.size(3);
  args.scale = static_cast<float>(call.scale);
  args.query = rows<const float>(q);
  args.key = rows<const float>(k);
  args.value = rows<const float>(v);
  args.output = rows<const float>(o);
  args.grad_output = rows<const float>(go);
  args.row_maximum = result.row_maximum.data_ptr<float>();
  args.row_factor = result.row_factor.data_ptr<float>();
  args.grad_query = rows<float>(grad_query);
  args.grad_key = rows<float>(grad_key);
  args.grad_value = rows<float>(grad_value);
  args.mask = packed.mask;
  args.dropout = kernel_dropout(call);
  run_tasks(n * kv_h, kernels.backward_scratch(args),
            [&](int64_t i, float* scratch) { kernels.backward(args, i, i + 1, scratch); });
  return {grad_query.narrow(3, 0, query.size(3)), grad_key.narrow(3, 0, key.size(3)),
          grad_value.narrow(3, 0, value.size(3))};
}

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

// The forward where pairs are blocked and values may be NaN. A blocked value times its weight
// of 0 shows as NaN in the output; then the kernels see zeros in place of such values, and the
// queries that may attend to them get what they give afterwards.
ForwardResult guarded_forward(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const ResolvedMask& mask,
                              const AttentionCall& call, bool for_backward) {
  auto result = forward(query, key, value, mask, call, for_backward);
  if (mask.allows_everything() || !may_be_non_finite(result.output) ||
      !may_be_non_finite(value)) {
    return result;
  }
  result = forward(query, key, finite_rows(value), mask, call, for_backward);
  const int64_t group = query.size(1) / value.size(1);
  const auto bad = row_is_finite(value).logical_not();
  for (const int64_t j : marked_rows(bad)) {
    // (N, H, L): who sees this value; an infinite value times a positive weight is that value.
    const auto sees =
        open_column(mask, j, query.device())
            .logical_and(bad.select(2, j).repeat_interleave(group, 1).unsqueeze(-1));
    const auto seen = value.select(2, j).repeat_interleave(group, 1).unsqueeze(2);
    const auto given = seen.masked_fill(at::isfinite(seen), 0) + result.output;
    result.output.copy_(at::where(sees.unsqueeze(-1), given, result.output));
  }
  return result;
}

// The backward where pairs are blocked and numbers may be NaN: the kernels see zeros in place
// of such rows, and a factor of NaN makes every weight of the queries that they reach NaN.
variable_list guarded_backward(const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const ForwardResult& result,
                               const at::Tensor& grad_output, const ResolvedMask& mask,
                               const AttentionCall& call) {
  if (mask.allows_everything() ||
      !(may_be_non_finite(query) || may_be_non_finite(key) || may_be_non_finite(value) ||
        may_be_non_finite(grad_output))) {
    return backward(query, key, value, result, grad_output, mask, call);
  }
  auto reached =
      row_is_finite(query).logical_and(row_is_finite(grad_output)).logical_not();  // (N, H, L)
  const int64_t group = query.size(1) / key.size(1);
  const auto bad = row_is_finite(key).logical_not();
  for (const int64_t j : marked_rows(bad)) {
    reached = reached.logical_or(
        open_column(mask, j, query.device())
            .logical_and(bad.select(2, j).repeat_interleave(group, 1).unsqueeze(-1)));
  }
  auto marked = result;
  marked.row_factor = result.row_factor.masked_fill(reached, not_a_number);
  return backward(finite_rows(query), finite_rows(key), finite_rows(value), marked,
                  finite_rows(grad_output), mask, call);
}

// What the backward needs beyond tensors.
struct Settings : torch::CustomClassHolder {
  ResolvedMask mask;  // its tensors are kept by save_for_backward, which notices changes
  AttentionCall call;
};

std::vector<std::vector<at::Tensor>*> tensor_lists(ResolvedMask& mask) {
  return {&mask.lengths, &mask.keep_keys, &mask.block_keys, &mask.keep, &mask.block, &mask.add};
}

// Gradients of the plain path: they have gradients themselves, and flow from the weights as
// well.
variable_list plain_gradients(variable_list inputs, const variable_list& grad_outputs,
                              const ResolvedMask& mask, const AttentionCall& call) {
  const bool create_graph = at::GradMode::is_enabled();
  at::AutoGradMode enable_grad(true);
  if (!create_graph) {
    for (auto& input : inputs) input = input.detach().requires_grad_();
  }
  const auto result = plain_attention(inputs[0], inputs[1], inputs[2], mask, call);
  variable_list outputs, given, wanted;
  const at::Tensor* results[] = {&result.output, &result.weights};
  for (size_t i = 0; i < grad_outputs.size(); ++i) {
    if (!grad_outputs[i].defined()) continue;
    outputs.push_back(*results[i]);
    given.push_back(grad_outputs[i]);
  }
  for (const auto& input : inputs) {
    if (input.requires_grad()) wanted.push_back(input);
  }
  const auto found =
      torch::autograd::grad(outputs, wanted, given,
                            /*retain_graph=*/create_graph, create_graph, /*allow_unused=*/true);
  variable_list grads;
  auto next = found.begin();
  for (const auto& input : inputs) {
    grads.push_back(input.requires_grad() ? *next++ : at::Tensor());
  }
  return grads;
}

class FusedAttention : public torch::autograd::Function<FusedAttention> {
 public:
  // Gives (output), or (output, weights) if weights are wanted.
  static variable_list forward(AutogradContext* context, const at::Tensor& query,
                               const at::Tensor& key, const at::Tensor& value,
                               const ResolvedMask& mask, const AttentionCall& call) {
    const auto result = guarded_forward(query, key, value, mask, call, true);
    auto settings = c10::make_intrusive<Settings>();
    settings->mask = mask;
    settings->call = call;
    variable_list saved{
        query, key, value, result.output, result.row_maximum, result.row_factor};
    for (auto* list : tensor_lists(settings->mask)) {
      saved.insert(saved.end(), list->begin(), list->end());
    }
    context->save_for_backward(std::move(saved));
    context->saved_data["settings"] = c10::IValue::make_capsule(std::move(settings));
    context->set_materialize_grads(false);
    if (!result.weights.defined()) return {result.output};
    return {result.output, result.weights};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    const auto saved = context->get_saved_variables();
    const auto settings = c10::static_intrusive_pointer_cast<Settings>(
        context->saved_data["settings"].toCapsule());
    ResolvedMask mask = settings->mask;
    auto next = saved.begin() + 6;
    for (auto* list : tensor_lists(mask)) {
      for (auto& tensor : *list) tensor = *next++;
    }
    const auto &q = saved[0], &k = saved[1], &v = saved[2];
    const auto& grad_output = grad_outputs[0];
    const bool from_weights = grad_outputs.size() > 1 && grad_outputs[1].defined();
    variable_list grads(3);
    if (at::GradMode::is_enabled() || from_weights) {
      grads = plain_gradients({q, k, v}, grad_outputs, mask, settings->call);
    } else if (grad_output.defined()) {
      grads = guarded_backward(q, k, v, {saved[3], {}, saved[4], saved[5]}, grad_output, mask,
                               settings->call);
    }
    grads.resize(5);  // none for the mask and the call
    return grads;
  }
};

}  // namespace

AttentionOutput fused_attention(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const ResolvedMask& mask,
                                const AttentionCall& call) {
  const auto dtype = query.scalar_type();
  const auto narrow = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(dtype) : tensor;
  };
  const bool wants_gradient =
      at::GradMode::is_enabled() &&
      (query.requires_grad() || key.requires_grad() || value.requires_grad());
  // The half types are for storage, and all sums are float32.
  if (wants_gradient) {
    const auto results = FusedAttention::apply(query.to(at::kFloat), key.to(at::kFloat),
                                               value.to(at::kFloat), mask, call);
    return {narrow(results[0]), results.size() > 1 ? narrow(results[1]) : at::Tensor()};
  }
  const auto result = guarded_forward(query.to(at::kFloat), key, value, mask, call, false);
  return {narrow(result.output), narrow(result.weights)};
}

}  // namespace mha::detail
