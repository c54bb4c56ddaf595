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

const char* forced_reason() {
  return *forced_path() == Path::torch ? "MHA_PATH=torch is set" : "MHA_PATH=plain is set";
}

}  // namespace

std::optional<Path> forced_path() {
  static const auto forced = []() -> std::optional<Path> {
    const char* wanted = std::getenv("MHA_PATH");
    if (!wanted || !*wanted || std::strcmp(wanted, "auto") == 0) return std::nullopt;
    if (std::strcmp(wanted, "torch") == 0) return Path::torch;
    TORCH_CHECK(std::strcmp(wanted, "plain") == 0,
                "MHA_PATH: expected auto, plain or torch, found ", wanted);
    return Path::plain;
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
  if (followed) return {Path::plain, followed_reason};
  if (const auto forced = forced_path()) return {*forced, forced_reason()};
  if (!device.is_cpu()) return {Path::torch, "the kernels are for the CPU"};
  if (dtype == at::kDouble) return {Path::torch, "the kernels compute in float32"};
  if (head_dim > largest_head || value_dim > largest_head) {
    return {Path::torch, "the kernels are for head sizes up to 256"};
  }
  return {Path::fused, "nothing speaks against the kernels"};
}

PathChoice choose_projection_path(at::Device device, at::ScalarType dtype, bool followed) {
  if (forced_path()) return {Path::plain, forced_reason()};
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
