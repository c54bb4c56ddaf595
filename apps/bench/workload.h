#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <optional>
#include <vector>

#include "cases.h"

namespace mha::bench {

/// Whose code computes.
enum class Side {
  ours,
  builtin,  ///< torch::nn::MultiheadAttention, on input that is sequence-first already
  sdpa,     ///< at::scaled_dot_product_attention; for the module between four at::linear, for
            ///< `projection` two of these alone
};
constexpr Side kSides[] = {Side::ours, Side::builtin, Side::sdpa};

/// "mha", "builtin" or "sdpa".
const char* name_of(Side side);

/// Whether that side computes such a thing: the built-in has no function on split heads and
/// none that projects alone, SDPA no weights.
bool computes(Side side, Kind kind);

/// What one side does to compute a case, on input that is ready.
struct Computation {
  /// The results, in this library's layouts, so that sides can be compared.
  std::function<std::vector<at::Tensor>()> run;
  /// If not empty, to be called before each run, outside the measured time.
  std::function<void()> prepare;
  /// What it takes from memory at most, in bytes, beyond input and parameters.
  double memory = 0;
};

/// A case with input and parameters, which are the same for all sides.
struct Workload {
  Computation ours;
  std::optional<Computation> builtin, sdpa;  ///< where that side `computes` the kind

  /// Null where there is no such peer.
  const Computation* side(Side side) const;
};

/// Input and parameters on that device.
Workload make_workload(const Case& what, at::Device device = at::kCPU);

/// Throws if the sides' results differ by more than rounding: a time for another computation
/// would say nothing.
void check_agreement(const Case& what, const std::vector<at::Tensor>& ours, Side side,
                     const std::vector<at::Tensor>& theirs);

}  // namespace mha::bench
