#include "module/projection.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "module/projection_gradients.h"
#include "module/tile_projection.h"
#include "runtime/attention_path.h"
#include "runtime/cpu_kernels.h"
#include "runtime/given_tensor.h"
#include "runtime/run_tasks.h"

namespace mha::detail {
namespace {

// Whether the weights will be as they are in the next call.
enum class Reuse { expected, unknown };

// A projection in the kernels' terms, and what keeps its memory alive.
struct Prepared {
  cpu::LinearArgs args;
  at::Tensor input, bias, weight;
  std::shared_ptr<const at::Tensor> packed;  // null: each panel is packed where it is used
};

int64_t panel_count(const Prepared& prepared, const cpu::Kernels& kernels) {
  return (prepared.args.columns + kernels.tile - 1) / kernels.tile;
}

Prepared prepare(const Projection& projection, PackedWeights& cache, Reuse reuse,
                 const cpu::Kernels& kernels) {
  Prepared prepared;
  const at::Tensor& weight = projection.weight;
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
  if (projection.bias.defined()) {
    prepared.bias = projection.bias.detach().to(at::kFloat).contiguous();
    args.bias = prepared.bias.data_ptr<float>();
  }
  prepared.packed = reuse == Reuse::expected
                        ? cache.get(projection.slot, weight, kernels)
                        : cache.get_if_steady(projection.slot, weight, kernels);
  if (!prepared.packed) {
    const at::Tensor wide = weight.detach().to(at::kFloat);
    prepared.weight = wide.stride(1) == 1 ? wide : wide.contiguous();
  }
  prepared.input = input;
  return prepared;
}

void project_panel(const Prepared& prepared, const cpu::Kernels& kernels, int64_t index,
                   int64_t begin, int64_t end, float* scratch) {
  const cpu::LinearArgs& args = prepared.args;
  const int64_t first = index * kernels.tile;
  const float* panel = scratch;
  if (prepared.packed) {
    panel = prepared.packed->data_ptr<float>() + first * args.inner;
  } else {
    const int64_t stride = prepared.weight.stride(0);
    kernels.pack_weight(prepared.weight.data_ptr<float>() + first * stride, stride, args.inner,
                        std::min(kernels.tile, args.columns - first), scratch);
  }
  kernels.linear(args, panel, index, begin, end);
}

// Of one module, and so either all or none.
bool are_in_bfloat16(const std::vector<Projection>& projections) {
  return !projections.empty() && projections[0].output.scalar_type() == at::kBFloat16;
}

void project_all(const std::vector<Projection>& projections, PackedWeights& cache,
                 Reuse reuse) {
  if (are_in_bfloat16(projections)) return project_on_tiles(projections, cache);
  const cpu::Kernels& kernels = cpu_kernels();
  std::vector<Prepared> prepared;
  int64_t panels = 0, scratch_size = 1;
  for (const Projection& projection : projections) {
    prepared.push_back(prepare(projection, cache, reuse, kernels));
    const Prepared& last = prepared.back();
    panels += panel_count(last, kernels);
    if (!last.packed) {
      scratch_size = std::max(scratch_size, kernels.packed_size(last.args.inner, kernels.tile));
    }
  }
  // A panel with all rows is one task, unless that leaves threads idle at the end.
  const int64_t threads = at::get_num_threads();
  const int64_t wanted = threads > 1 ? (8 * threads + panels - 1) / panels : 1;
  run_tasks(panels * wanted, scratch_size, [&](int64_t task, float* scratch) {
    int64_t panel = task / wanted;
    const int64_t part = task % wanted;
    for (const Prepared& p : prepared) {
      const int64_t own = panel_count(p, kernels);
      if (panel >= own) {
        panel -= own;
        continue;
      }
      const int64_t rows = ((p.args.rows + wanted - 1) / wanted + 7) / 8 * 8;
      const int64_t begin = std::min(part * rows, p.args.rows);
      const int64_t end = std::min(begin + rows, p.args.rows);
      if (begin < end) project_panel(p, kernels, panel, begin, end, scratch);
      return;
    }
  });
}

}  // namespace

void project(const std::vector<Projection>& projections, PackedWeights& cache) {
  project_all(projections, cache, Reuse::expected);
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What is recorded: each tensor once.
struct Arguments {
  explicit Arguments(const std::vector<Projection>& projections) {
    for (const Projection& projection : projections) {
      const auto same = [&](const at::Tensor& input) {
        return input.is_same(projection.input);
      };
      const auto found = std::find_if(inputs.begin(), inputs.end(), same);
      input_of.push_back(found - inputs.begin());
      if (found == inputs.end()) inputs.push_back(projection.input);
      weights.push_back(projection.weight);
      const at::Tensor& bias = projection.bias;
      bias_of.push_back(bias.defined() ? static_cast<int64_t>(biases.size()) : -1);
      if (bias.defined()) biases.push_back(bias);
    }
  }
  variable_list inputs, weights, biases;
  std::vector<int64_t> input_of, bias_of;  // of each projection; -1: none
};

// What the backward needs beyond tensors. `wants` speaks of inputs, weights and biases.
struct Recorded : torch::CustomClassHolder {
  std::vector<int64_t> input_of, bias_of;
  std::vector<bool> wants;
};

// Whether the kernels may read the gradients of layers over `dtype`, and nobody asks for
// gradients of what they find.
bool kernels_can_read(const variable_list& grad_outputs, at::ScalarType dtype) {
  const auto is_memory = [dtype](const at::Tensor& grad) {
    return !grad.defined() ||
           (grad.device().is_cpu() && grad.scalar_type() == dtype && is_plain_memory(grad));
  };
  const bool has_kernels =
      dtype == at::kFloat || (dtype == at::kBFloat16 && tile_kernels() != nullptr);
  return has_kernels && !at::GradMode::is_enabled() && !is_followed(grad_outputs) &&
         !kernels_are_off() && std::all_of(grad_outputs.begin(), grad_outputs.end(), is_memory);
}

class RecordedProjections : public torch::autograd::Function<RecordedProjections> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList inputs,
                               at::TensorList weights, at::TensorList biases,
                               const Arguments& arguments,
                               const std::vector<Projection>& projections,
                               PackedWeights& cache) {
    auto recorded = c10::make_intrusive<Recorded>();
    recorded->input_of = arguments.input_of;
    recorded->bias_of = arguments.bias_of;
    for (const auto& list : {inputs, weights, biases}) {
      for (const at::Tensor& tensor : list) {
        recorded->wants.push_back(tensor.requires_grad());
      }
    }
    variable_list saved(inputs.begin(), inputs.end());
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["recorded"] = c10::IValue::make_capsule(std::move(recorded));
    context->set_materialize_grads(false);
    project_all(projections, cache, Reuse::unknown);
    variable_list outputs;
    for (const Projection& projection : projections) outputs.push_back(projection.output);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    const auto saved = context->get_saved_variables();
    const auto recorded = c10::static_intrusive_pointer_cast<Recorded>(
        context->saved_data["recorded"].toCapsule());
    const bool by_kernels = kernels_can_read(grad_outputs, saved[0].scalar_type());
    variable_list grads(recorded->wants.size() + 3);  // none for what are no tensors
    const size_t inputs = saved.size() - recorded->input_of.size();
    for (size_t i = 0; i < inputs; ++i) {
      const auto layers = layers_of(*recorded, i, grad_outputs);
      if (layers.empty()) continue;
      InputGradients wanted = gradients_of(*recorded, i, layers, saved, grad_outputs);
      by_kernels ? find_gradients(wanted) : find_gradients_by_aten(wanted);
      grads[i] = wanted.grad_input;
      for (size_t found = 0; found < layers.size(); ++found) {
        const size_t l = layers[found];
        grads[inputs + l] = wanted.layers[found].grad_weight;
        if (recorded->bias_of[l] < 0) continue;
        grads[saved.size() + recorded->bias_of[l]] = wanted.layers[found].grad_bias;
      }
    }
    return grads;
  }

