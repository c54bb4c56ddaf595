#include "module/tile_projection.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "runtime/cpu_kernels.h"
#include "runtime/recycled.h"
#include "runtime/run_tasks.h"
#include "runtime/uncomputed.h"

namespace mha::detail {
namespace {

// Rows and columns of a block of the kernels, and depth of a step.
constexpr int64_t block_edge = 32;

int64_t blocks_of(int64_t count) {
  return (count + block_edge - 1) / block_edge;
}

// As the kernels read a matrix: (N, T, columns), or in heads (N, T, H, D).
at::Tensor in_rows(const at::Tensor& tensor) {
  const bool whole_heads = tensor.dim() == 3 || tensor.size(2) == 1 || tensor.size(3) % 16 == 0;
  const auto rows = whole_heads ? tensor : tensor.flatten(2);
  return rows.stride(-1) == 1 || rows.size(-1) == 1 ? rows : rows.contiguous();
}

template <typename T>
cpu::TileMatrix<T> matrix_of(const at::Tensor& rows) {
  cpu::TileMatrix<T> matrix;
  matrix.data = static_cast<T*>(rows.data_ptr());
  matrix.rows = rows.size(0) * rows.size(1);
  matrix.rows_per_sample = rows.size(1);
  matrix.n = rows.stride(0);
  matrix.t = rows.stride(1);
  const bool in_heads = rows.dim() == 4;
  matrix.group = rows.size(-1);
  matrix.group_stride = in_heads ? rows.stride(2) : matrix.group;
  matrix.columns = in_heads ? rows.size(2) * matrix.group : matrix.group;
  return matrix;
}

// The blocks of one product that each of its tasks computes.
struct Split {
  int64_t rows, columns;

  int64_t tasks(const cpu::TileProduct& product) const {
    return column_tasks(product) * ((blocks_of(product.output.rows) + rows - 1) / rows);
  }
  int64_t column_tasks(const cpu::TileProduct& product) const {
    return (blocks_of(product.output.columns) + columns - 1) / columns;
  }
  // All columns of some rows one after the other, so that a thread reads those again.
  cpu::TileBlocks task(const cpu::TileProduct& product, int64_t index) const {
    const int64_t row = index / column_tasks(product) * rows;
    const int64_t column = index % column_tasks(product) * columns;
    return {row, std::min(row + rows, blocks_of(product.output.rows)), column,
            std::min(column + columns, blocks_of(product.output.columns))};
  }
};

// Large tasks read the least; there are enough for all threads to end together.
Split split_of(const cpu::TileProduct& product, int64_t wanted_tasks) {
  constexpr int64_t most_rows = 8, most_columns = 32, fewest_columns = 4, fewest_rows = 2;
  Split split{std::min(most_rows, blocks_of(product.output.rows)),
              std::min(most_columns, blocks_of(product.output.columns))};
  while (split.tasks(product) < wanted_tasks) {
    if (split.columns > fewest_columns) {
      split.columns = (split.columns + 1) / 2;
    } else if (split.rows > fewest_rows) {
      split.rows = (split.rows + 1) / 2;
    } else {
      break;
    }
  }
  return split;
}

enum class Part { left, right };
enum class Depth { along_rows, down_rows };

// Products, and before them what they need: sides to pack and columns to sum.
class TileWork {
 public:
  explicit TileWork(const cpu::TileKernels& kernels) : kernels_(kernels) {}

  // Memory for a side that `pack` fills, perhaps from several matrices.
  cpu::BFloat16* side(int64_t count, int64_t depth) {
    kept_.push_back(recycled({(kernels_.side_size(count, depth) + 1) / 2}));
    return static_cast<cpu::BFloat16*>(kept_.back().data_ptr());
  }
  void pack(const at::Tensor& rows, Part part, Depth depth, cpu::BFloat16* to,
            int64_t first_step = 0, int64_t steps = 0) {
    cpu::TileSide side;
    side.matrix = matrix_of<const cpu::BFloat16>(rows);
    side.is_left = part == Part::left;
    side.depth_is_rows = depth == Depth::down_rows;
    side.first_step = first_step;
    side.steps = steps;
    const int64_t count = side.depth_is_rows ? side.matrix.columns : side.matrix.rows;
    add_tasks(blocks_of(count),
              [this, side, to](int64_t block) { kernels_.pack_side(side, block, to); });
    kept_.push_back(rows);
  }
  void sum_columns(const at::Tensor& rows, const at::Tensor& sums) {
    const auto matrix = matrix_of<const cpu::BFloat16>(rows);
    auto* to = static_cast<cpu::BFloat16*>(sums.data_ptr());
    add_tasks(blocks_of(matrix.columns),
              [this, matrix, to](int64_t block) { kernels_.sum_columns(matrix, block, to); });
    kept_.push_back(rows);
  }
  cpu::TileProduct& multiply(int64_t depth, const cpu::BFloat16* left,
                             const cpu::BFloat16* right, const at::Tensor& output) {
    cpu::TileProduct product;
    product.depth = depth;
    product.left = left;
    product.right = right;
    product.output = matrix_of<cpu::BFloat16>(output);
    products_.push_back(product);
    return products_.back();
  }
  void keep(at::Tensor tensor) { kept_.push_back(std::move(tensor)); }

  void run() const {
    run_tasks(first_tasks_, 0, [&](int64_t task, float*) {
      for (const FirstTasks& first : first_) {
        if (task < first.count) return first.run(task);
        task -= first.count;
      }
    });
    if (!products_.empty()) multiply_all();
  }

