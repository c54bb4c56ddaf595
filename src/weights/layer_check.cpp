#include "weights/layer_check.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <locale>
#include <sstream>

#include "files/excerpt.h"
#include "runtime/message.h"
#include "weights/find_layers.h"
#include "weights/options_metadata.h"

namespace mha::detail {

namespace {

bool is_floating(const DtypeInfo& dtype) {
  return dtype.type && c10::isFloatingType(*dtype.type);
}

// How the rotary positions that the file tells of, if any, differ from the module's in what the
// weights are made for: the pairs. Base and scaling may change, for longer contexts.
std::string rotary_problem(const TensorSource& file, const MultiHeadAttentionImpl& module) {
  const auto saved = rotary_in(file.path(), file.metadata());
  const auto& rotary = module.options.rotary();
  if (!saved) return {};
  if (!rotary) {
    return message("\n  rotary: expected none, found ", *saved, " in the metadata");
  }
  const auto dim = [&](const RotaryOptions& options) {
    return options.rotary_dim().value_or(module.head_dim());
  };
  if (saved->pairing() == rotary->pairing() && dim(*saved) == dim(*rotary)) return {};
  return message("\n  rotary: expected pairs ", rotary->pairing(), " in ", dim(*rotary),
                 " elements, found ", saved->pairing(), " in ", dim(*saved),
                 " in the metadata");
}

}  // namespace

void check_layer(const TensorSource& file, const Layout& layout,
                 const WeightFileOptions& options, const std::vector<FileTensor>& expected,
                 std::string_view dtype, const HeadNumbers& heads,
                 const MultiHeadAttentionImpl* module) {
  constexpr size_t max_unexpected = 20;  // of a whole model that has no such prefix
  const std::string& prefix = options.prefix();
  std::ostringstream problems;
  problems.imbue(std::locale::classic());
  size_t unexpected = 0;
  for (const FileTensor& tensor : expected) {
    const std::string name = join(prefix, tensor.held.name);
    const TensorEntry* found = entry_at(file, options, tensor.held.name);
    if (found == nullptr) {
      problems << "\n  missing: " << excerpt(name) << ", " << dtype << " "
               << at::IntArrayRef(tensor.shape);
      continue;
    }
    const TensorEntry& entry = *found;
    if (entry.shape != tensor.shape) {
      problems << "\n  shape of " << excerpt(name) << ": expected "
               << at::IntArrayRef(tensor.shape) << ", found " << at::IntArrayRef(entry.shape);
    }
    const bool floating = is_floating(*entry.dtype);
    if (entry.dtype->name != dtype && !(floating && options.convert_dtype())) {
      problems << "\n  dtype of " << excerpt(name) << ": expected " << dtype << ", found "
               << entry.dtype->name
               << (floating ? ", which convert_dtype(true) would convert" : "");
    }
  }
  for (const std::string& name : names_at(file, prefix)) {
    const bool known =
        is_among(layout.description().ignored, name) || is_among(options.ignored(), name) ||
        std::any_of(expected.begin(), expected.end(),
                    [&](const FileTensor& tensor) { return tensor.held.name == name; });
    if (known) continue;
    if (++unexpected <= max_unexpected) {
      problems << "\n  unexpected: " << excerpt(join(prefix, name));
    }
  }
  if (unexpected > max_unexpected) {
    problems << "\n  unexpected: " << unexpected - max_unexpected << " more";
  }
  const auto compare = [&](const char* name, std::optional<int64_t> number,
                           std::optional<int64_t> saved) {
    if (number && saved && *number != *saved) {
      problems << "\n  " << name << ": expected " << *number << ", found " << *saved
               << " in the metadata";
    }
  };
  compare("num_heads", heads.num_heads, num_heads_in(file.path(), file.metadata()));
  compare("num_kv_heads", heads.num_kv_heads, num_kv_heads_in(file.path(), file.metadata()));
  if (module != nullptr) problems << rotary_problem(file, *module);
  const std::string text = problems.str();
  TORCH_CHECK(text.empty(), file.path(), ": the ", layout, " layer at prefix ", excerpt(prefix),
              " does not fit:", text);
}

const DtypeInfo& dtype_of_projections(const TensorSource& file, const Layout& layout,
                                      const WeightFileOptions& options,
                                      const std::vector<FileTensor>& tensors) {
  const auto where = [&] {
    return message(file.path(), ": the ", layout, " layer at prefix ",
                   excerpt(options.prefix()), ": ");
  };
  const DtypeInfo* held = nullptr;
  for (const FileTensor& tensor : tensors) {
    const auto& name = tensor.held.parameters.front();
    const bool is_projection =
        name[0] == 'W' && name.compare(4, std::string::npos, "weight") == 0;
    const TensorEntry* found = entry_at(file, options, tensor.held.name);
    if (found == nullptr) continue;
    const DtypeInfo* dtype = found->dtype;
    TORCH_CHECK(is_floating(*dtype), where(), "dtype of ",
                excerpt(join(options.prefix(), tensor.held.name)),
                ": expected a floating one, found ", dtype->name);
    if (!is_projection) continue;
    held = held == nullptr ? dtype : find_dtype(c10::promoteTypes(*held->type, *dtype->type));
    TORCH_CHECK(held != nullptr, where(), "dtype of ",
                excerpt(join(options.prefix(), tensor.held.name)),
                ": expected one that files can hold with the others, found ", dtype->name);
  }
  TORCH_CHECK(held != nullptr, where(), "expected a floating dtype, found none");
  return *held;
}

}  // namespace mha::detail
