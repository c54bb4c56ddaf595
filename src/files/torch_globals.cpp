#include "files/torch_globals.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

#include "files/excerpt.h"

namespace mha::detail {
namespace {

// The storage classes of Python's torch, and what files hold for them.
struct StorageClass {
  std::string_view name, dtype;
};
constexpr StorageClass kStorageClasses[] = {
    {"FloatStorage", "float32"},
    {"DoubleStorage", "float64"},
    {"HalfStorage", "float16"},
    {"BFloat16Storage", "bfloat16"},
    {"LongStorage", "int64"},
    {"IntStorage", "int32"},
    {"ShortStorage", "int16"},
    {"CharStorage", "int8"},
    {"ByteStorage", "uint8"},
    {"BoolStorage", "bool"},
    {"ComplexFloatStorage", "complex64"},
    {"ComplexDoubleStorage", "complex128"},
    {"storage.UntypedStorage", "uint8"},
    {"QInt8Storage", "qint8"},
    {"QUInt8Storage", "quint8"},
};

// Types that safetensors files lack, or pack in another way; only their size is known.
constexpr DtypeInfo kOtherDtypes[] = {
    {"C32", "complex32", 32, {}},
    {"C128", "complex128", 128, {}},
    {"a pair of F4", "float4_e2m1fn_x2", 8, {}},
    {"a quantized type", "qint8", 8, {}},
    {"a quantized type", "quint8", 8, {}},
};

struct NamedRebuild {
  std::string_view name;
  Rebuild rebuild;
};
constexpr NamedRebuild kRebuilds[] = {
    {"torch._utils._rebuild_tensor", Rebuild::tensor},
    {"torch._utils._rebuild_tensor_v2", Rebuild::tensor_v2},
    {"torch._utils._rebuild_tensor_v3", Rebuild::tensor_v3},
    {"torch._utils._rebuild_parameter", Rebuild::parameter},
    {"torch._utils._rebuild_parameter_with_state", Rebuild::parameter},
    {"torch._tensor._rebuild_from_type_v2", Rebuild::from_type},
};

bool begins_with(std::string_view text, std::string_view begin) {
  return text.substr(0, begin.size()) == begin;
}

// `global` without "torch."; empty, which is no type, where it has none.
std::string_view in_torch(std::string_view global) {
  constexpr std::string_view begin = "torch.";
  return begins_with(global, begin) ? global.substr(begin.size()) : "";
}

// The type of that name in Python; null if there is none.
const DtypeInfo* dtype_named(std::string_view torch_name) {
  const auto* found =
      std::find_if(std::begin(kOtherDtypes), std::end(kOtherDtypes),
                   [&](const DtypeInfo& dtype) { return dtype.torch_name == torch_name; });
  return found != std::end(kOtherDtypes) ? found : find_torch_dtype(torch_name);
}

// What C++'s torch::save calls its modules: "__torch__.Module" and
// "__torch__.___torch_mangle_7.Module".
bool is_cpp_module(std::string_view global) {
  if (global == "__torch__.Module") return true;
  constexpr std::string_view begin = "__torch__.___torch_mangle_", end = ".Module";
  if (global.size() <= begin.size() + end.size() || global.substr(0, begin.size()) != begin ||
      global.substr(global.size() - end.size()) != end) {
    return false;
  }
  global = global.substr(begin.size(), global.size() - begin.size() - end.size());
  return std::all_of(global.begin(), global.end(), [](char c) { return c >= '0' && c <= '9'; });
}

}  // namespace

const DtypeInfo* torch_dtype(std::string_view global) {
  return dtype_named(in_torch(global));
}

const DtypeInfo* torch_storage_dtype(std::string_view global) {
  const auto* found = std::find_if(
      std::begin(kStorageClasses), std::end(kStorageClasses),
      [name = in_torch(global)](const StorageClass& storage) { return storage.name == name; });
  return found == std::end(kStorageClasses) ? nullptr : dtype_named(found->dtype);
}

Rebuild torch_rebuild(std::string_view global) {
  for (const auto& [name, rebuild] : kRebuilds) {
    if (global == name) return rebuild;
  }
  return begins_with(global, "torch._utils._rebuild_") ? Rebuild::other : Rebuild::none;
}

bool is_plain_tensor_type(std::string_view global) {
  return global == "torch.Tensor" || global == "torch.nn.parameter.Parameter";
}

bool is_known_global(const std::string& where, const std::string& global) {
  if (is_cpp_module(global)) return true;
  TORCH_CHECK(!begins_with(global, "__torch__."), where, ": ", excerpt(global),
              ": a TorchScript archive holds code, which is not read: in Python, "
              "torch.save(torch.jit.load(path).state_dict(), other_path) writes its weights");
  return global == "collections.OrderedDict" || global == "torch.Size" ||
         is_plain_tensor_type(global) || torch_rebuild(global) != Rebuild::none ||
         torch_storage_dtype(global) != nullptr || torch_dtype(global) != nullptr;
}

}  // namespace mha::detail
