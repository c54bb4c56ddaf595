#pragma once

// What differs between the LibTorch versions that are supported (1.13 and later), in one place.

#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>
#if __has_include(<ATen/detail/PrivateUse1HooksInterface.h>)
#include <ATen/detail/PrivateUse1HooksInterface.h>
#endif
#include <torch/version.h>

#include <cstdint>
#include <optional>

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 5)
#define MHA_TORCH_HAS_GROUPED_SDPA 1
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#else
#define MHA_TORCH_HAS_GROUPED_SDPA 0
#endif

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

#if MHA_TORCH_HAS_GROUPED_SDPA
/// Whether LibTorch would compute `at::scaled_dot_product_attention`, grouped heads included,
/// by a kernel of its own and not as a composition that holds the weights.
inline bool has_fused_attention(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const at::Tensor& mask, bool causal,
                                double scale) {
  constexpr int64_t composition = 0;  // at::SDPBackend::math
  return at::_fused_sdp_choice(query, key, value,
                               mask.defined() ? std::make_optional(mask) : std::nullopt, 0.0,
                               causal, scale, key.size(1) != query.size(1)) != composition;
}

inline at::Tensor fused_attention(const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, const at::Tensor& mask, bool causal,
                                  double scale) {
  return at::scaled_dot_product_attention(
      query, key, value, mask.defined() ? std::make_optional(mask) : std::nullopt, 0.0, causal,
      scale, key.size(1) != query.size(1));
}
#else
inline bool has_fused_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                const at::Tensor&, bool, double) {
  return false;
}

inline at::Tensor fused_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                  const at::Tensor&, bool, double) {
  TORCH_INTERNAL_ASSERT(false, "LibTorch before 2.5 has no grouped fused attention");
}
#endif

}  // namespace mha::torch_compat
