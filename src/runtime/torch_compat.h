#pragma once

// What differs between the LibTorch versions that are supported (1.13 and later), in one place.

#include <ATen/autocast_mode.h>
#include <torch/version.h>

namespace mha::torch_compat {

inline bool autocast_enabled(at::DeviceType device) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)
  return at::autocast::is_autocast_enabled(device);
#else
  return device == at::kCPU ? at::autocast::is_cpu_enabled() : at::autocast::is_enabled();
#endif
}

}  // namespace mha::torch_compat
