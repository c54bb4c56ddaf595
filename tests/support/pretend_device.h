#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// A device that every machine has. Its tensors lie in memory of the CPU, but LibTorch takes
// them for those of another device (PrivateUse1): an operator that is given tensors of both
// fails, as on a GPU, and what the host reads from the device is known by name. What its
// tensors hold before they are computed is NaN.
namespace mha::test {

at::Device pretend_device();

/// What has passed between host and device.
struct HostTraffic {
  /// Operators that a device is waited for by: `item`, copies to the CPU, and those whose
  /// result has a size of its own (`nonzero`, an index of bools).
  std::vector<std::string> reads;
  /// Copies from the CPU.
  int64_t writes = 0;
};

/// What passes while `call` runs, on any thread.
HostTraffic traffic_of(const std::function<void()>& call);

/// The bytes that the device's tensors take at most at once while `call` runs, beyond those
/// before.
int64_t device_peak_of(const std::function<void()>& call);

}  // namespace mha::test
