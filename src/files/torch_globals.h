#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "files/dtype.h"

namespace mha::detail {

// The globals of Python's torch that files of torch.save name, and what they stand for.

/// Functions that make a tensor of their arguments.
enum class Rebuild : uint8_t {
  none,       // it is no such function
  tensor,     // storage, offset, sizes, strides
  tensor_v2,  // and requires_grad, hooks, perhaps flags
  tensor_v3,  // and before the flags a dtype, where the storage has none
  parameter,  // a tensor, and what a Parameter has beside it
  from_type,  // such a function, a type, the function's arguments, a state
  other,      // of a kind that is not read: sparse, quantized, nested, without storage
};
Rebuild torch_rebuild(std::string_view global);

/// The type "torch.float32"; null if the global is none.
const DtypeInfo* torch_dtype(std::string_view global);

/// The type that a storage of the class "torch.FloatStorage" has; null if it is no such class.
const DtypeInfo* torch_storage_dtype(std::string_view global);

/// Whether a tensor of that type is no more than its numbers.
bool is_plain_tensor_type(std::string_view global);

/// Whether the global is one of these, or of the other containers of tensors. Throws
/// `c10::Error` that starts with `where` if it is of a TorchScript archive.
bool is_known_global(const std::string& where, const std::string& global);

}  // namespace mha::detail
