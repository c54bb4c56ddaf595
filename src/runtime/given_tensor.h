#pragma once

#include <ATen/core/Tensor.h>

#include <iosfwd>

namespace mha::detail {

/// What the numbers of a given tensor may be.
enum class Numbers {
  floating,  ///< float32, float64, bfloat16 or float16
  integers,  ///< uint8, int8, int16, int32 or int64
  bools,
  flags,  ///< all of these, and complex64 and complex128
};

/// Whether a given tensor's numbers must exist, or its shape may do (device `meta`).
enum class Memory { needed, or_meta };

/// For what may lie on another device than the call's, to which it is copied.
inline Memory memory_on(at::Device call) {
  return call.is_meta() ? Memory::or_meta : Memory::needed;
}

/// What a message calls a tensor: "subject: argument", or the subject alone. `hint` ends the
/// message about a wrong dtype.
struct GivenName {
  const char* subject;
  const char* argument = nullptr;
  const char* hint = "";
};
std::ostream& operator<<(std::ostream& stream, const GivenName& name);

/// The one check of every tensor that a caller gives: defined, strided (neither sparse, nested,
/// mkldnn nor quantized), of one of these dtypes, and with memory for all that it holds. A few
/// flags are looked at, and no number. Returns it as its memory says: with the negative and
/// conjugate bits resolved, by which gradients flow, and else the tensor itself.
at::Tensor given_tensor(const GivenName& name, const at::Tensor& tensor, Numbers numbers,
                        Memory memory = Memory::needed);

/// Whether a tensor's memory, if it is not on meta, holds its numbers as they are.
bool is_plain_memory(const at::Tensor& tensor);

/// Throws unless the tensor has memory for all that it holds.
void check_memory(const GivenName& name, const at::Tensor& tensor);

/// `tensor`, which may be undefined, with these bits resolved.
at::Tensor without_lazy_bits(const at::Tensor& tensor);

/// Whether `dtype` is one of `Numbers::floating`.
bool is_floating_dtype(at::ScalarType dtype);

}  // namespace mha::detail
