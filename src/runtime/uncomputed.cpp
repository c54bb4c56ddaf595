#include "runtime/uncomputed.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace mha::detail {
namespace {

at::Tensor poisoned(at::Tensor tensor) {
  if (!poisons_memory()) return tensor;
  if (tensor.is_floating_point()) {
    tensor.fill_(std::numeric_limits<double>::quiet_NaN());
  } else if (tensor.scalar_type() == at::kLong) {
    tensor.fill_(std::numeric_limits<int64_t>::min());
  }
  return tensor;
}

}  // namespace

bool poisons_memory() {
  static const bool poisons = [] {
    const char* wanted = std::getenv("MHA_POISON_SCRATCH");
    if (!wanted || !*wanted || std::strcmp(wanted, "0") == 0) return false;
    TORCH_CHECK(std::strcmp(wanted, "1") == 0, "MHA_POISON_SCRATCH: expected 0 or 1, found ",
                wanted);
    return true;
  }();
  return poisons;
}

void poison(float* data, int64_t count) {
  if (poisons_memory()) {
    std::fill(data, data + count, std::numeric_limits<float>::quiet_NaN());
  }
}

at::Tensor uncomputed(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return poisoned(at::empty(sizes, options));
}

at::Tensor uncomputed_like(const at::Tensor& tensor, at::MemoryFormat format) {
  return poisoned(at::empty_like(tensor, format));
}

}  // namespace mha::detail