 private:
  struct FirstTasks {
    int64_t count;
    std::function<void(int64_t)> run;
  };
  void add_tasks(int64_t count, std::function<void(int64_t)> run) {
    first_.push_back({count, std::move(run)});
    first_tasks_ += count;
  }

  void multiply_all() const {
    const int64_t threads = at::get_num_threads();
    const auto each = static_cast<int64_t>(products_.size());
    const int64_t wanted = threads > 1 ? (4 * threads + each - 1) / each : 1;
    std::vector<Split> splits;
    int64_t tasks = 0, scratch_size = 0;
    for (const cpu::TileProduct& product : products_) {
      const Split split = split_of(product, wanted);
      splits.push_back(split);
      tasks += split.tasks(product);
      scratch_size = std::max(scratch_size,
                              kernels_.product_scratch(product.depth, split.task(product, 0)));
    }
    run_tasks(tasks, scratch_size, [&](int64_t task, float* scratch) {
      for (size_t i = 0; i < products_.size(); ++i) {
        const cpu::TileProduct& product = products_[i];
        const int64_t own = splits[i].tasks(product);
        if (task < own) {
          return kernels_.multiply_sides(product, splits[i].task(product, task), scratch);
        }
        task -= own;
      }
    });
  }

  const cpu::TileKernels& kernels_;
  std::vector<at::Tensor> kept_;  // what is read, and packed
  std::vector<FirstTasks> first_;
  int64_t first_tasks_ = 0;
  std::vector<cpu::TileProduct> products_;
};

}  // namespace

void project_on_tiles(const std::vector<Projection>& projections, PackedWeights& cache) {
  const cpu::TileKernels& kernels = *tile_kernels();
  TileWork work(kernels);
  std::vector<std::shared_ptr<const at::Tensor>> weights;
  std::vector<std::pair<at::Tensor, const cpu::BFloat16*>> inputs;  // each once
  for (const Projection& projection : projections) {
    const at::Tensor& input = projection.input;
    const int64_t inner = input.size(2);
    auto found = std::find_if(inputs.begin(), inputs.end(),
                              [&](const auto& other) { return other.first.is_same(input); });
    if (found == inputs.end()) {
      auto* packed = work.side(input.size(0) * input.size(1), inner);
      work.pack(in_rows(input), Part::left, Depth::along_rows, packed);
      found = inputs.insert(found, {input, packed});
    }
    weights.push_back(cache.get(projection.slot, projection.weight, kernels));
    const auto* weight = static_cast<const cpu::BFloat16*>(weights.back()->data_ptr());
    cpu::TileProduct& product = work.multiply(inner, found->second, weight, projection.output);
    if (!projection.bias.defined()) continue;
    const auto bias = projection.bias.detach().to(at::kFloat).contiguous();
    product.bias = bias.data_ptr<float>();
    work.keep(bias);
  }
  work.run();
}

namespace {

// grad_input = sum of grad_output weight: one product, as deep as all layers have columns.
void add_input_gradient(InputGradients& wanted, TileWork& work) {
  int64_t steps = 0;
  for (const LayerGradients& layer : wanted.layers) steps += blocks_of(layer.weight.size(0));
  const int64_t depth = steps * block_edge;
  const int64_t rows = wanted.input.size(0) * wanted.input.size(1);
  auto* left = work.side(rows, depth);
  auto* right = work.side(wanted.input.size(2), depth);
  int64_t first = 0;
  for (const LayerGradients& layer : wanted.layers) {
    work.pack(in_rows(layer.grad_output), Part::left, Depth::along_rows, left, first, steps);
    work.pack(in_rows(layer.weight.detach().unsqueeze(0)), Part::right, Depth::down_rows, right,
              first, steps);
    first += blocks_of(layer.weight.size(0));
  }
  wanted.grad_input = uncomputed(wanted.input.sizes(), wanted.input.options());
  work.multiply(depth, left, right, wanted.grad_input);
}

// grad_weight = grad_output^T input, of each layer.
void add_weight_gradients(InputGradients& wanted, TileWork& work) {
  const int64_t rows = wanted.input.size(0) * wanted.input.size(1);
  cpu::BFloat16* right = nullptr;
  for (LayerGradients& layer : wanted.layers) {
    if (!layer.wants_weight) continue;
    if (!right) {
      right = work.side(wanted.input.size(2), rows);
      work.pack(in_rows(wanted.input), Part::right, Depth::down_rows, right);
    }
    auto* left = work.side(layer.weight.size(0), rows);
    work.pack(in_rows(layer.grad_output), Part::left, Depth::down_rows, left);
    layer.grad_weight = uncomputed(layer.weight.sizes(), layer.weight.options());
    work.multiply(rows, left, right, layer.grad_weight.unsqueeze(0));
  }
}

}  // namespace

void find_gradients_on_tiles(InputGradients& wanted) {
  TileWork work(*tile_kernels());
  if (wanted.wants_input) add_input_gradient(wanted, work);
  add_weight_gradients(wanted, work);
  for (LayerGradients& layer : wanted.layers) {
    if (!layer.wants_bias) continue;
    layer.grad_bias = uncomputed({layer.weight.size(0)}, layer.weight.options());
    work.sum_columns(in_rows(layer.grad_output), layer.grad_bias);
  }
  work.run();
}

}  // namespace mha::detail
