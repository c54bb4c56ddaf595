#include "files/dtype.h"

#include <algorithm>
#include <array>

namespace mha::detail {
namespace {

// The order is the reference implementation's, which sorts the tensors of a file by it. Types
// without a counterpart in every supported LibTorch are known by size, so that a file with such
// a tensor can be checked and its other tensors read.
constexpr std::array<DtypeInfo, 22> kDtypes = {{
    {"BOOL", "bool", 8, at::kBool},
    {"F4", "", 4, {}},
    {"F6_E2M3", "", 6, {}},
    {"F6_E3M2", "", 6, {}},
    {"U8", "uint8", 8, at::kByte},
    {"I8", "int8", 8, at::kChar},
    {"F8_E5M2", "float8_e5m2", 8, {}},
    {"F8_E4M3", "float8_e4m3fn", 8, {}},
    {"F8_E8M0", "float8_e8m0fnu", 8, {}},
    {"F8_E4M3FNUZ", "float8_e4m3fnuz", 8, {}},
    {"F8_E5M2FNUZ", "float8_e5m2fnuz", 8, {}},
    {"I16", "int16", 16, at::kShort},
    {"U16", "uint16", 16, {}},
    {"F16", "float16", 16, at::kHalf},
    {"BF16", "bfloat16", 16, at::kBFloat16},
    {"I32", "int32", 32, at::kInt},
    {"U32", "uint32", 32, {}},
    {"F32", "float32", 32, at::kFloat},
    {"C64", "complex64", 64, {}},
    {"F64", "float64", 64, at::kDouble},
    {"I64", "int64", 64, at::kLong},
    {"U64", "uint64", 64, {}},
}};

template <typename Matches>
const DtypeInfo* find(Matches matches) {
  const auto* found = std::find_if(kDtypes.data(), kDtypes.data() + kDtypes.size(), matches);
  return found == kDtypes.data() + kDtypes.size() ? nullptr : found;
}

}  // namespace

const DtypeInfo* find_dtype(std::string_view name) {
  return find([&](const DtypeInfo& dtype) { return dtype.name == name; });
}

const DtypeInfo* find_dtype(at::ScalarType type) {
  return find([&](const DtypeInfo& dtype) { return dtype.type == type; });
}

const DtypeInfo* find_torch_dtype(std::string_view torch_name) {
  if (torch_name.empty()) return nullptr;
  return find([&](const DtypeInfo& dtype) { return dtype.torch_name == torch_name; });
}

std::string dtype_names() {
  std::string names;
  for (const DtypeInfo& dtype : kDtypes) {
    names.append(names.empty() ? "" : ", ").append(dtype.name);
  }
  return names;
}

}  // namespace mha::detail
