#pragma once

#include <c10/util/Exception.h>

#include <cstdint>

#include "runtime/given_tensor.h"

namespace mha::detail {

/// Throws unless `value` is one of an enum's, which count from 0 to `last` and are called
/// `names`.
template <typename Enum>
void check_enum(const GivenName& name, Enum value, Enum last, const char* names) {
  const auto number = static_cast<int64_t>(value);
  TORCH_CHECK(number >= 0 && number <= static_cast<int64_t>(last), name, ": expected ", names,
              ", found ", number);
}

}  // namespace mha::detail
