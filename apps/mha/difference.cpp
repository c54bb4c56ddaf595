#include "difference.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

namespace mha::cli {
namespace {

double difference_of(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  const double difference = std::abs(a - b);
  return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
}

}  // namespace

Difference largest_difference(const at::Tensor& actual, const at::Tensor& expected) {
  TORCH_INTERNAL_ASSERT(actual.sizes() == expected.sizes(), actual.sizes(), " and ",
                        expected.sizes());
  const at::Tensor a = actual.to(at::kDouble).contiguous();
  const at::Tensor b = expected.to(at::kDouble).contiguous();
  const auto* values = static_cast<const double*>(a.data_ptr());
  const auto* others = static_cast<const double*>(b.data_ptr());
  Difference result;
  int64_t at = 0;
  for (int64_t i = 0; i < a.numel(); ++i) {
    const double difference = difference_of(values[i], others[i]);
    if (i == 0 || difference > result.largest) {
      result = {difference, {}, values[i], others[i]};
      at = i;
    }
  }
  result.at.resize(a.numel() == 0 ? 0 : static_cast<size_t>(a.dim()));
  for (size_t d = result.at.size(); d-- > 0;) {
    const int64_t size = a.size(static_cast<int64_t>(d));
    result.at[d] = at % size;
    at /= size;
  }
  return result;
}

}  // namespace mha::cli