 private:
  // Those that read an input and have an upstream gradient.
  static std::vector<size_t> layers_of(const Recorded& recorded, size_t input,
                                       const variable_list& grad_outputs) {
    std::vector<size_t> layers;
    for (size_t l = 0; l < grad_outputs.size(); ++l) {
      const bool reads = recorded.input_of[l] == static_cast<int64_t>(input);
      if (reads && grad_outputs[l].defined()) layers.push_back(l);
    }
    return layers;
  }

  // `saved` are the inputs, then the weights; the biases come next in `wants`.
  static InputGradients gradients_of(const Recorded& recorded, size_t input,
                                     const std::vector<size_t>& layers,
                                     const variable_list& saved,
                                     const variable_list& grad_outputs) {
    InputGradients wanted{saved[input], recorded.wants[input], {}};
    const size_t inputs = saved.size() - recorded.input_of.size();
    for (const size_t l : layers) {
      const int64_t bias = recorded.bias_of[l];
      const bool wants_bias = bias >= 0 && recorded.wants[saved.size() + bias];
      wanted.layers.push_back(
          {grad_outputs[l], saved[inputs + l], recorded.wants[inputs + l], wants_bias});
    }
    return wanted;
  }
};

}  // namespace

std::vector<at::Tensor> project_recorded(const std::vector<Projection>& projections,
                                         PackedWeights& cache) {
  const Arguments arguments(projections);
  return RecordedProjections::apply(
      at::TensorList(arguments.inputs), at::TensorList(arguments.weights),
      at::TensorList(arguments.biases), arguments, projections, cache);
}

}  // namespace mha::detail
