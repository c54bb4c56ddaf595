#include "input_tensors.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

namespace mha::cli {
namespace {

std::string list_of(const detail::TensorSource& file) {
  constexpr size_t most = 8;
  std::string list;
  size_t count = 0;
  file.visit_names("", [&](const std::string& name) {
    list += fmt::format("{}'{}'", list.empty() ? "" : ", ", name);
    return ++count < most;
  });
  if (file.size() > most) list += fmt::format(" and {} more", file.size() - most);
  return list.empty() ? "none" : list;
}

}  // namespace

at::Tensor InputTensors::tensor(const std::string& name, const std::string& option) {
  TORCH_CHECK(has(name), option, ": expected the name of a tensor in ", path(), ", found '",
              name, "'; it holds ", list_of(*file_));
  used_.insert(name);
  return file_->read(name);
}

std::string InputTensors::only_one(
    const std::function<bool(const std::string&, const detail::TensorEntry&)>& fits,
    const std::string& expected) const {
  std::vector<std::string> found;
  for (const auto& [name, entry] : file_->entries()) {
    if (fits(name, entry)) found.push_back(name);
  }
  TORCH_CHECK(found.size() == 1, path(), ": expected ", expected, ", found ", list_of(*file_));
  return found.front();
}

std::vector<std::string> InputTensors::unused() const {
  std::vector<std::string> names;
  file_->visit_names("", [&](const std::string& name) {
    if (used_.count(name) == 0) names.push_back(name);
    return true;
  });
  return names;
}

}  // namespace mha::cli
