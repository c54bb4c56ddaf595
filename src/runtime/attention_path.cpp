#include "runtime/attention_path.h"

#include <ATen/TracerMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "runtime/cpu_kernels.h"
#include "runtime/torch_compat.h"

namespace mha::detail {
namespace {

constexpr const char* followed_reason =
    "a trace or forward-mode derivatives follow ATen's operators";

}  // namespace

bool plain_is_forced() {
  static const bool forced = [] {
    const char* wanted = std::getenv("MHA_PATH");
    if (!wanted || !*wanted || std::strcmp(wanted, "auto") == 0) return false;
    TORCH_CHECK(std::strcmp(wanted, "plain") == 0, "MHA_PATH: expected plain or auto, found ",
                wanted);
    return true;
  }();
  return forced;
}

bool is_tracing() {
  return at::tracer::impl::is_dispatch_enabled();
}

bool is_followed(at::TensorList tensors) {
  return is_tracing() || std::any_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
           return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
         });
}

PathChoice choose_path(at::Device device, at::ScalarType dtype, int64_t head_dim,
                       int64_t value_dim, bool followed) {
  constexpr int64_t largest_head = 256;
  if (plain_is_forced()) return {Path::plain, "MHA_PATH=plain is set"};
  if (followed) return {Path::plain, followed_reason};
  if (!device.is_cpu()) return {Path::plain, "the kernels are for the CPU"};
  if (dtype == at::kDouble) return {Path::plain, "the kernels compute in float32"};
  if (head_dim > largest_head || value_dim > largest_head) {
    return {Path::plain, "the kernels are for head sizes up to 256"};
  }
  return {Path::fused, "nothing speaks against the kernels"};
}

PathChoice choose_projection_path(at::Device device, at::ScalarType dtype, bool followed) {
  if (plain_is_forced()) return {Path::plain, "MHA_PATH=plain is set"};
  if (followed) return {Path::plain, followed_reason};
  if (torch_compat::autocast_enabled(at::kCPU))
    return {Path::plain, "autocast chooses the dtype"};
  if (!device.is_cpu()) return {Path::plain, "the kernels are for the CPU"};
  if (dtype == at::kDouble) return {Path::plain, "the kernels compute in float32"};
  if (dtype == at::kBFloat16 && !tile_kernels() && torch_multiplies_bfloat16())
    return {Path::plain, "torch's bfloat16 layer is faster"};
  return {Path::fused, "nothing speaks against the kernels"};
}

}  // namespace mha::detail
