#include "device/device_test.h"

#include <ATen/Context.h>

#include <cstdlib>

#include "support/mask_samples.h"
#include "support/pretend_device.h"

namespace mha::test {
namespace {

const char* wanted_device() {
  const char* wanted = std::getenv("MHA_TEST_DEVICE");
  return wanted && *wanted ? wanted : nullptr;
}

bool can_hold(at::ScalarType dtype) {
  try {
    return (at::zeros({1}, at::TensorOptions(test_device()).dtype(dtype)) + 1).numel() == 1;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

at::Device test_device() {
  static const at::Device device = [] {
    if (!wanted_device()) return pretend_device();
    const at::Device named(wanted_device());
    // As its tensors say: with a number.
    return named.is_cpu() || named.has_index() ? named : at::Device(named.type(), 0);
  }();
  return device;
}

bool is_pretend() {
  return test_device() == pretend_device();
}

std::vector<at::ScalarType> device_dtypes() {
  std::vector<at::ScalarType> dtypes;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    if (can_hold(dtype)) dtypes.push_back(dtype);
  }
  return dtypes;
}

void DeviceTest::SetUp() {
  if (!can_hold(at::kFloat)) {
    GTEST_SKIP() << "MHA_TEST_DEVICE=" << wanted_device() << ": no such device here";
  }
  at::globalContext().setFloat32MatmulPrecision("highest");
}

at::Tensor put(const at::Tensor& tensor, const Place& place) {
  if (!tensor.defined()) return tensor;
  return tensor.is_floating_point() ? tensor.to(place.device, place.dtype)
                                    : tensor.to(place.device);
}

Tensors put_leaves(const Tensors& tensors, const Place& place) {
  Tensors leaves;
  for (const auto& tensor : tensors) leaves.push_back(leaf(put(tensor, place)));
  return leaves;
}

at::Tensor rounded(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && tensor.is_floating_point() ? tensor.to(dtype).to(at::kDouble)
                                                        : tensor;
}

::testing::AssertionResult agree(const Tensors& actual, const Tensors& expected,
                                 at::ScalarType dtype) {
  if (actual.size() != expected.size()) {
    return ::testing::AssertionFailure()
           << actual.size() << " results, expected " << expected.size();
  }
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!actual[i].defined() && !expected[i].defined()) continue;
    if (actual[i].defined() && actual[i].device() != test_device()) {
      return ::testing::AssertionFailure() << "result " << i << " is on " << actual[i].device();
    }
    const auto found = actual[i].defined() ? actual[i].detach().cpu() : at::Tensor();
    const double tolerance = expected[i].defined() && expected[i].is_floating_point()
                                 ? blas_tolerance(expected[i].to(dtype))
                                 : 0;
    if (const auto close = is_close(found, expected[i], tolerance); !close) {
      return ::testing::AssertionFailure() << "result " << i << ": " << close.message();
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult agrees_on_device(const PlacedCall& call, const Tensors& inputs,
                                            at::ScalarType dtype) {
  Tensors numbers;
  for (const auto& input : inputs) numbers.push_back(rounded(input, dtype));
  return agree(call(device_place(dtype), numbers), call(reference_place(), numbers), dtype);
}

std::vector<NamedMask> masks_of_every_kind(int64_t l, int64_t s) {
  std::vector<NamedMask> masks{
      {"none", {}},
      {"causal", Mask::causal()},
      {"causal from the top left", Mask::causal(Mask::Alignment::top_left)},
      {"a window", Mask::window(2, 1)},
      {"real queries", Mask::real_queries(at::arange(2 * l).view({2, l}) % 3)},
      {"query lengths", Mask::query_lengths(torch::tensor({l, int64_t{2}}))},
      {"alibi", Mask::alibi(alibi_slopes(2))},
      {"alibi of each sample",
       Mask::alibi(alibi_slopes(2), torch::tensor({s - l, int64_t{0}}))},
  };
  for (const auto& sample : mask_samples({2, 2, l, s})) {
    masks.push_back({sample.name, sample.mask});
    masks.push_back({"causal and of a list", Mask::causal() & sample.mask});
  }
  return masks;
}

std::vector<MapMethod> map_methods() {
  const auto one = [](const char* name, at::Tensor (AttentionMap::*method)() const) {
    return MapMethod{
        name, [method](const AttentionMap& map) -> Tensors { return {(map.*method)()}; }};
  };
  return {
      one("dense", &AttentionMap::dense),
      one("entropy", &AttentionMap::entropy),
      one("received", &AttentionMap::received),
      one("distance", &AttentionMap::distance),
      one("log_sum_exp", &AttentionMap::log_sum_exp),
      {"mean", [](const AttentionMap& map) -> Tensors { return {map.mean(), map.mean(1, 3)}; }},
      {"head", [](const AttentionMap& map) -> Tensors { return {map.head(1)}; }},
      {"rows", [](const AttentionMap& map) -> Tensors { return {map.rows(1, 3)}; }},
      {"block",
       [](const AttentionMap& map) -> Tensors { return {map.block(1, {1, 3}, {0, 2})}; }},
      {"summary",
       [](const AttentionMap& map) -> Tensors {
         const auto found = map.summary();
         return {found.entropy, found.received, found.distance};
       }},
      {"top_k",
       [](const AttentionMap& map) -> Tensors {
         const auto top = map.top_k(2);
         return {top.values, top.keys};
       },
       false},
      {"pooled", [](const AttentionMap& map) -> Tensors { return {map.pooled(2, 3)}; }},
      {"scores",
       [](const AttentionMap& map) -> Tensors {
         return {map.scores(ScoreStage::scaled), map.scores(ScoreStage::softcapped),
                 map.scores(ScoreStage::masked), map.scores(ScoreStage::masked, 1, 3)};
       },
       false}};
}

}  // namespace mha::test
