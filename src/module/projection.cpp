#include "module/projection.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include "runtime/cpu_kernels.h"
#include "runtime/run_tasks.h"

namespace mha::detail {
namespace {

// A projection in the kernels' terms, and what keeps its memory alive.
struct Prepared {
  cpu::LinearArgs args;
  at::Tensor input, bias;
  std::shared_ptr<const at::Tensor> packed;
};

Prepared prepare(const Projection& projection, PackedWeights& cache,
                 const cpu::Kernels& kernels) {
  Prepared prepared;
  const at::Tensor& weight = projection.layer->weight;
  const at::Tensor& output = projection.output;
  const int64_t n = projection.input.size(0), t = projection.input.size(1);
  const int64_t inner = weight.size(1), columns = weight.size(0);

  at::Tensor input = projection.input;
  const auto rows_apart = [&](int64_t outer, int64_t rows) {
    return input.stride(2) == 1 &&
           (input.size(outer) == 1 || input.stride(outer) == rows * input.stride(1 - outer));
  };
  bool batch_outside = rows_apart(0, t);
  const bool batch_inside = !batch_outside && rows_apart(1, n);  // (T, N, inner) in memory
  if (!batch_outside && !batch_inside) {
    input = input.contiguous();
    batch_outside = true;
  }

  cpu::LinearArgs& args = prepared.args;
  args.rows = n * t;
  args.inner = inner;
  args.columns = columns;
  args.input = input.data_ptr<float>();
  args.output = output.data_ptr<float>();
  if (batch_outside) {
    args.input_stride = t > 1 ? input.stride(1) : input.stride(0);
    args.rows_per_sample = t;
    args.output_n = output.stride(0);
    args.output_t = output.stride(1);
  } else {
    args.input_stride = n > 1 ? input.stride(0) : input.stride(1);
    args.rows_per_sample = n;
    args.output_n = output.stride(1);
    args.output_t = output.stride(0);
  }
  args.group = output.dim() == 4 ? output.size(3) : columns;
  args.output_group = output.dim() == 4 ? output.stride(2) : columns;
  if (projection.layer->bias.defined()) {
    prepared.bias = projection.layer->bias.to(at::kFloat).contiguous();
    args.bias = prepared.bias.data_ptr<float>();
  }
  prepared.packed = cache.get(projection.slot, weight, kernels);
  args.packed = prepared.packed->data_ptr<float>();
  prepared.input = input;
  return prepared;
}

}  // namespace

void project(const std::vector<Projection>& projections, PackedWeights& cache) {
  const cpu::Kernels& kernels = cpu_kernels();
  std::vector<Prepared> prepared;
  int64_t panels = 0;
  for (const Projection& projection : projections) {
    prepared.push_back(prepare(projection, cache, kernels));
    panels += (prepared.back().args.columns + kernels.tile - 1) / kernels.tile;
  }
  // A panel with all rows is one task, unless that leaves threads idle at the end.
  const int64_t threads = at::get_num_threads();
  const int64_t wanted = threads > 1 ? (8 * threads + panels - 1) / panels : 1;
  run_tasks(panels * wanted, 1, [&](int64_t task, float*) {
    int64_t panel = task / wanted;
    const int64_t part = task % wanted;
    for (const Prepared& p : prepared) {
      const int64_t own = (p.args.columns + kernels.tile - 1) / kernels.tile;
      if (panel >= own) {
        panel -= own;
        continue;
      }
      const int64_t rows = ((p.args.rows + wanted - 1) / wanted + 7) / 8 * 8;
      const int64_t begin = std::min(part * rows, p.args.rows);
      const int64_t end = std::min(begin + rows, p.args.rows);
      if (begin < end) kernels.linear(p.args, panel, begin, end);
      return;
    }
  });
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class RecordedProjection : public torch::autograd::Function<RecordedProjection> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const at::Tensor& bias,
                            const Projection& projection, PackedWeights& cache) {
    context->save_for_backward({input, weight});
    context->saved_data["input"] = input.requires_grad();
    context->saved_data["weight"] = weight.requires_grad();
    context->saved_data["bias"] = bias.requires_grad();
    project({projection}, cache);
    return projection.output;
  }

  // By calls that have gradients themselves.
  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    const auto saved = context->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1];
    const auto grad_output = grad_outputs[0].reshape({-1, weight.size(0)});
    const auto wants = [context](const char* name) {
      return context->saved_data[name].toBool();
    };
    variable_list grads(5);
    if (wants("input")) grads[0] = grad_output.matmul(weight).view(input.sizes());
    if (wants("weight")) grads[1] = grad_output.t().matmul(input.reshape({-1, weight.size(1)}));
    if (wants("bias")) grads[2] = grad_output.sum(0);
    return grads;
  }
};

}  // namespace

at::Tensor project_recorded(const Projection& projection, PackedWeights& cache) {
  const torch::nn::LinearImpl& layer = *projection.layer;
  // Autograd takes no undefined tensor.
  const auto bias = layer.bias.defined() ? layer.bias : at::empty({0}, layer.weight.options());
  return RecordedProjection::apply(projection.input, layer.weight, bias, projection, cache);
}

}  // namespace mha::detail
