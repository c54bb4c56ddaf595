#include "layer_input.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "text.h"

namespace mha::cli {
namespace {

std::string list_of(const detail::TensorEntries& entries) {
  constexpr size_t most = 8;
  std::string list;
  size_t count = 0;
  for (const auto& [name, entry] : entries) {
    if (++count > most) break;
    list += fmt::format("{}'{}'", list.empty() ? "" : ", ", name);
  }
  if (entries.size() > most) list += fmt::format(" and {} more", entries.size() - most);
  return list.empty() ? "none" : list;
}

}  // namespace

at::Tensor LayerInput::tensor(const std::string& name, const std::string& option) {
  TORCH_CHECK(file_->entries().count(name) > 0, option, ": expected the name of a tensor in ",
              file_->path(), ", found '", name, "'; it holds ", list_of(file_->entries()));
  used_.insert(name);
  return file_->read(name);
}

LayerInput::Sequences LayerInput::sequences(const std::set<std::string>& other_names) const {
  const auto has = [this](const char* name) { return file_->entries().count(name) > 0; };
  if (has("query")) {
    TORCH_CHECK(!has("x"), file_->path(), ": expected 'query' or 'x', found both");
    TORCH_CHECK(has("key") == has("value"), file_->path(),
                ": expected both 'key' and 'value' or neither, found only '",
                has("key") ? "key" : "value", "'");
    return has("key") ? Sequences{"query", "key", "value"} : Sequences{"query", "", ""};
  }
  if (has("x")) return {"x", "", ""};
  std::vector<std::string> candidates;
  for (const auto& [name, entry] : file_->entries()) {
    if (other_names.count(name) == 0) candidates.push_back(name);
  }
  TORCH_CHECK(candidates.size() == 1, file_->path(),
              ": expected a tensor 'query' or 'x', or a single tensor beside those of the mask "
              "options, found ",
              list_of(file_->entries()));
  return {candidates.front(), "", ""};
}

at::Tensor LayerInput::sequence(const std::string& name, at::ScalarType dtype) {
  if (name.empty()) return {};
  const at::Tensor tensor = this->tensor(name, "--input");
  TORCH_CHECK(tensor.scalar_type() == dtype, file_->path(), ": ", name, ": expected ",
              dtype_text(dtype), " like the weights, found ", dtype_text(tensor.scalar_type()));
  return tensor;
}

std::vector<std::string> LayerInput::unused() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : file_->entries()) {
    if (used_.count(name) == 0) names.push_back(name);
  }
  return names;
}

}  // namespace mha::cli
