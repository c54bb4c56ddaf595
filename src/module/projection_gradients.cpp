#include "module/projection_gradients.h"

#include <ATen/TensorOperators.h>

#include <algorithm>

#include "module/tile_projection.h"
#include "runtime/cpu_kernels.h"
#include "runtime/recycled.h"
#include "runtime/run_tasks.h"
#include "runtime/uncomputed.h"

namespace mha::detail {
namespace {

// Terms of one running sum, whose rounding grows with them, and rows of one panel: with them it
// stays in the second-level cache.
constexpr int64_t sum_length = 1024;
// Rows of the input that are copied to panels at a time.
constexpr int64_t copied_rows = 4 * sum_length;
// Panels of a gradient that a task holds while those of the input pass by.
constexpr int64_t most_held = 4;
// Up to so many rows, a panel of the weight is read too seldom to be worth a copy.
constexpr int64_t few_rows = 128;

// A matrix whose columns lie side by side.
struct RowMatrix {
  explicit RowMatrix(const at::Tensor& given)
      : tensor(given.stride(1) == 1 ? given : given.contiguous()),
        data(tensor.data_ptr<float>()),
        stride(tensor.stride(0)),
        rows(tensor.size(0)),
        columns(tensor.size(1)) {}
  at::Tensor tensor;
  const float* data;
  int64_t stride, rows, columns;
};

RowMatrix rows_of(const at::Tensor& tensor, int64_t columns) {
  return RowMatrix(tensor.reshape({-1, columns}));
}

int64_t ceil_divided(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// One layer in the kernels' terms.
struct ReadLayer {
  RowMatrix grad_output, weight;
  float *grad_weight, *grad_bias;  // null: not wanted
};

// All layers of one input. A task of the input's gradient is a panel of its columns, for some
// of the rows; one of a weight's is some panels of its rows.
class GradientProducts {
 public:
  explicit GradientProducts(InputGradients& wanted)
      : kernels_(cpu_kernels()),
        tile_(kernels_.tile),
        threads_(at::get_num_threads()),
        input_(rows_of(wanted.input, wanted.input.size(2))) {
    if (wanted.wants_input) {
      wanted.grad_input = uncomputed(wanted.input.sizes(), at::kFloat);
      grad_input_ = wanted.grad_input.data_ptr<float>();
    }
    for (LayerGradients& layer : wanted.layers) add(layer);
    row_parts_ = threads_ > 1 ? ceil_divided(4 * threads_, panels(input_.columns)) : 1;
    int64_t weight_panels = 0;
    for (const ReadLayer& layer : layers_) weight_panels += panels(layer.weight.rows);
    held_ = std::clamp<int64_t>(weight_panels / (4 * threads_), 1, most_held);
    for (const ReadLayer& layer : layers_) {
      if (!layer.grad_weight && !layer.grad_bias) continue;
      reads_input_ = reads_input_ || layer.grad_weight;
      for (int64_t first = 0; first < layer.weight.rows; first += held_ * tile_) {
        weight_tasks_.push_back({&layer, first});
      }
    }
  }

  void run() {
    const int64_t input_tasks = grad_input_ ? panels(input_.columns) * row_parts_ : 0;
    const int64_t scratch = sum_length * tile_ * std::max<int64_t>(held_, 1);
    const auto weight_tasks = static_cast<int64_t>(weight_tasks_.size());
    for (int64_t begin = 0; begin < input_.rows; begin += copied_rows) {
      const int64_t rows = std::min(copied_rows, input_.rows - begin);
      const at::Tensor copied =
          reads_input_ ? recycled({panels(input_.columns), rows, tile_}) : at::Tensor();
      const float* panels_of_input = reads_input_ ? copy_input(begin, rows, copied) : nullptr;
      // The input's gradient is found on the way.
      const int64_t others = begin == 0 ? input_tasks : 0;
      run_tasks(weight_tasks + others, scratch, [&](int64_t i, float* own) {
        if (i < weight_tasks) {
          find_weight(weight_tasks_[i], begin, rows, panels_of_input, own);
        } else {
          find_input(i - weight_tasks, own);
        }
      });
    }
  }

 private:
  struct WeightTask {
    const ReadLayer* layer;
    int64_t first;  // row of the weight
  };

  void add(LayerGradients& layer) {
    const int64_t columns = layer.weight.size(0);
    layers_.push_back(
        {rows_of(layer.grad_output, columns), RowMatrix(layer.weight), nullptr, nullptr});
    if (layer.wants_weight) {
      layer.grad_weight = uncomputed(layer.weight.sizes(), at::kFloat);
      layers_.back().grad_weight = layer.grad_weight.data_ptr<float>();
    }
    if (layer.wants_bias) {
      layer.grad_bias = uncomputed({columns}, at::kFloat);
      layers_.back().grad_bias = layer.grad_bias.data_ptr<float>();
    }
  }

  int64_t panels(int64_t columns) const { return ceil_divided(columns, tile_); }
  int64_t width(int64_t columns, int64_t first) const {
    return std::min(tile_, columns - first);
  }

  // [panel][row][tile]
  const float* copy_input(int64_t begin, int64_t rows, const at::Tensor& copied) const {
    float* to = copied.data_ptr<float>();
    run_tasks(panels(input_.columns), 1, [&](int64_t panel, float*) {
      const int64_t first = panel * tile_;
      kernels_.copy_panel(input_.data + begin * input_.stride + first, input_.stride, rows,
                          width(input_.columns, first), to + first * rows);
    });
    return to;
  }

  void find_input(int64_t task, float* panel) const {
    const int64_t first = task / row_parts_ * tile_, columns = width(input_.columns, first);
    const int64_t part = ceil_divided(ceil_divided(input_.rows, row_parts_), 8) * 8;
    const int64_t begin = std::min(task % row_parts_ * part, input_.rows);
    const int64_t rows = std::min(part, input_.rows - begin);
    if (rows == 0) return;
    bool adds = false;
    for (const ReadLayer& layer : layers_) {
      for (int64_t k = 0; k < layer.weight.rows; k += sum_length) {
        const int64_t depth = std::min(sum_length, layer.weight.rows - k);
        const float* from = layer.weight.data + k * layer.weight.stride + first;
        int64_t stride = layer.weight.stride;
        if (rows > few_rows || columns % 16 != 0) {
          kernels_.copy_panel(from, stride, depth, columns, panel);
          from = panel;
          stride = tile_;
        }
        const RowMatrix& a = layer.grad_output;
        kernels_.multiply_panel({rows, columns, depth, a.data + begin * a.stride + k, a.stride,
                                 1, from, stride, grad_input_ + begin * input_.columns + first,
                                 input_.columns, adds});
        adds = true;
      }
    }
  }

  // What `rows` rows from `begin` on, copied to `panels_of_input`, give to a task's gradients.
  void find_weight(const WeightTask& task, int64_t begin, int64_t rows,
                   const float* panels_of_input, float* held) const {
    const ReadLayer& layer = *task.layer;
    const RowMatrix& grad_output = layer.grad_output;
    const int64_t end = std::min(task.first + held_ * tile_, grad_output.columns);
    for (int64_t k = 0; k < rows; k += sum_length) {
      const int64_t depth = std::min(sum_length, rows - k);
      const bool adds = begin + k > 0;
      for (int64_t m = task.first; m < end; m += tile_) {
        float* panel = held + (m - task.first) * sum_length;
        const int64_t columns = width(grad_output.columns, m);
        kernels_.copy_panel(grad_output.data + (begin + k) * grad_output.stride + m,
                            grad_output.stride, depth, columns, panel);
        if (layer.grad_bias) {
          kernels_.sum_panel(panel, depth, columns, adds, layer.grad_bias + m);
        }
      }
      for (int64_t c = 0; layer.grad_weight && c < input_.columns; c += tile_) {
        for (int64_t m = task.first; m < end; m += tile_) {
          kernels_.multiply_panel({width(grad_output.columns, m), width(input_.columns, c),
                                   depth, held + (m - task.first) * sum_length, 1, tile_,
                                   panels_of_input + c * rows + k * tile_, tile_,
                                   layer.grad_weight + m * input_.columns + c, input_.columns,
                                   adds});
        }
      }
    }
  }

  const cpu::Kernels& kernels_;
  const int64_t tile_, threads_;
  const RowMatrix input_;
  float* grad_input_ = nullptr;  // null: not wanted
  std::vector<ReadLayer> layers_;
  std::vector<WeightTask> weight_tasks_;
  bool reads_input_ = false;
  int64_t row_parts_ = 1, held_ = 1;
};

}  // namespace

void find_gradients(InputGradients& wanted) {
  if (wanted.input.scalar_type() == at::kBFloat16) return find_gradients_on_tiles(wanted);
  GradientProducts(wanted).run();
}

void find_gradients_by_aten(InputGradients& wanted) {
  for (LayerGradients& layer : wanted.layers) {
    const auto grad_output = layer.grad_output.reshape({-1, layer.weight.size(0)});
    if (wanted.wants_input) {
      const auto share = grad_output.matmul(layer.weight).view(wanted.input.sizes());
      wanted.grad_input = wanted.grad_input.defined() ? wanted.grad_input + share : share;
    }
    if (layer.wants_weight) {
      layer.grad_weight =
          grad_output.t().matmul(wanted.input.reshape({-1, layer.weight.size(1)}));
    }
    if (layer.wants_bias) layer.grad_bias = grad_output.sum(0);
  }
}

}  // namespace mha::detail
