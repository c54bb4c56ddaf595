#pragma once

#include <ATen/core/Tensor.h>
#include <mha/attention_attribution.h>

#include <cstdint>
#include <memory>

#include "map/map_state.h"

namespace mha::detail {

/// What an `AttentionAttribution` keeps.
struct AttributionState {
  /// value (N, Hk, S, Dv) and grad_output (N, H, L, Dv), floating, on the map's device.
  AttributionState(const MapState& map, const at::Tensor& value, const at::Tensor& grad_output);

  /// What a method computes from. Throws if a kept tensor was modified since.
  MapView view(Attribution attribution) const;
  /// The same on another device. Throws likewise.
  std::shared_ptr<const AttributionState> to(at::Device device) const;

  std::shared_ptr<const MapState> map;  // without gradients
  at::Tensor value, grad_output;        // likewise

 private:
  void check_unmodified() const;

  int64_t value_version_, grad_version_;
};

}  // namespace mha::detail
