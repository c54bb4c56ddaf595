#include "attention/fused_attention.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include "attention/kernel_attention.h"
#include "attention/plain_gradients.h"
#include "attention/saved_call.h"
#include "attention/sink_gradient.h"
#include "runtime/attention_path.h"
#include "runtime/given_tensor.h"
#include "runtime/wants_gradient.h"

namespace mha::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class FusedAttention : public torch::autograd::Function<FusedAttention> {
 public:
  // Gives output, the rows' maximum and factor, and weights if wanted. `added` are the mask's
  // terms, and `sinks` the call's, if any, since only arguments get gradients.
  static variable_list forward(AutogradContext* context, const at::Tensor& query,
                               const at::Tensor& key, const at::Tensor& value,
                               at::TensorList /*added*/, at::TensorList /*sinks*/,
                               const ResolvedMask& mask, const AttentionCall& call) {
    const auto result = kernel_attention(query, key, value, mask, call);
    const auto& [maximum, factor] = result.statistics;
    context->mark_non_differentiable({maximum, factor});
    save_call(context, {query, key, value, result.output, maximum, factor}, mask, call);
    context->set_materialize_grads(false);
    variable_list results{result.output, maximum, factor};
    if (result.weights.defined()) results.push_back(result.weights);
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    const auto saved = saved_call(context);
    const auto& tensors = saved.tensors;
    const auto &q = tensors[0], &k = tensors[1], &v = tensors[2];
    const auto& mask = saved.mask;
    const auto& call = saved.call;
    const auto& sinks = call.scoring.sinks;
    const auto inputs = saved.inputs();
    const auto grad_output = without_lazy_bits(grad_outputs[0]);
    const auto grad_weights = grad_outputs.size() > 3 ? grad_outputs[3] : at::Tensor();
    const bool is_memory = !grad_output.defined() || !grad_output._is_zerotensor();
    TORCH_CHECK(
        is_tracing() || !is_followed(grad_outputs),
        "scaled_dot_product_attention: gradient: expected an upstream gradient without a "
        "forward-mode derivative, which LibTorch's softmax cannot pass on, found one with");
    variable_list grads(3);
    if (at::GradMode::is_enabled() || grad_weights.defined() || is_tracing() || !is_memory) {
      const auto sizes =
          plain_block_sizes(mask, k.size(1), q.scalar_type(), q.device(), call.weights);
      grads = plain_gradients(inputs, {grad_outputs[0], grad_weights}, mask, call, sizes);
    } else if (grad_output.defined()) {
      const KernelResult result{{tensors[3], {}, {tensors[4], tensors[5]}}};
      grads = kernel_attention_backward(q, k, v, result, grad_output, mask, call);
      if (sinks.requires_grad()) {
        grads.resize(inputs.size() - 1);  // tiles give none of the mask's
        grads.push_back(sink_gradient(q, k, result, grad_output, mask, call));
      }
    }
    grads.resize(inputs.size() + 2);  // none for the mask and the call
    return grads;
  }
};

// Whether a call is recorded as it is given, in bfloat16. What the mask adds has its gradient
// from the float32 kernels.
bool keeps_bfloat16(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const ResolvedMask& mask, const AttentionCall& call) {
  return takes_matrix_tiles(query, key, value, call) && !any_requires_grad(added_terms(mask));
}

// The half types are for storage, and all sums are float32.
AttentionResult recorded(const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const ResolvedMask& mask,
                         AttentionCall call) {
  call.output = Lifetime::kept;  // by the node
  call.statistics = Statistics::needed;
  variable_list sinks;
  if (call.scoring.sinks.defined()) {
    sinks.push_back(call.scoring.sinks = call.scoring.sinks.to(at::kFloat));
  }
  const auto added = added_terms(mask);
  const auto given =
      [keeps = keeps_bfloat16(query, key, value, mask, call)](const at::Tensor& heads) {
        return keeps ? heads : heads.to(at::kFloat);
      };
  const auto results =
      FusedAttention::apply(given(query), given(key), given(value), at::TensorList(added),
                            at::TensorList(sinks), mask, call);
  return {results[0], results.size() > 3 ? results[3] : at::Tensor(), {results[1], results[2]}};
}

}  // namespace

AttentionResult fused_attention(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const ResolvedMask& mask,
                                const AttentionCall& call) {
  const bool records = wants_gradient(query, key, value, call.scoring.sinks) ||
                       (at::GradMode::is_enabled() && any_requires_grad(added_terms(mask)));
  AttentionResult result = records ? recorded(query, key, value, mask, call)
                                   : kernel_attention(query, key, value, mask, call);
  const auto dtype = query.scalar_type();
  result.output = result.output.to(dtype);
  if (result.weights.defined()) result.weights = result.weights.to(dtype);
  return result;
}

}  // namespace mha::detail
