#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace mha::detail {

/// One element type of the safetensors format.
struct DtypeInfo {
  std::string_view name;               // as files spell it, for example "BF16"
  std::string_view torch_name;         // Python's, "bfloat16"; empty: torch has none
  int64_t bits;                        // size of one element
  std::optional<at::ScalarType> type;  // empty: only its size is known, it cannot be read
};

/// The element type that files call `name`; null if the format has none of that name. Pointers
/// to element types compare in the format's own order, in which files store the largest first.
const DtypeInfo* find_dtype(std::string_view name);

/// The element type of tensors of `type`; null if it cannot be stored.
const DtypeInfo* find_dtype(at::ScalarType type);

/// The element type that Python's torch calls `torch_name`; null if none is.
const DtypeInfo* find_torch_dtype(std::string_view torch_name);

/// The names of all element types, for an error message.
std::string dtype_names();

}  // namespace mha::detail
