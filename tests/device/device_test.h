#pragma once

#include <mha/attention_map.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "support/expect.h"

// What the tests of devices share. They run on the pretend device, or on that of
// MHA_TEST_DEVICE (cuda, mps, xpu, cpu) where there is one.
namespace mha::test {

using Tensors = std::vector<at::Tensor>;

/// That of MHA_TEST_DEVICE, else the pretend one.
at::Device test_device();
bool is_pretend();

/// The floating dtypes that it has.
std::vector<at::ScalarType> device_dtypes();

/// Skips where the device is not there, and lets it multiply float32 as such (no TF32).
class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override;
};

/// Where a call is made, and in which dtype.
struct Place {
  at::Device device;
  at::ScalarType dtype;
};
/// The CPU in float64: the composition of ATen calls there, which other tests hold against
/// loops in double, and which takes other ways than those of a device where numbers are not
/// finite.
inline Place reference_place() {
  return {at::kCPU, at::kDouble};
}
inline Place device_place(at::ScalarType dtype) {
  return {test_device(), dtype};
}

/// There, floating numbers in its dtype; undefined as it is.
at::Tensor put(const at::Tensor& tensor, const Place& place);
/// The same as leaves that ask for gradients.
Tensors put_leaves(const Tensors& tensors, const Place& place);

/// Rounded to `dtype` and back, so that both sides compute with the same numbers.
at::Tensor rounded(const at::Tensor& tensor, at::ScalarType dtype);

/// Whether all are defined alike, lie on the device and agree with float64 results of the CPU.
///
/// As `blas_tolerance` argues: sums in another order, and functions that are right to a few
/// roundings, which a GPU's are as well once float32 is not multiplied as TF32.
::testing::AssertionResult agree(const Tensors& actual, const Tensors& expected,
                                 at::ScalarType dtype);

/// A call of which each side is given numbers at its place.
using PlacedCall = std::function<Tensors(const Place&, const Tensors&)>;
/// Makes it on the device and on the CPU.
::testing::AssertionResult agrees_on_device(const PlacedCall& call, const Tensors& inputs,
                                            at::ScalarType dtype);

struct NamedMask {
  const char* name;
  Mask mask;
};
/// All kinds of masks over (2, 2, l, s), l < s, on the CPU.
std::vector<NamedMask> masks_of_every_kind(int64_t l, int64_t s);

struct MapMethod {
  const char* name;
  std::function<Tensors(const AttentionMap&)> call;
  bool is_differentiable = true;
};
/// All methods of a map, of at least 3 queries and keys and 2 heads.
std::vector<MapMethod> map_methods();

}  // namespace mha::test
