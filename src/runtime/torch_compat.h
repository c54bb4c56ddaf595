#pragma once

// What differs between the LibTorch versions that are supported (1.13 and later), in one place.

#include <ATen/autocast_mode.h>
#if __has_include(<ATen/detail/PrivateUse1HooksInterface.h>)
#include <ATen/detail/PrivateUse1HooksInterface.h>
#endif
#include <torch/version.h>

namespace mha::torch_compat {

/// Whether the device's default generator can be had, and copied.
inline bool has_default_generator(at::Device device) {
  if (device.is_cpu() || device.is_cuda() || device.is_mps()) return true;
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 6)
  return device.is_xpu() || (device.is_privateuseone() && at::isPrivateUse1HooksRegistered());
#else
  return false;
#endif
}

inline bool autocast_enabled(at::DeviceType device) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)
  return at::autocast::is_autocast_enabled(device);
#else
  return device == at::kCPU ? at::autocast::is_cpu_enabled() : at::autocast::is_enabled();
#endif
}

}  // namespace mha::torch_compat
