#include "runtime/finite.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "runtime/attention_path.h"
#include "runtime/cpu_kernels.h"
#include "runtime/run_tasks.h"

namespace mha::detail {
namespace {

bool all_finite_on_cpu(const at::Tensor& tensor) {
  const cpu::Kernels& kernels = cpu_kernels();
  const float* data = tensor.data_ptr<float>();
  constexpr int64_t chunk = 1 << 16;
  const int64_t count = tensor.numel();
  std::atomic<bool> finite{true};
  run_tasks((count + chunk - 1) / chunk, 1, [&](int64_t i, float*) {
    const int64_t begin = i * chunk;
    if (finite && !kernels.all_finite(data + begin, std::min(chunk, count - begin))) {
      finite = false;
    }
  });
  return finite;
}

}  // namespace

bool may_be_non_finite(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || tensor.is_meta()) return false;
  if (!may_branch_on_numbers(tensor)) return true;
  if (tensor.scalar_type() == at::kFloat) {
    // In whatever order the numbers lie in memory, if they lie there without gaps.
    const bool dense = tensor.is_non_overlapping_and_dense();
    return !all_finite_on_cpu(dense ? tensor : tensor.contiguous());
  }
  return !std::isfinite(tensor.detach().sum(at::kDouble).item<double>());
}

bool may_branch_on_numbers(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && !is_tracing();
}

bool may_have_marks(const at::Tensor& marks) {
  if (!marks.defined() || marks.is_meta()) return false;
  return !may_branch_on_numbers(marks) || marks.any().item<bool>();
}

at::Tensor row_is_finite(const at::Tensor& tensor) {
  return at::isfinite(tensor.detach()).all(-1);
}

at::Tensor finite_rows(const at::Tensor& tensor) {
  return tensor.masked_fill(row_is_finite(tensor).logical_not().unsqueeze(-1), 0);
}

std::vector<int64_t> marked_rows(const at::Tensor& marks) {
  const auto indices = marks.flatten(0, -2).any(0).nonzero().flatten();
  return {indices.data_ptr<int64_t>(), indices.data_ptr<int64_t>() + indices.numel()};
}

}  // namespace mha::detail
