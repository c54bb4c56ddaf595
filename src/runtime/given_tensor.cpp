#include "runtime/given_tensor.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>

#include <ostream>

namespace mha::detail {
namespace {

bool is_integer_dtype(at::ScalarType dtype) {
  return dtype == at::kByte || dtype == at::kChar || dtype == at::kShort || dtype == at::kInt ||
         dtype == at::kLong;
}

bool holds(at::ScalarType dtype, Numbers numbers) {
  switch (numbers) {
    case Numbers::floating:
      return is_floating_dtype(dtype);
    case Numbers::integers:
      return is_integer_dtype(dtype);
    case Numbers::bools:
      return dtype == at::kBool;
    case Numbers::flags:
      break;
  }
  return dtype == at::kBool || is_integer_dtype(dtype) || is_floating_dtype(dtype) ||
         dtype == at::kComplexFloat || dtype == at::kComplexDouble;
}

const char* text(Numbers numbers) {
  switch (numbers) {
    case Numbers::floating:
      return "a floating dtype (float32, float64, bfloat16 or float16)";
    case Numbers::integers:
      return "an integer dtype (uint8, int8, int16, int32 or int64)";
    case Numbers::bools:
      return "bool";
    case Numbers::flags:
      break;
  }
  return "a bool, integer, floating or complex dtype";
}

void check_layout(const GivenName& name, const at::Tensor& tensor) {
  constexpr const char* expected = ": expected a strided tensor, found ";
  TORCH_CHECK(!tensor.is_nested(), name, expected, "a nested one");
  TORCH_CHECK(tensor.layout() == at::kStrided, name, expected, "layout ", tensor.layout());
  TORCH_CHECK(!tensor.is_quantized(), name, expected, "a quantized one, ",
              tensor.scalar_type());
  TORCH_CHECK(tensor.has_storage(), name, expected, "one without memory of its own");
}

}  // namespace

std::ostream& operator<<(std::ostream& stream, const GivenName& name) {
  stream << name.subject;
  return name.argument ? stream << ": " << name.argument : stream;
}

namespace {

size_t bytes_needed(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                          tensor.dtype().itemsize(),
                                          static_cast<size_t>(tensor.storage_offset()));
}

}  // namespace

bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_neg() && !tensor.is_conj() &&
         (tensor.is_meta() || (!tensor._is_zerotensor() && tensor.has_storage() &&
                               bytes_needed(tensor) <= tensor.storage().nbytes()));
}

// A tensor of zeros that has none, one whose memory was freed, and a view beyond its end have
// sizes like any other.
void check_memory(const GivenName& name, const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_meta(), name, ": expected a tensor with memory, found one on meta");
  TORCH_CHECK(!tensor._is_zerotensor(), name,
              ": expected a tensor with memory, found zeros without, of shape ",
              tensor.sizes());
  const auto needed = bytes_needed(tensor);
  TORCH_CHECK(needed <= tensor.storage().nbytes(), name, ": expected memory of ", needed,
              " bytes for shape ", tensor.sizes(), ", found ", tensor.storage().nbytes());
}

bool is_floating_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 ||
         dtype == at::kHalf;
}

at::Tensor without_lazy_bits(const at::Tensor& tensor) {
  if (!tensor.defined() || !(tensor.is_neg() || tensor.is_conj())) return tensor;
  return tensor.resolve_conj().resolve_neg();
}

at::Tensor given_tensor(const GivenName& name, const at::Tensor& tensor, Numbers numbers,
                        Memory memory) {
  TORCH_CHECK(tensor.defined(), name, ": expected a tensor, found an undefined one");
  check_layout(name, tensor);
  TORCH_CHECK(holds(tensor.scalar_type(), numbers), name, ": expected ", text(numbers),
              ", found ", tensor.scalar_type(), name.hint);
  if (memory == Memory::needed || !tensor.is_meta()) check_memory(name, tensor);
  return without_lazy_bits(tensor);
}

}  // namespace mha::detail
