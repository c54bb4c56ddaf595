// Guards that the benchmark runs each of its cases on a device, ours and torch's: that what is
// timed is there and agrees, which `measure` checks. No time is compared with another.
#include <c10/util/Exception.h>

#include "device/device_test.h"
#include "measure.h"
#include "workload.h"

namespace mha::test {
namespace {

class BenchDeviceTest : public DeviceTest {};

TEST_F(BenchDeviceTest, EveryKindOfCaseRunsThere) {
  using bench::Kind;
  for (const auto kind : {Kind::core_forward, Kind::core_forward_causal,
                          Kind::core_forward_window, Kind::core_backward, Kind::module_forward,
                          Kind::module_forward_causal, Kind::module_weights, Kind::module_train,
                          Kind::decode, Kind::projection, Kind::cross_decode}) {
    const bench::Case what{kind, {2, 6, 16, 2}};
    SCOPED_TRACE(bench::name_of(what));
    const auto found = bench::measure(what, /*seconds=*/0, test_device());
    EXPECT_GT(found.ours.median_ms, 0);
    EXPECT_EQ(found.builtin.has_value(), bench::computes(bench::Side::builtin, kind));
    EXPECT_EQ(found.sdpa.has_value(), bench::computes(bench::Side::sdpa, kind));
    EXPECT_EQ(found.limits.limit.has_value(), test_device().is_cpu());
    const auto workload = bench::make_workload(what, test_device());
    for (const auto& result : workload.ours.run()) EXPECT_EQ(result.device(), test_device());
  }
}

}  // namespace
}  // namespace mha::test
